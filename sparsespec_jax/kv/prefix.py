"""Prompts that several requests share: their KV is computed once and held by reference counts.

A prefix is a whole prompt but its last token, whose KV every request computes for itself (that
pass gives the request's first logits). Its slots belong to the prefix, never to a request.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Iterator

import numpy as np

from sparsespec_jax.kv.space import KvSpace, Segment


@dataclasses.dataclass(eq=False)
class Prefix:
    """The cached tokens of one prompt.

    users: requests that hold it; running: those of them that run, and need it on the device.
    ready: whether a user's prefill of it is dispatched.
    version: how often it came back from host memory, to other slots.
    """

    key: bytes
    segment: Segment
    users: int = 0
    running: int = 0
    ready: bool = False
    version: int = 0

    def __len__(self) -> int:
        return len(self.segment)


class PrefixCache:
    """Prefixes in use, by prompt. One is kept while a request uses it or waits with its prompt."""

    def __init__(self, space: KvSpace):
        self._space = space
        self._prefixes: dict[bytes, Prefix] = {}
        self._waiting: Counter[bytes] = Counter()

    @staticmethod
    def key(prompt: np.ndarray) -> bytes:
        return prompt.astype(np.int32).tobytes()

    @property
    def tokens(self) -> int:
        """Of all prefixes, on the device."""
        return sum(len(prefix.segment.slots) for prefix in self._prefixes.values())

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
        """Slots that `acquire` takes for a prompt of `length` tokens."""
        prefix = self._prefixes.get(key)
        return length - 1 if prefix is None else prefix.segment.away

    def acquire(self, key: bytes, length: int) -> Prefix:
        """The prefix of a prompt of `length` tokens, on the device; new if no other has it."""
        if key not in self._prefixes:
            prefix = Prefix(key, Segment())
            self._space.grow([(prefix.segment, length - 1)])
            self._prefixes[key] = prefix
        prefix = self._prefixes[key]
        prefix.users += 1
        while prefix.segment.chunks:
            self.restore(prefix)
        return prefix

    def restore(self, prefix: Prefix) -> int:
        """Bring a chunk of it back to the device; how many tokens that is."""
        prefix.version += 1
        return self._space.restore(prefix.segment)

    @contextlib.contextmanager
    def kept_on_device(self, key: bytes) -> Iterator[None]:
        """The prefix of this prompt, if there is one, counts as that of a running request."""
        prefix = self._prefixes.get(key)
        if prefix is not None:
            prefix.running += 1
        yield
        if prefix is not None:
            prefix.running -= 1

    def release(self, prefix: Prefix) -> None:
        """A user is gone."""
        prefix.users -= 1
        self._drop_unused(prefix.key)

    def drop_idle(self, *, keep: bytes | None = None) -> None:
        """Make room: drop the prefixes that requests only wait for, but for the one of `keep`."""
        for key, prefix in list(self._prefixes.items()):
            if not (prefix.users or prefix.running or key == keep):
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
        self._space.clear(prefix.segment)
