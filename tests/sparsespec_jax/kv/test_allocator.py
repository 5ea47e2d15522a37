"""Slots: each is free or taken by one owner, and what was reserved can always be taken."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sparsespec_jax.kv.allocator import TRASH_SLOT, SlotAllocator


class Owners(RuleBasedStateMachine):
    """Owners that reserve, take within their reservation, and give everything back."""

    @initialize(capacity=st.integers(1, 24))
    def start(self, capacity):
        self.capacity = capacity
        self.allocator = SlotAllocator(capacity + 1)
        self.owners: list[tuple[int, list[int]]] = []  # reservation, slots taken

    @property
    def reserved(self):
        return sum(reservation for reservation, _ in self.owners)

    @property
    def taken(self):
        return [slot for _, slots in self.owners for slot in slots]

    @rule(count=st.integers(0, 30))
    def a_reservation_is_granted_exactly_if_there_is_room(self, count):
        room = self.reserved + count <= self.capacity
        assert self.allocator.reserve(count) is room
        if room:
            self.owners.append((count, []))

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def taking_within_a_reservation_never_fails(self, data):
        reservation, slots = data.draw(st.sampled_from(self.owners))
        count = data.draw(st.integers(0, reservation - len(slots)))
        before = set(self.taken)
        taken = self.allocator.take(count)
        assert taken.dtype == np.int32
        assert len(taken) == len(set(taken.tolist())) == count
        assert before.isdisjoint(taken.tolist())
        slots += taken.tolist()

    @precondition(lambda self: any(slots for _, slots in self.owners))
    @rule(data=st.data())
    def some_slots_come_back_early(self, data):
        _, slots = data.draw(st.sampled_from([owner for owner in self.owners if owner[1]]))
        back = data.draw(st.lists(st.sampled_from(slots), unique=True))
        self.allocator.give_back(np.array(back, np.int32))
        slots[:] = [slot for slot in slots if slot not in back]

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def an_owner_leaves(self, data):
        index = data.draw(st.integers(0, len(self.owners) - 1))
        reservation, slots = self.owners.pop(index)
        self.allocator.give_back(np.array(slots, np.int32))
        self.allocator.release(reservation)

    @rule(beyond=st.integers(1, 5))
    def misuse_raises_and_changes_nothing(self, beyond):
        with pytest.raises(RuntimeError, match=f"{self.allocator.free + beyond} slots asked"):
            self.allocator.take(self.allocator.free + beyond)
        with pytest.raises(ValueError, match=f"of {self.reserved} reserved"):
            self.allocator.release(self.reserved + beyond)
        free = set(range(self.capacity + 1)) - set(self.taken)
        wrong = [[slot] for slot in free]
        wrong += [[slot, slot] for slot in self.taken[:1]]
        wrong += [[slot, next(iter(free))] for slot in self.taken[:1]]
        for slots in wrong:
            with pytest.raises(ValueError, match="not taken, or twice"):
                self.allocator.give_back(np.array(slots))

    @invariant()
    def every_slot_is_free_or_taken_once(self):
        assert TRASH_SLOT not in self.taken
        assert len(set(self.taken)) == len(self.taken) == self.allocator.used
        assert self.allocator.free == self.capacity - len(self.taken)
        assert self.allocator.reserved == self.reserved

    def teardown(self):
        if not hasattr(self, "allocator"):
            return
        for reservation, slots in self.owners:
            self.allocator.give_back(np.array(slots, np.int32))
            self.allocator.release(reservation)
        everything = self.allocator.take(self.capacity)
        assert sorted(everything.tolist()) == list(range(1, self.capacity + 1))


TestOwners = Owners.TestCase
TestOwners.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


@pytest.mark.parametrize("slots", [1, 0, -3])
def test_a_pool_without_room_for_a_token_is_refused(slots):
    with pytest.raises(ValueError, match=f"at least one token, got {slots - 1} slots"):
        SlotAllocator(slots)


def test_slots_just_freed_are_the_next_taken():
    """So that a small load stays in a small part of the pool."""
    allocator = SlotAllocator(10)
    first = allocator.take(3)
    allocator.take(2)
    allocator.give_back(first)
    assert set(allocator.take(3).tolist()) == set(first.tolist())
