"""Prompts that several requests share: their KV is computed once and held by reference counts.

A prefix is a whole prompt but its last token, whose KV every request computes for itself (that
pass gives the request's first logits). Its slots belong to the prefix, never to a request.
"""

from __future__ import annotations

import dataclasses
from collections import Counter

import numpy as np

from sparsespec_jax.kv.allocator import SlotAllocator


@dataclasses.dataclass(eq=False)
class Prefix:
    """The cached tokens of one prompt; `ready` once a user's prefill of them is dispatched."""

    key: bytes
    slots: np.ndarray
    users: int = 0
    ready: bool = False

    def __len__(self) -> int:
        return len(self.slots)


class PrefixCache:
    """Prefixes in use, by prompt. One is kept while a request uses it or waits with its prompt."""

    def __init__(self, allocator: SlotAllocator):
        self._allocator = allocator
        self._prefixes: dict[bytes, Prefix] = {}
        self._waiting: Counter[bytes] = Counter()

    @staticmethod
    def key(prompt: np.ndarray) -> bytes:
        return prompt.astype(np.int32).tobytes()

    def enqueue(self, key: bytes) -> None:
        """A request with this prompt waits."""
        self._waiting[key] += 1

    def dequeue(self, key: bytes) -> None:
        """It waits no longer (admitted or cancelled). Raises KeyError if none waits."""
        if key not in self._waiting:
            raise KeyError(f"no request waits with this prompt of {len(key) // 4} tokens")
        self._waiting[key] -= 1
        if not self._waiting[key]:
            del self._waiting[key]
        self._drop_unused(key)

    def missing_slots(self, key: bytes, length: int) -> int:
        """Slots to reserve before `acquire` may be called for a prompt of `length` tokens."""
        return 0 if key in self._prefixes else length - 1

    def acquire(self, key: bytes, length: int) -> Prefix:
        """The prefix of a prompt of `length` tokens, new if no other user has it."""
        if key not in self._prefixes:
            self._prefixes[key] = Prefix(key, self._allocator.take(length - 1))
        prefix = self._prefixes[key]
        prefix.users += 1
        return prefix

    def release(self, prefix: Prefix) -> None:
        """A user is gone."""
        prefix.users -= 1
        self._drop_unused(prefix.key)

    def drop_idle(self, *, keep: bytes) -> None:
        """Make room: drop the prefixes that requests only wait for, but for the one of `keep`."""
        for key, prefix in list(self._prefixes.items()):
            if not prefix.users and key != keep:
                self._drop(prefix)

    def _drop_unused(self, key: bytes) -> None:
        prefix = self._prefixes.get(key)
        if prefix is None or prefix.users:
            return
        if self._waiting[key] and prefix.ready:
            return
        self._drop(prefix)

    def _drop(self, prefix: Prefix) -> None:
        del self._prefixes[prefix.key]
        self._allocator.give_back(prefix.slots)
        self._allocator.release(len(prefix))
