"""Pool, host memory and page table in numpy, for moves of KV: a token's KV is its name."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sparsespec_jax.kv.allocator import TRASH_SLOT
from sparsespec_jax.kv.space import Evict, Forget, Map, Move, Restore

NOTHING = -1


class SimulatedPool:
    """`names` [slots] of the tokens in the pool, chunks of names in `host`, and a page `table`."""

    def __init__(self, slots: int, rows: int, width: int):
        self.names = np.full(slots, NOTHING)
        self.table = np.full((rows, width), TRASH_SLOT)
        self.host: dict[int, np.ndarray] = {}

    def write(self, slots: np.ndarray, names: Sequence[int]) -> None:
        assert len(slots) == len(names)
        self.names[slots] = names

    def move(self, moves: list[Move]) -> None:
        """What has left its slots is not to be found there any more."""
        for move in moves:
            match move:
                case Evict(slots, chunk):
                    assert len(slots)
                    assert slots.all()
                    assert chunk not in self.host
                    self.host[chunk] = self.names[slots]
                    self.names[slots] = NOTHING
                case Restore(chunk, slots):
                    assert len(slots) == len(self.host[chunk])
                    assert slots.all()
                    self.names[slots] = self.host.pop(chunk)
                case Map(row, position, slots):
                    assert position + len(slots) <= self.table.shape[1]
                    assert slots.all()
                    self.table[row, position : position + len(slots)] = slots
                case Forget(chunk):
                    del self.host[chunk]
