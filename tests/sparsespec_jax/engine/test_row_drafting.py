"""Rows whose drafts fail draft less, as far as there is room, and nobody loses by it."""

from __future__ import annotations

import dataclasses
import itertools
from types import SimpleNamespace

import pytest

from sparsespec_jax.config import AUTO_KS, SpeculationConfig
from sparsespec_jax.engine.adaptive import AdaptiveDrafting, Choice
from sparsespec_jax.engine.row import Row
from sparsespec_jax.engine.row_drafting import RowDrafting
from tests.sparsespec_jax.engine.simulated_mix import Mix


@pytest.mark.parametrize(
    ("shares", "gain"),
    [({0.95: 0.95, 0.1: 0.05}, 0.04), ({0.95: 0.8, 0.8: 0.2}, -0.015), ({0.93: 1.0}, -0.01)],
    ids=["a few hopeless rows", "some worse than others", "all alike"],
)
def test_a_mix_is_never_slower_and_faster_where_it_can_be(shares, gain):
    """With 28 rows in a step for 32, there is room for a few more verifications."""
    rates = {}
    for by_row in (False, True):
        runs = [
            Mix(shares, context=8192, max_batch=32, running=28, by_row=by_row, seed=seed)
            for seed in range(2)
        ]
        for run in runs:
            run.tokens_a_second(800)
        rates[by_row] = sum(run.tokens_a_second(1500) for run in runs)
    assert rates[True] > (1 + gain) * rates[False]


def test_hopeless_rows_draft_less_and_nobody_starves():
    mix = Mix({0.95: 0.9, 0.1: 0.1}, context=8192, max_batch=32, running=28, by_row=True)
    mix.tokens_a_second(2000)
    cycles = {
        agreement: sum(n for (a, _), n in mix.drafted.items() if a == agreement)
        for agreement in (0.95, 0.1)
    }
    few = {
        agreement: sum(n for (a, k), n in mix.drafted.items() if a == agreement and k <= 2)
        for agreement in (0.95, 0.1)
    }
    assert few[0.1] > 0.5 * cycles[0.1]
    assert few[0.95] < 0.2 * cycles[0.95]
    assert max(max(gaps) for gaps in mix.gaps.values() if gaps) <= 2 * (max(AUTO_KS) + 1)


# One row by itself.

CHOICE = Choice(8)


@pytest.fixture
def workload() -> AdaptiveDrafting:
    """Eight drafts pay: a step without any takes four times as long."""
    workload = AdaptiveDrafting(AUTO_KS)
    for _ in range(300):
        k = workload.choice.k
        workload.note_cycle(k, k)
        workload.note_step(16, {8: 1.0, 4: 1.2, 2: 1.6, 0: 4.0}[k])
    assert workload.choice == CHOICE
    return workload


@pytest.fixture
def rows(workload) -> RowDrafting:
    return RowDrafting(SpeculationConfig(k="auto"), workload)


def new_row(**changes) -> Row:
    kv = SimpleNamespace(length=8000, unread=0, row=0)
    row = Row(SimpleNamespace(max_length=10_000), kv, phase=8, drafts=8)
    return dataclasses.replace(row, **changes)


OTHERS = [new_row() for _ in range(15)]


def cycle(rows: RowDrafting, row: Row, accepted: int, verifies: int = 16) -> int:
    """What the row drafts after a cycle that kept up to so many; others leave it room."""
    rows.note_cycle(row, row.drafts, min(accepted, row.drafts), 0, apart=row.apart)
    rows.update(CHOICE, [row, *OTHERS], OTHERS[0].kv.length, verifies)
    row.drafts = rows.drafts(row)
    row.apart = row.drafts < CHOICE.k
    return row.drafts


def test_a_row_drafts_what_the_others_do_until_its_own_drafts_fail(rows):
    row = new_row()
    assert {cycle(rows, row, accepted=7) for _ in range(50)} == {8}
    found = [cycle(rows, row, accepted=0) for _ in range(50)]
    assert found[0] == 8
    assert found[-1] < 8


def test_without_room_for_more_verifications_it_does_not(rows):
    row = new_row()
    assert {cycle(rows, row, accepted=0, verifies=1) for _ in range(50)} == {8}


def test_what_steps_cost_decides_how_few(rows):
    """Where the whole context is cheap to read, none at all; else a few that hardly ever agree."""
    long, short = new_row(), new_row()
    short.kv.length = 200
    for _ in range(60):
        cycle(rows, long, accepted=1)
        cycle(rows, short, accepted=0)
    assert long.drafts > 0
    assert short.drafts == 0


def test_it_tries_again_after_a_while_and_each_time_later(rows):
    row = new_row()
    row.kv.length = 200
    tries = [index for index in range(2000) if cycle(rows, row, accepted=0) == 8]
    starts = [index for index in tries if index - 1 not in tries]
    waits = [later - earlier for earlier, later in itertools.pairwise(starts)]
    assert len(waits) >= 2
    assert all(later > 1.8 * earlier for earlier, later in itertools.pairwise(waits))


def test_it_comes_back_when_its_drafts_are_right_again(rows):
    row = new_row()
    for _ in range(60):
        cycle(rows, row, accepted=0)
    assert row.drafts < 8
    for _ in range(300):
        cycle(rows, row, accepted=8)
    assert row.drafts == 8


def test_where_nobody_drafts_no_row_does(rows):
    row = new_row()
    for _ in range(20):
        cycle(rows, row, accepted=8)
    rows.update(Choice(0), [row, *OTHERS], 8000, 16)
    assert rows.drafts(row) == 0


def test_fewer_drafts_of_the_others_are_not_taken_for_a_row_apart(rows, workload):
    row = new_row(drafts=4)
    rows.note_cycle(row, 4, 4, 0, apart=False)
    rows.update(CHOICE, [row] * 16, row.kv.length, 16)
    assert rows.drafts(row) == 8


def test_the_workload_learns_from_a_row_apart_as_if_it_drafted_what_the_others_do(rows, workload):
    """Nine cycles of no draft take as long as one of eight, accepted as its last ones were."""
    acceptance, row = workload.acceptance(0), new_row()
    for _ in range(100):
        rows.note_cycle(row, 8, 2, 0, apart=False)
    drafted, accepted = list(acceptance.drafted), list(acceptance.accepted)
    for _ in range(9):
        rows.note_cycle(row, 0, 0, 0, apart=True)
    kept = [1, 1, 0, 0, 0, 0, 0, 0]
    expected = [0.999 * count + share for count, share in zip(accepted, kept, strict=True)]
    assert acceptance.drafted == pytest.approx([0.999 * count + 1 for count in drafted], rel=1e-3)
    assert acceptance.accepted == pytest.approx(expected, rel=0.01)
