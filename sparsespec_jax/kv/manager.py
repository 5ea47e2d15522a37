"""Whose KV is on the device: admission, and what to do when the slots run out.

Output lengths are not known. `aggressive` admission fills the pool all the same; when the running
rows cannot grow any more the youngest are *parked*: they sit out, and their KV moves to host memory
chunk by chunk, as slots are needed. Parked rows come back first in, first out, before anybody new
is admitted, as soon as there is room for them and for the growth of the others. The oldest row is
never parked, so that everything ends. Where host memory is full, or by policy, a parked row's KV is
dropped instead and computed again from its tokens.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from sparsespec_jax.config import KvPolicy
from sparsespec_jax.kv.prefix import Prefix, PrefixCache
from sparsespec_jax.kv.space import KvSpace, Move, Segment

# Tokens of every running row that must have room before one is admitted or comes back, and before
# rows stop being parked: far enough apart that rows do not come and go.
HIGH_WATERMARK = 32
LOW_WATERMARK = 8


@dataclasses.dataclass(eq=False)
class Holding:
    """What a batch row holds of the KV cache: a share of a prefix, and KV of its own.

    order: the lower, the longer its KV stays on the device.
    most: positions it may have at most, by the policy's knowledge.
    length: tokens, as far as results have been read.
    unread: tokens that dispatched steps may have added since.
    target: positions it needs soon, whatever else happens: a prompt's.
    mapped: positions whose page-table entries the device has.
    lost: its KV was dropped, and its share of the prefix with it.
    """

    row: int
    order: int
    key: bytes
    prefix: Prefix
    own: Segment
    most: int
    length: int
    target: int
    unread: int = 0
    mapped: int = 0
    parked: bool = False
    lost: bool = False
    prefix_version: int = 0

    @property
    def due(self) -> int:
        """Slots it needs soon."""
        return max(0, self.target - max(self.mapped, self.own.first))


@dataclasses.dataclass
class KvStats:
    """Tokens moved to host memory and back, or dropped and computed again, and rows parked."""

    evicted: int = 0
    restored: int = 0
    dropped: int = 0
    parked: int = 0


class KvManager:
    """The KV of all rows. Knows no arrays: `take_moves` is for the executor."""

    def __init__(self, space: KvSpace, policy: KvPolicy, k: int, chunks_per_step: int):
        """`chunks_per_step`: how many may move in the shadow of a step, each way."""
        self._space = space
        self._prefixes = PrefixCache(space)
        self._reserves = policy == "conservative"
        self._k = k
        self._chunks_per_step = chunks_per_step
        self._running: list[Holding] = []  # by order
        self._parked: deque[Holding] = deque()  # first come, first back
        self.stats = KvStats()

    @property
    def parked(self) -> int:
        return len(self._parked)

    def take_moves(self) -> list[Move]:
        """What the executor must do, in order, before the next step."""
        return self._space.take_moves()

    # Requests come and go.

    def enqueue(self, key: bytes) -> None:
        """A request with this prompt waits."""
        self._prefixes.enqueue(key)

    def dequeue(self, key: bytes) -> None:
        """It waits no longer."""
        self._prefixes.dequeue(key)

    def admit(
        self, row: int, order: int, key: bytes, prompt_length: int, most: int
    ) -> Holding | None:
        """What batch row `row` holds from now on, or None if there is no room for it.

        Its request must have been `enqueue`d. `order`: among equals, the last is the first to be
        parked; `most`: positions it may have at most.
        """
        if self._parked:
            return None
        if not self._has_room(key, prompt_length, most):
            # The first in line goes before prefixes kept for those behind it.
            self._prefixes.drop_idle(keep=key)
            if not self._has_room(key, prompt_length, most):
                return None
        prefix = self._acquire(key, prompt_length)
        self._prefixes.dequeue(key)
        own = Segment(len(prefix))
        holding = Holding(row, order, key, prefix, own, most, prompt_length, prompt_length)
        holding.prefix_version = prefix.version
        self._run(holding)
        return holding

    def _acquire(self, key: bytes, prompt_length: int) -> Prefix:
        away = self._space.away
        prefix = self._prefixes.acquire(key, prompt_length)
        self.stats.restored += away - self._space.away
        return prefix

    def _has_room(self, key: bytes, prompt_length: int, most: int) -> bool:
        missing = self._prefixes.missing_slots(key, prompt_length)
        if self._reserves:
            # An expected length can be wrong.
            ends = (max(holding.most, holding.mapped) for holding in self._running)
            promised = sum(ends) - sum(holding.own.first for holding in self._running)
            promised += self._prefixes.tokens + missing + most - (prompt_length - 1)
            return promised <= self._space.capacity
        return self._room(missing + 1 + self._k)

    def _room(self, count: int) -> bool:
        """Whether `count` slots can be taken and the running rows still grow for a while."""
        due = sum(holding.due for holding in self._running)
        return self._space.free >= count + due + HIGH_WATERMARK * len(self._running)

    def release(self, holding: Holding) -> None:
        """The row's request is gone."""
        if holding.parked:
            self._parked.remove(holding)
        else:
            self._stop(holding)
        self._space.clear(holding.own)
        if not holding.lost:
            self._prefixes.release(holding.prefix)

    def take(self, wanted: Sequence[tuple[Holding, int]]) -> list[np.ndarray]:
        """Slots of the next positions of each, in turn, or of as many as there are slots for."""
        shared, growing, free = [], [], self._space.free
        for holding, count in wanted:
            start = holding.mapped
            shared.append(holding.prefix.segment.slots[start : start + count])
            fresh = min(count - len(shared[-1]), free)
            growing.append((holding.own, fresh))
            free -= fresh
            holding.mapped += len(shared[-1]) + fresh
        own = self._space.grow(growing)
        return [
            np.concatenate([front, back]) if len(front) else back
            for front, back in zip(shared, own, strict=True)
        ]

    def _run(self, holding: Holding) -> None:
        bisect.insort(self._running, holding, key=lambda other: other.order)
        holding.prefix.running += 1
        holding.parked = False

    def _stop(self, holding: Holding) -> None:
        self._running.remove(holding)
        holding.prefix.running -= 1

    # When slots run out.

    def make_room(self, growth: Callable[[Sequence[Holding]], int]) -> None:
        """Park rows until the others can grow, and free slots for them.

        What cannot be freed yet must wait a step: see `unread`. `growth`: slots that the rows may
        take in the next step, together.
        """
        need = growth(self._running)
        if need <= self._space.free:
            return
        self._prefixes.drop_idle()
        while len(self._running) > 1:
            if need + self._watermark() <= self._space.free + self._movable():
                break
            self._park(self._running[-1])
            need = growth(self._running)
        self._free_up(need + self._watermark())

    def _watermark(self) -> int:
        return LOW_WATERMARK * (len(self._running) - 1)

    def _movable(self) -> int:
        """Slots of parked rows, and of prefixes that no other row needs."""
        prefixes = {holding.prefix for holding in self._parked if not holding.lost}
        return sum(len(holding.own.slots) for holding in self._parked) + sum(
            len(prefix.segment.slots) for prefix in prefixes if not prefix.running
        )

    def _park(self, holding: Holding) -> None:
        self._stop(holding)
        holding.parked = True
        self._parked.append(holding)
        self.stats.parked += 1

    def _free_up(self, need: int) -> None:
        """Free slots of parked rows, of the last first, until `need` are free."""
        for holding in reversed(self._parked):
            if self._space.free >= need:
                return
            if holding.lost:
                continue
            self._evict(holding, need)
            if self._space.free < need and self._has_slots(holding) and not holding.unread:
                self._drop(holding)
                if self._space.free < need:
                    self._prefixes.drop_idle()  # requests may wait with its prompt

    @staticmethod
    def _has_slots(holding: Holding) -> bool:
        shared = 0 if holding.prefix.running else len(holding.prefix.segment.slots)
        return len(holding.own.slots) + shared > 0

    def _evict(self, holding: Holding, need: int) -> None:
        segments = [holding.own]
        if not holding.prefix.running:
            segments.append(holding.prefix.segment)
        for segment in segments:
            while len(segment.slots) and self._space.free < need and not self._space.host_is_full:
                self.stats.evicted += self._space.evict(segment)

    def _drop(self, holding: Holding) -> None:
        """Its tokens are known: the KV can be computed again."""
        self.stats.dropped += len(holding.own)
        self._space.clear(holding.own)
        self._prefixes.release(holding.prefix)
        holding.lost, holding.mapped, holding.target = True, 0, holding.length

    def resume(self) -> list[Holding]:
        """Bring back who was parked first, as far as there is room and bandwidth for it.

        Returns the rows that run again; one with nothing mapped starts with its tokens.
        """
        resumed, budget = [], self._chunks_per_step
        while self._parked:
            holding = self._parked[0]
            if not self._room_to_resume(holding):
                break
            if not holding.lost:
                budget = self._restore(holding, budget if self._running else None)
                if holding.own.chunks or holding.prefix.segment.chunks:
                    break
            self._parked.popleft()
            self._come_back(holding)
            resumed.append(holding)
        return resumed

    def _room_to_resume(self, holding: Holding) -> bool:
        need = self._missing(holding) + HIGH_WATERMARK
        if not self._room(need):
            self._prefixes.drop_idle(keep=holding.key)
        if self._running:
            return self._room(need)
        # Nobody else runs: the others make room for it, but not with what it shares with them.
        self._parked.popleft()
        with self._prefixes.kept_on_device(holding.key):
            self._free_up(min(need, self._space.capacity))
        self._parked.appendleft(holding)
        return self._space.free >= self._missing(holding)

    def _missing(self, holding: Holding) -> int:
        if holding.lost:
            missing = self._prefixes.missing_slots(holding.key, holding.own.first + 1)
            return missing + holding.due
        return holding.own.away + holding.prefix.segment.away

    def _restore(self, holding: Holding, budget: int | None) -> int | None:
        """Bring back up to `budget` chunks; what is left of it. None: all of them."""
        prefix, own = holding.prefix, holding.own
        while (prefix.segment.chunks or own.chunks) and budget != 0:
            chunks = prefix.segment.chunks or own.chunks
            if chunks[-1][1] > self._space.free:
                break
            if prefix.segment.chunks:
                self.stats.restored += self._prefixes.restore(prefix)
            else:
                self.stats.restored += (tokens := self._space.restore(own))
                self._space.map(holding.row, own.first + own.away, own.slots[:tokens])
            budget = budget and budget - 1
        return budget

    def _come_back(self, holding: Holding) -> None:
        if holding.lost:
            holding.prefix = self._acquire(holding.key, holding.own.first + 1)
            holding.lost = False
        elif holding.prefix_version != holding.prefix.version:
            self._space.map(holding.row, 0, holding.prefix.segment.slots[: holding.mapped])
        holding.prefix_version = holding.prefix.version
        self._run(holding)
