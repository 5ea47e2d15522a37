"""Prefixes: computed once, kept while they are used or about to be, and given back in full."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sparsespec_jax.kv.prefix import Prefix, PrefixCache
from sparsespec_jax.kv.space import KvSpace
from tests.sparsespec_jax.kv.simulated_pool import SimulatedPool

CAPACITY = 12
CHUNK, HOST_CHUNKS = 3, 4
PROMPTS = [np.arange(length, dtype=np.int32) for length in (1, 2, 4, 5, 7)]


class Traffic(RuleBasedStateMachine):
    """Requests wait with a prompt, use its prefix, fill it, are cancelled, finish.

    Prefixes that nobody runs with leave for host memory, chunk by chunk. A token's KV is its name.
    """

    @initialize()
    def start(self):
        self.space = KvSpace(CAPACITY + 1, CHUNK, HOST_CHUNKS)
        self.pool = SimulatedPool(CAPACITY + 1, 1, 8)
        self.cache = PrefixCache(self.space)
        self.waiting: list[int] = []
        self.users: list[tuple[int, Prefix]] = []
        self.kept: dict[int, Prefix] = {}  # prefixes that must exist, by prompt

    def key(self, prompt: int) -> bytes:
        return PrefixCache.key(PROMPTS[prompt])

    def used(self, prompt: int) -> bool:
        return any(other == prompt for other, _ in self.users)

    def forget_the_unused(self):
        for prompt, prefix in list(self.kept.items()):
            awaited = prefix.ready and prompt in self.waiting
            if not self.used(prompt) and not awaited:
                del self.kept[prompt]

    @rule(prompt=st.sampled_from(range(len(PROMPTS))))
    def a_request_waits(self, prompt):
        self.cache.enqueue(self.key(prompt))
        self.waiting.append(prompt)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def a_waiting_request_is_cancelled(self, data):
        prompt = self.waiting.pop(data.draw(st.integers(0, len(self.waiting) - 1)))
        self.cache.dequeue(self.key(prompt))
        self.forget_the_unused()

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def a_waiting_request_is_admitted(self, data):
        index = data.draw(st.integers(0, len(self.waiting) - 1))
        prompt = self.waiting[index]
        length = len(PROMPTS[prompt])
        missing, free = self.cache.missing_slots(self.key(prompt), length), self.space.free
        if missing > free:
            return
        known = self.kept.get(prompt)
        chunks, version = (len(known.segment.chunks), known.version) if known else (0, 0)
        prefix = self.cache.acquire(self.key(prompt), length)
        self.waiting.pop(index)
        self.cache.dequeue(self.key(prompt))
        assert self.space.free == free - missing
        assert len(prefix) == len(prefix.segment.slots) == length - 1
        assert prefix.version == version + chunks, "who mapped the old slots must see that"
        assert prefix is self.kept.setdefault(prompt, prefix)
        self.users.append((prompt, prefix))
        self.pool.move(self.space.take_moves())
        if known is None:
            self.pool.write(prefix.segment.slots, self.names(prompt))

    def names(self, prompt: int) -> list[int]:
        return [100 * prompt + position for position in range(len(PROMPTS[prompt]) - 1)]

    @precondition(lambda self: self.kept)
    @rule(data=st.data())
    def a_chunk_of_a_prefix_leaves(self, data):
        segment = self.kept[data.draw(st.sampled_from(sorted(self.kept)))].segment
        if len(segment.slots) and not self.space.host_is_full:
            self.space.evict(segment)

    @precondition(lambda self: self.kept)
    @rule(data=st.data())
    def a_chunk_of_a_prefix_comes_back(self, data):
        prefix = self.kept[data.draw(st.sampled_from(sorted(self.kept)))]
        if prefix.segment.chunks and prefix.segment.chunks[-1][1] <= self.space.free:
            version, here = prefix.version, len(prefix.segment.slots)
            moved = self.cache.restore(prefix)
            assert prefix.version == version + 1
            assert len(prefix.segment.slots) == here + moved

    @precondition(lambda self: self.users)
    @rule(data=st.data())
    def a_prefix_is_filled(self, data):
        _, prefix = data.draw(st.sampled_from(self.users))
        prefix.ready = True

    @precondition(lambda self: self.users)
    @rule(data=st.data())
    def a_user_leaves(self, data):
        _, prefix = self.users.pop(data.draw(st.integers(0, len(self.users) - 1)))
        self.cache.release(prefix)
        self.forget_the_unused()

    @rule(prompt=st.sampled_from(range(len(PROMPTS))))
    def room_is_made_for_another_prompt(self, prompt):
        """Only what nobody uses goes, and never what it is made for."""
        self.cache.drop_idle(keep=self.key(prompt))
        self.kept = {p: x for p, x in self.kept.items() if self.used(p) or p == prompt}

    @invariant()
    def users_of_a_prompt_share_its_prefix(self):
        for prompt, prefix in self.users:
            assert prefix is self.kept[prompt]
        for prompt, prefix in self.kept.items():
            assert prefix.users == sum(other == prompt for other, _ in self.users)

    @invariant()
    def the_pool_and_the_host_hold_the_kept_prefixes_and_nothing_else(self):
        segments = [prefix.segment for prefix in self.kept.values()]
        slots = [slot for segment in segments for slot in segment.slots.tolist()]
        assert len(set(slots)) == len(slots) == CAPACITY - self.space.free
        assert self.space.away == sum(segment.away for segment in segments)
        for prompt, text in enumerate(PROMPTS):
            missing = self.cache.missing_slots(self.key(prompt), len(text))
            kept = self.kept.get(prompt)
            assert missing == (len(text) - 1 if kept is None else kept.segment.away)

    @invariant()
    def the_kv_of_a_prefix_follows_it(self):
        self.pool.move(self.space.take_moves())
        for prompt, prefix in self.kept.items():
            chunks = [self.pool.host[number] for number, _ in prefix.segment.chunks]
            found = [*chunks, self.pool.names[prefix.segment.slots]]
            assert np.concatenate(found).tolist() == self.names(prompt)

    def teardown(self):
        for _, prefix in self.users:
            self.cache.release(prefix)
        for prompt in self.waiting:
            self.cache.dequeue(self.key(prompt))
        assert (self.space.free, self.space.away) == (CAPACITY, 0)
        self.pool.move(self.space.take_moves())
        assert not self.pool.host


TestTraffic = Traffic.TestCase
TestTraffic.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


def _cache() -> PrefixCache:
    return PrefixCache(KvSpace(CAPACITY + 1, CHUNK, HOST_CHUNKS))


def test_nobody_can_stop_waiting_who_does_not_wait():
    with pytest.raises(KeyError, match="no request waits with this prompt of 5 tokens"):
        _cache().dequeue(PrefixCache.key(PROMPTS[3]))


def test_a_finished_prefix_outlives_its_users_while_someone_waits_for_it():
    cache, key = _cache(), PrefixCache.key(PROMPTS[3])
    prefix = cache.acquire(key, 5)
    cache.enqueue(key)
    prefix.ready = True
    cache.release(prefix)
    assert cache.acquire(key, 5) is prefix


def test_an_unfinished_prefix_dies_with_its_last_user_even_if_someone_waits():
    cache, key = _cache(), PrefixCache.key(PROMPTS[3])
    prefix = cache.acquire(key, 5)
    cache.enqueue(key)
    cache.release(prefix)
    assert cache.acquire(key, 5) is not prefix


def test_prompts_are_told_apart_by_every_token_and_by_their_length():
    prompts = [[1, 2, 3], [1, 2], [1, 2, 4], [1, 2, 3, 0], [0, 1, 2, 3]]
    assert len({PrefixCache.key(np.array(prompt)) for prompt in prompts}) == len(prompts)
    assert PrefixCache.key(np.array([1, 2], np.int64)) == PrefixCache.key(
        np.array([1, 2], np.int32)
    )


def test_a_prompt_of_one_token_has_a_prefix_of_none():
    cache, key = PrefixCache(KvSpace(2, 1, 0)), PrefixCache.key(PROMPTS[0])
    assert cache.missing_slots(key, 1) == 0
    assert len(cache.acquire(key, 1)) == 0


def test_a_prefix_that_is_partly_in_host_memory_comes_back_for_its_next_user():
    """To other slots, which whoever mapped the old ones can tell by its version."""
    space = KvSpace(CAPACITY + 1, CHUNK, HOST_CHUNKS)
    cache, key = PrefixCache(space), PrefixCache.key(PROMPTS[4])
    prefix = cache.acquire(key, 7)
    last = prefix.segment.slots[3:].tolist()
    space.evict(prefix.segment)
    assert cache.missing_slots(key, 7) == 3
    assert cache.acquire(key, 7) is prefix
    assert (prefix.users, prefix.version) == (2, 1)
    assert len(prefix.segment.slots) == 6
    assert prefix.segment.slots[3:].tolist() == last
    assert cache.missing_slots(key, 7) == 0


def test_a_prefix_dropped_from_host_memory_leaves_nothing_there():
    space = KvSpace(CAPACITY + 1, CHUNK, HOST_CHUNKS)
    cache, key = PrefixCache(space), PrefixCache.key(PROMPTS[4])
    prefix = cache.acquire(key, 7)
    space.evict(prefix.segment)
    cache.release(prefix)
    assert (space.free, space.away) == (CAPACITY, 0)
