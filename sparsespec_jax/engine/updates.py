"""The page-table section of a plan."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sparsespec_jax.engine.plan import Plan
from sparsespec_jax.engine.row import Row
from sparsespec_jax.kv.manager import KvManager


class Updates:
    """Fills it, entry by entry, with slots from the manager."""

    def __init__(self, plan: Plan, kv: KvManager):
        self._entries = plan.updates
        self._kv = kv
        self._used = 0

    def map(self, wanted: Sequence[tuple[Row, int]]) -> list[bool]:
        """Map the positions of each row up to its end, in turn, while they fit; whether all are."""
        growing, room = [], len(self._entries) - self._used
        for row, end in wanted:
            count = min(end - row.kv.mapped, room)
            if count > 0:
                growing.append((row, row.kv.mapped, count))
                room -= count
        found = self._kv.take([(row.kv, count) for row, _, count in growing])
        if growing:
            rows, starts, _ = zip(*growing, strict=True)
            self._fill(rows, np.array(starts), found)
        return [row.kv.mapped >= end for row, end in wanted]

    def _fill(self, rows: Sequence[Row], starts: np.ndarray, slots: list[np.ndarray]) -> None:
        """In one go, as every row of a step may grow by a position."""
        counts = np.array([len(part) for part in slots])
        firsts = self._used + counts.cumsum() - counts
        self._used += int(counts.sum())
        entries = self._entries[firsts[0] : self._used]
        entries[:, 0] = np.repeat([row.index for row in rows], counts)
        entries[:, 1] = np.arange(firsts[0], self._used) + np.repeat(starts - firsts, counts)
        entries[:, 2] = np.concatenate(slots)
        for row, start, first, count in zip(rows, starts, firsts, counts, strict=True):
            if start < len(row.request.prompt):  # tokens that are known
                known = row.request.prompt[start : start + count]
                self._entries[first : first + len(known), 3] = known
