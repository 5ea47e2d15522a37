"""The two places where KV can be: slots of the device's pool, and chunks in host memory.

A segment is the KV of consecutive positions that is kept together: a row's own, or a prefix'. Its
front may be in host memory, in chunks, while the rest is on the device; so it leaves chunk by chunk
as slots are needed, and only what has left must come back.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from sparsespec_jax.kv.allocator import SlotAllocator


class Evict(NamedTuple):
    """Copy the KV of `slots` to host memory, as chunk number `chunk`."""

    slots: np.ndarray
    chunk: int


class Restore(NamedTuple):
    """Copy chunk `chunk` back to the device, to `slots`; the chunk is gone then."""

    chunk: int
    slots: np.ndarray


class Map(NamedTuple):
    """Enter `slots` in the page table of batch row `row`, from `position` on."""

    row: int
    position: int
    slots: np.ndarray


class Forget(NamedTuple):
    """Chunk `chunk` is not needed any more."""

    chunk: int


Move = Evict | Restore | Map | Forget


class Segment:
    """KV of the positions from `first` on: chunks in host memory, and behind them slots."""

    def __init__(self, first: int = 0):
        self.first = first
        self.chunks: list[tuple[int, int]] = []  # number, tokens
        self._buffer = np.empty(0, np.int32)
        self._start = self._end = 0

    def __len__(self) -> int:
        return self.away + self._end - self._start

    @property
    def away(self) -> int:
        """Tokens in host memory."""
        return sum(tokens for _, tokens in self.chunks)

    @property
    def slots(self) -> np.ndarray:
        """Of the tokens on the device, which are the last ones: int32, a view."""
        return self._buffer[self._start : self._end]

    def append(self, slots: np.ndarray) -> None:
        end = self._end + len(slots)
        if end > len(self._buffer):
            grown = np.empty(max(64, 2 * (end - self._start)), np.int32)
            grown[: self._end - self._start] = self.slots
            self._buffer, end = grown, end - self._start
            self._start, self._end = 0, self._end - self._start
        self._buffer[self._end : end] = slots
        self._end = end

    def prepend(self, slots: np.ndarray) -> None:
        self._buffer = np.concatenate([slots, self.slots])
        self._start, self._end = 0, len(self._buffer)

    def pop_front(self, count: int) -> np.ndarray:
        slots = self.slots[:count].copy()
        self._start += len(slots)
        return slots


class KvSpace:
    """Slots and chunks, and segments that move between them.

    Moves are noted in order, for the executor to carry out before the next step: slots are free for
    others as soon as the copy out of them is noted.
    """

    def __init__(self, slots: int, chunk: int, host_chunks: int):
        """`slots`: of the pool, the trash slot included; `chunk`: tokens of a chunk."""
        self.allocator = SlotAllocator(slots)
        self.chunk = chunk
        self.host_chunks = host_chunks
        self._in_host: dict[int, int] = {}
        self._numbers = itertools.count()
        self._moves: list[Move] = []

    @property
    def free(self) -> int:
        return self.allocator.free

    @property
    def capacity(self) -> int:
        return self.allocator.capacity

    @property
    def away(self) -> int:
        """Tokens in host memory."""
        return sum(self._in_host.values())

    @property
    def host_is_full(self) -> bool:
        return len(self._in_host) >= self.host_chunks

    def take_moves(self) -> list[Move]:
        """The moves noted since the last call."""
        moves, self._moves = self._moves, []
        return moves

    def grow(self, wanted: Sequence[tuple[Segment, int]]) -> list[np.ndarray]:
        """So many new slots behind each segment, which must be free together; those slots."""
        slots = self.allocator.take(sum(count for _, count in wanted))
        parts, start = [], 0
        for segment, count in wanted:
            parts.append(slots[start : start + count])
            segment.append(parts[-1])
            start += count
        return parts

    def evict(self, segment: Segment) -> int:
        """Move the first chunk of what is on the device to host memory; how many tokens that is."""
        if self.host_is_full:
            raise RuntimeError(f"host memory holds {self.host_chunks} chunks already")
        slots = segment.pop_front(self.chunk)
        number = next(self._numbers)
        segment.chunks.append((number, len(slots)))
        self._in_host[number] = len(slots)
        self._moves.append(Evict(slots, number))
        self.allocator.give_back(slots)
        return len(slots)

    def restore(self, segment: Segment) -> int:
        """Move the last chunk back to the device; how many tokens that is."""
        number, tokens = segment.chunks[-1]
        slots = self.allocator.take(tokens)
        segment.chunks.pop()
        segment.prepend(slots)
        del self._in_host[number]
        self._moves.append(Restore(number, slots))
        return tokens

    def map(self, row: int, position: int, slots: np.ndarray) -> None:
        """Tell the device that the positions of `row` from `position` on are in `slots`."""
        for start in range(0, len(slots), self.chunk):
            part = slots[start : start + self.chunk].copy()
            self._moves.append(Map(row, position + start, part))

    def clear(self, segment: Segment) -> None:
        """Free all that the segment has; it is empty then."""
        for number, _ in segment.chunks:
            del self._in_host[number]
            self._moves.append(Forget(number))
        segment.chunks.clear()
        self.allocator.give_back(segment.pop_front(len(segment.slots)))
