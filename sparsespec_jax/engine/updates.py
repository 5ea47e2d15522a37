"""The page-table section of a plan."""

from __future__ import annotations

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

    def map(self, row: Row, end: int) -> bool:
        """Map the row's positions up to `end`, or as many as fit; True if all of them are."""
        start = row.kv.mapped
        slots = self._kv.take(row.kv, min(end - start, len(self._entries) - self._used))
        if count := len(slots):
            span = slice(self._used, self._used + count)
            self._entries[span, 0] = row.index
            self._entries[span, 1] = np.arange(start, start + count)
            self._entries[span, 2] = slots
            self._entries[span, 3] = self._known_tokens(row, start, count)
            self._used += count
        return row.kv.mapped >= end

    @staticmethod
    def _known_tokens(row: Row, start: int, count: int) -> np.ndarray:
        tokens = np.full(count, -1, np.int32)
        prompt = row.request.prompt[start : start + count]
        tokens[: len(prompt)] = prompt
        return tokens
