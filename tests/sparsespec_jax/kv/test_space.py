"""Segments that move between pool and host memory: each token's KV follows it everywhere."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sparsespec_jax.kv.allocator import TRASH_SLOT
from sparsespec_jax.kv.space import Evict, Forget, KvSpace, Map, Restore, Segment
from tests.sparsespec_jax.kv.simulated_pool import SimulatedPool

ROWS, WIDTH = 3, 64


class Moving(RuleBasedStateMachine):
    """Segments grow, leave, come back and end in any order.

    Every token has a name. It is written to the slot that `grow` gives it, by a step, once the
    moves noted so far are carried out; from then on only moves carry it on.
    """

    @initialize(
        capacity=st.integers(1, 40), chunk=st.sampled_from([1, 3, 8]), host=st.integers(0, 6)
    )
    def start(self, capacity, chunk, host):
        self.capacity = capacity
        self.space = KvSpace(capacity + 1, chunk, host)
        self.pool = SimulatedPool(capacity + 1, ROWS, WIDTH)
        self.segments: list[tuple[Segment, list[int]]] = []
        self.named = 0
        self.unwritten: list[tuple[np.ndarray, list[int]]] = []

    def draw_segment(self, data, where=lambda segment: True):
        return data.draw(st.sampled_from([s for s in self.segments if where(s[0])]))

    def step(self):
        """The executor carries out the moves, then a step writes what is new."""
        self.pool.move(self.space.take_moves())
        for slots, names in self.unwritten:
            self.pool.write(slots, names)
        self.unwritten.clear()

    @rule(first=st.integers(0, 9))
    def a_segment_begins(self, first):
        segment = Segment(first)
        assert len(segment) == segment.away == len(segment.slots) == 0
        assert segment.first == first
        self.segments.append((segment, []))

    @precondition(lambda self: self.segments)
    @rule(data=st.data())
    def one_grows(self, data):
        """In a step, which comes after all the moves before it."""
        segment, names = self.draw_segment(data)
        count = data.draw(st.integers(0, min(self.space.free, 20)))
        [slots] = self.space.grow([(segment, count)])
        assert segment.slots[len(segment.slots) - count :].tolist() == slots.tolist()
        new = list(range(self.named, self.named + count))
        self.named += count
        names += new
        self.unwritten.append((slots, new))
        self.step()

    @precondition(
        lambda self: (
            not self.space.host_is_full and any(len(segment.slots) for segment, _ in self.segments)
        )
    )
    @rule(data=st.data())
    def its_first_chunk_leaves(self, data):
        segment, _ = self.draw_segment(data, lambda segment: len(segment.slots))
        here, away = len(segment.slots), segment.away
        free = self.space.free
        moved = self.space.evict(segment)
        assert moved == min(self.space.chunk, here)
        assert (len(segment.slots), segment.away) == (here - moved, away + moved)
        assert self.space.free == free + moved

    @precondition(lambda self: any(self.can_return(segment) for segment, _ in self.segments))
    @rule(data=st.data())
    def its_last_chunk_comes_back(self, data):
        """Perhaps to slots that a chunk still on its way has just left."""
        segment, _ = self.draw_segment(data, self.can_return)
        here, away = len(segment.slots), segment.away
        moved = self.space.restore(segment)
        assert (len(segment.slots), segment.away) == (here + moved, away - moved)

    def can_return(self, segment: Segment) -> bool:
        return bool(segment.chunks) and segment.chunks[-1][1] <= self.space.free

    @precondition(lambda self: any(segment.away for segment, _ in self.segments))
    @rule(data=st.data())
    def coming_back_without_room_raises_and_changes_nothing(self, data):
        segment, _ = self.draw_segment(data, lambda segment: segment.away)
        if not self.can_return(segment):
            with pytest.raises(RuntimeError, match="slots asked"):
                self.space.restore(segment)

    @precondition(lambda self: self.space.host_is_full and self.segments)
    @rule(data=st.data())
    def nothing_leaves_for_a_full_host(self, data):
        segment, _ = self.draw_segment(data)
        with pytest.raises(RuntimeError, match=f"holds {self.space.host_chunks} chunks already"):
            self.space.evict(segment)

    @precondition(lambda self: self.segments)
    @rule(data=st.data(), row=st.integers(0, ROWS - 1))
    def its_slots_enter_a_page_table(self, data, row):
        segment, names = self.draw_segment(data)
        slots = segment.slots[: WIDTH - segment.first - segment.away]
        position = segment.first + segment.away
        self.space.map(row, position, slots)
        self.step()
        entered = self.pool.table[row, position : position + len(slots)]
        assert self.pool.names[entered].tolist() == names[segment.away :][: len(slots)]

    @precondition(lambda self: self.segments)
    @rule(data=st.data())
    def one_ends(self, data):
        index = data.draw(st.integers(0, len(self.segments) - 1))
        segment, _ = self.segments.pop(index)
        self.space.clear(segment)
        assert len(segment) == segment.away == len(segment.slots) == 0

    @rule()
    def the_moves_are_carried_out(self):
        self.step()
        assert self.space.take_moves() == []

    @invariant()
    def no_slot_is_lost_or_owned_twice(self):
        slots = np.concatenate([np.empty(0, int), *(s.slots for s, _ in self.segments)]).tolist()
        assert TRASH_SLOT not in slots
        assert len(set(slots)) == len(slots) == self.capacity - self.space.free

    @invariant()
    def host_memory_holds_what_is_away_and_no_more_than_it_may(self):
        assert self.space.away == sum(segment.away for segment, _ in self.segments)
        chunks = [chunk for segment, _ in self.segments for chunk, _ in segment.chunks]
        assert len(set(chunks)) == len(chunks) <= self.space.host_chunks
        assert self.space.host_is_full == (len(chunks) == self.space.host_chunks)

    @invariant()
    def a_segment_is_as_long_as_its_tokens(self):
        assert [len(segment) for segment, _ in self.segments] == [len(n) for _, n in self.segments]

    @rule()
    def every_token_is_where_its_segment_says(self):
        self.step()
        for segment, names in self.segments:
            chunks = [self.pool.host[number] for number, _ in segment.chunks]
            assert [len(chunk) for chunk in chunks] == [tokens for _, tokens in segment.chunks]
            found = np.concatenate([np.empty(0, int), *chunks, self.pool.names[segment.slots]])
            assert found.tolist() == names
        assert sorted(self.pool.host) == sorted(
            number for segment, _ in self.segments for number, _ in segment.chunks
        )

    def teardown(self):
        if not hasattr(self, "space"):
            return
        self.every_token_is_where_its_segment_says()
        for segment, _ in self.segments:
            self.space.clear(segment)
        self.step()
        assert self.space.free == self.space.capacity == self.capacity
        assert self.space.away == 0
        assert not self.pool.host


TestMoving = Moving.TestCase
TestMoving.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


def test_slots_that_a_chunk_leaves_are_free_for_one_that_comes_back_behind_it():
    space, pool = KvSpace(5, 4, 10), SimulatedPool(5, 1, 8)
    first, second = Segment(), Segment()
    pool.write(*space.grow([(first, 4)]), [1, 2, 3, 4])
    space.evict(first)
    pool.move(space.take_moves())
    pool.write(*space.grow([(second, 4)]), [5, 6, 7, 8])
    space.evict(second)
    space.restore(first)
    moves = space.take_moves()
    assert [type(move) for move in moves] == [Evict, Restore]
    assert set(moves[0].slots) == set(moves[1].slots)
    pool.move(moves)
    assert pool.names[first.slots].tolist() == [1, 2, 3, 4]
    assert pool.host[second.chunks[0][0]].tolist() == [5, 6, 7, 8]


def test_a_segment_leaves_from_its_front_and_comes_back_from_where_it_left_last():
    space = KvSpace(11, 4, 10)
    segment = Segment()
    slots = space.grow([(segment, 10)])[0].tolist()
    assert [space.evict(segment) for _ in range(3)] == [4, 4, 2]
    moves = space.take_moves()
    assert [move.slots.tolist() for move in moves] == [slots[:4], slots[4:8], slots[8:]]
    assert [space.restore(segment) for _ in range(3)] == [2, 4, 4]
    assert [move.chunk for move in space.take_moves()] == [move.chunk for move in moves[::-1]]


def test_a_mapping_is_noted_in_parts_no_longer_than_a_chunk_that_later_changes_do_not_reach():
    space = KvSpace(21, 4, 10)
    segment = Segment()
    slots = space.grow([(segment, 10)])[0].tolist()
    space.map(2, 30, segment.slots)
    space.evict(segment)
    space.grow([(segment, 9)])
    *maps, evict = space.take_moves()
    assert all(type(move) is Map and move.row == 2 for move in maps)
    assert [move.position for move in maps] == [30, 34, 38]
    assert [slot for move in maps for slot in move.slots.tolist()] == slots
    assert type(evict) is Evict


def test_clearing_forgets_the_chunks_and_frees_the_slots():
    space = KvSpace(9, 4, 10)
    segment = Segment()
    space.grow([(segment, 8)])
    space.evict(segment)
    number = segment.chunks[0][0]
    space.clear(segment)
    assert space.take_moves()[1:] == [Forget(number)]
    assert (space.free, space.away) == (8, 0)


def test_chunk_numbers_are_never_used_again():
    space = KvSpace(9, 4, 10)
    segment = Segment()
    space.grow([(segment, 4)])
    for _ in range(3):
        space.evict(segment)
        space.restore(segment)
    moves = space.take_moves()
    evicted = [move.chunk for move in moves if type(move) is Evict]
    assert len(set(evicted)) == 3
    assert [move.chunk for move in moves if type(move) is Restore] == evicted
