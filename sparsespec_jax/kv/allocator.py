"""Which slots of the KV pool are free. Slot 0 belongs to nobody: padding tokens write there."""

from __future__ import annotations

import numpy as np

TRASH_SLOT = 0


class SlotAllocator:
    """A stack of free slots."""

    def __init__(self, slots: int):
        """`slots`: size of the pool, the trash slot included."""
        if slots < 2:
            raise ValueError(f"the KV pool must hold at least one token, got {slots - 1} slots")
        self.capacity = slots - 1
        self._free = np.arange(self.capacity, 0, -1, dtype=np.int32)
        self._n_free = self.capacity
        self._owned = np.zeros(slots, bool)

    @property
    def free(self) -> int:
        return self._n_free

    @property
    def used(self) -> int:
        return self.capacity - self._n_free

    def take(self, count: int) -> np.ndarray:
        """`count` free slots, int32."""
        if count > self._n_free:
            raise RuntimeError(f"{count} slots asked of {self._n_free} free ones")
        slots = self._free[self._n_free - count : self._n_free][::-1].copy()
        self._n_free -= count
        self._owned[slots] = True
        return slots

    def give_back(self, slots: np.ndarray) -> None:
        """Free `slots`, each of which must be taken."""
        if not self._owned[slots].all() or len(np.unique(slots)) != len(slots):
            raise ValueError(f"slots freed that are not taken, or twice: {slots.tolist()}")
        self._owned[slots] = False
        self._free[self._n_free : self._n_free + len(slots)] = slots
        self._n_free += len(slots)
