"""Slots: each is free or taken by one owner, and what is free can be taken."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sparsespec_jax.kv.allocator import TRASH_SLOT, SlotAllocator


class Owners(RuleBasedStateMachine):
    """Owners that take slots and give some or all of them back."""

    @initialize(capacity=st.integers(1, 24))
    def start(self, capacity):
        self.capacity = capacity
        self.allocator = SlotAllocator(capacity + 1)
        self.owners: list[list[int]] = []

    @property
    def taken(self):
        return [slot for slots in self.owners for slot in slots]

    @rule(data=st.data())
    def what_is_free_can_be_taken(self, data):
        count = data.draw(st.integers(0, self.allocator.free))
        before = set(self.taken)
        taken = self.allocator.take(count)
        assert taken.dtype == np.int32
        assert len(taken) == len(set(taken.tolist())) == count
        assert before.isdisjoint(taken.tolist())
        self.owners.append(taken.tolist())

    @precondition(lambda self: any(self.owners))
    @rule(data=st.data())
    def some_slots_come_back_early(self, data):
        slots = data.draw(st.sampled_from([slots for slots in self.owners if slots]))
        back = data.draw(st.lists(st.sampled_from(slots), unique=True))
        self.allocator.give_back(np.array(back, np.int32))
        slots[:] = [slot for slot in slots if slot not in back]

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def an_owner_leaves(self, data):
        index = data.draw(st.integers(0, len(self.owners) - 1))
        self.allocator.give_back(np.array(self.owners.pop(index), np.int32))

    @rule(beyond=st.integers(1, 5))
    def misuse_raises_and_changes_nothing(self, beyond):
        count, free = self.allocator.free + beyond, self.allocator.free
        with pytest.raises(RuntimeError, match=f"{count} slots asked of {free} free ones"):
            self.allocator.take(count)
        unused = set(range(self.capacity + 1)) - set(self.taken)
        wrong = [[slot] for slot in unused]
        wrong += [[slot, slot] for slot in self.taken[:1]]
        wrong += [[slot, next(iter(unused))] for slot in self.taken[:1]]
        for slots in wrong:
            with pytest.raises(ValueError, match="not taken, or twice"):
                self.allocator.give_back(np.array(slots))

    @invariant()
    def every_slot_is_free_or_taken_once(self):
        assert TRASH_SLOT not in self.taken
        assert len(set(self.taken)) == len(self.taken) == self.allocator.used
        assert self.allocator.free == self.capacity - len(self.taken)

    def teardown(self):
        if not hasattr(self, "allocator"):
            return
        for slots in self.owners:
            self.allocator.give_back(np.array(slots, np.int32))
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
