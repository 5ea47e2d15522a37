"""Device state: updates enter it, admissions start a row over, and padding leaves it alone."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparsespec_jax.engine.plan import Bucket, Plan, PlanLayout
from sparsespec_jax.engine.state import DecodeState, apply_commits, apply_updates, initial_state
from sparsespec_jax.sampling.params import SamplingParams
from sparsespec_jax.sampling.rows import NEUTRAL_ROW, pack_row

MAX_BATCH, WIDTH = 3, 16
TRASH_ROW = MAX_BATCH
LAYOUT = PlanLayout(
    Bucket(drafts=1, verifies=1, chunks=2, context=WIDTH), n_queries=3, chunk=4, trash_row=TRASH_ROW
)
_apply = jax.jit(lambda state, packed: apply_updates(state, LAYOUT.unpack(packed)))


def empty_plan() -> tuple[np.ndarray, Plan]:
    return LAYOUT.empty()


@pytest.fixture
def used() -> DecodeState:
    """A state in which every row has a request half done."""
    state = initial_state(MAX_BATCH, WIDTH, None, None)
    rows = np.arange(MAX_BATCH)
    return state._replace(
        tokens=state.tokens.at[rows].set(np.arange(MAX_BATCH * WIDTH).reshape(-1, WIDTH) + 100),
        page_table=state.page_table.at[rows].set(
            np.arange(MAX_BATCH * WIDTH).reshape(-1, WIDTH) + 1
        ),
        length=state.length.at[rows].set(7),
        max_length=state.max_length.at[rows].set(12),
        done=state.done.at[rows].set(False),
    )


def assert_trash_row_is_inert(state: DecodeState) -> None:
    assert state.done[TRASH_ROW]
    assert state.length[TRASH_ROW] == state.max_length[TRASH_ROW] == 1
    np.testing.assert_array_equal(state.page_table[TRASH_ROW], 0)
    neutral = initial_state(MAX_BATCH, WIDTH, None, None).sampling
    for got, expected in zip(state.sampling, neutral, strict=True):
        np.testing.assert_array_equal(got[TRASH_ROW], expected[TRASH_ROW])


def test_at_first_every_row_is_done_and_maps_to_the_trash_slot():
    state = initial_state(MAX_BATCH, WIDTH, None, None)
    assert state.done.all()
    assert (state.length == 1).all()
    assert not state.page_table.any()
    assert_trash_row_is_inert(state)


def test_an_empty_plan_changes_nothing(used):
    packed, _ = empty_plan()
    state = _apply(used, packed)
    jax.tree.map(np.testing.assert_array_equal, state, used)
    assert_trash_row_is_inert(state)


def test_updates_enter_slots_and_known_tokens(used):
    packed, plan = empty_plan()
    plan.updates[:3] = [[0, 8, 91, 5], [2, 0, 92, 0], [1, 15, 93, 6]]
    state = _apply(used, packed)
    page_table, tokens = np.array(used.page_table), np.array(used.tokens)
    page_table[[0, 2, 1], [8, 0, 15]] = 91, 92, 93
    tokens[[0, 2, 1], [8, 0, 15]] = 5, 0, 6
    np.testing.assert_array_equal(state.page_table, page_table)
    np.testing.assert_array_equal(state.tokens[:TRASH_ROW], tokens[:TRASH_ROW])
    np.testing.assert_array_equal(state.length, used.length)
    assert_trash_row_is_inert(state)


def test_an_unknown_token_leaves_the_history_alone(used):
    """Only the device knows what it emitted; the host maps the position and says -1."""
    packed, plan = empty_plan()
    plan.updates[:2] = [[0, 6, 91, -1], [0, 7, 92, -1]]
    state = _apply(used, packed)
    np.testing.assert_array_equal(state.tokens[:TRASH_ROW], used.tokens[:TRASH_ROW])
    np.testing.assert_array_equal(state.page_table[0, 6:8], [91, 92])
    assert (np.asarray(state.tokens) >= 0).all()
    assert_trash_row_is_inert(state)


def test_an_admission_starts_its_row_over_and_no_other(used):
    params = SamplingParams(temperature=0.5, top_k=3, seed=1, stop_token_ids=(4,))
    packed, plan = empty_plan()
    plan.admissions[0] = [1, 5, 9, *pack_row(params, 2**40 + 3, 5, (95,))]
    done = used._replace(done=jnp.ones(MAX_BATCH + 1, bool))
    state = _apply(done, packed)
    np.testing.assert_array_equal(state.done, [True, False, True, True])
    np.testing.assert_array_equal(state.length, [7, 5, 7, 1])
    np.testing.assert_array_equal(state.max_length, [12, 9, 12, 1])
    np.testing.assert_array_equal(state.sampling.temperature, [0, 0.5, 0, 0])
    np.testing.assert_array_equal(state.sampling.top_k, [0, 3, 0, 0])
    np.testing.assert_array_equal(state.sampling.seed[1], [3, 2**8])
    np.testing.assert_array_equal(state.sampling.stop_ids[1, :3], [4, 95, -1])
    assert_trash_row_is_inert(state)


def test_the_slots_and_prompt_of_an_admission_may_come_with_it(used):
    packed, plan = empty_plan()
    plan.admissions[1] = [2, 3, 9, *NEUTRAL_ROW]
    plan.updates[:3] = [[2, position, 60 + position, 70 + position] for position in range(3)]
    state = _apply(used, packed)
    assert not state.done[2]
    np.testing.assert_array_equal(state.tokens[2, :3], [70, 71, 72])
    np.testing.assert_array_equal(state.page_table[2, :3], [60, 61, 62])


def test_commits_append_what_the_host_has_verified(used):
    """Accepted drafts stand behind the history already: only the last token is news."""
    layout = PlanLayout(Bucket(1, 1, 0, WIDTH), 3, 4, TRASH_ROW, commits=MAX_BATCH)
    packed, plan = layout.empty()
    plan.commits[:2] = [[2, 3, 55], [0, 1, 56]]
    state = jax.jit(lambda state, packed: apply_commits(state, layout.unpack(packed)))(used, packed)
    tokens = np.array(used.tokens)
    tokens[2, 9], tokens[0, 7] = 55, 56
    np.testing.assert_array_equal(state.tokens, tokens)
    np.testing.assert_array_equal(state.length, [8, 7, 10, 1])
    assert_trash_row_is_inert(state)


def test_a_plan_without_prefill_rows_admits_nobody(used):
    layout = PlanLayout(Bucket(1, 1, 0, WIDTH), 3, 4, TRASH_ROW)
    packed, plan = layout.empty()
    plan.updates[0] = [0, 8, 91, 5]
    state = apply_updates(used, layout.unpack(jnp.asarray(packed)))
    assert state.page_table[0, 8] == 91
    for name in ("length", "max_length", "done", "sampling"):
        jax.tree.map(np.testing.assert_array_equal, getattr(state, name), getattr(used, name))
