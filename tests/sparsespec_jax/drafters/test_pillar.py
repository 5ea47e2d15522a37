"""PillarAttn's lists: how many positions, which ones, and of which rows."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import CodedScores, DenseScores
from pallas_kernels.fused_attention.scores import dense, encode
from sparsespec_jax.config import SpeculationConfig
from sparsespec_jax.drafters import make_drafter
from sparsespec_jax.drafters.base import Verified
from sparsespec_jax.drafters.none import NoDrafter
from sparsespec_jax.drafters.pillar import PillarDrafter, PillarState

BATCH, MAX_CONTEXT, CONTEXT, K = 3, 128, 64, 4
TRASH_ROW = BATCH


def make_pillar(model, *, max_context=MAX_CONTEXT, **speculation) -> PillarDrafter:
    defaults = {"k": K, "min_budget": 8, "sparsity": 0.25, "score_rule": "paper"}
    return PillarDrafter(model, SpeculationConfig(**defaults | speculation), max_context, "xla")


def make_verified(model, row, *, length, emitted, queries=K + 1, context=CONTEXT, seed=0):
    """Verifications of batch rows `row`, each a list; the scores are causal and random."""
    entries, rng = len(row), np.random.default_rng(seed)
    length, emitted, queries = (
        np.broadcast_to(np.array(value, np.int32), entries) for value in (length, emitted, queries)
    )
    start = length - emitted - 1
    scores = rng.random((model.num_layers, entries, model.num_kv_heads, K + 1, context))
    query = np.arange(K + 1)[:, None]
    seen = np.arange(context) <= start[:, None, None] + query
    scores *= (seen & (query < queries[:, None, None]))[None, :, None]
    return Verified(
        row=jnp.asarray(row, jnp.int32),
        scores=DenseScores(jnp.asarray(scores, jnp.float32)),
        queries=jnp.asarray(queries),
        committed=jnp.asarray(np.maximum(emitted, 1)),
        start=jnp.asarray(start),
        length=jnp.asarray(length),
    )


def chosen(state: PillarState, row: int) -> np.ndarray:
    """[layers, lists, count] positions of a row."""
    return np.asarray(state.selected[:, row, :, : int(state.count[row])])


@pytest.fixture(scope="module")
def update(tiny_model):
    pillar = make_pillar(tiny_model)
    return jax.jit(pillar.update), pillar.init_state(BATCH + 1)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_the_lists_are_the_best_positions_by_the_papers_rule(tiny_model, update, data):
    """Budget max(min_budget, ceil(sparsity * L)) less the recents; only positions before them."""
    run, state = update
    emitted = data.draw(st.integers(1, K + 1))
    length = data.draw(st.integers(emitted + 1, CONTEXT))
    verified = make_verified(
        tiny_model, [1], length=length, emitted=emitted, seed=data.draw(st.integers(0, 100))
    )
    after = run(state, verified)

    cached, start = length - 1, length - emitted - 1
    count = max(0, min(max(8, int(np.ceil(0.25 * cached))) - emitted, start))
    assert after.count[1] == count
    assert after.recent_start[1] == start
    ranking = np.asarray(verified.scores.probabilities, np.float64).mean(axis=3)[:, 0]
    got = chosen(after, 1)
    for layer, head in np.ndindex(got.shape[:2]):
        best = np.argsort(-ranking[layer, head, :start], kind="stable")[:count]
        np.testing.assert_array_equal(got[layer, head], np.sort(best))


def test_each_layer_and_head_has_a_list_of_its_own_by_the_papers_rule(tiny_model, update):
    run, state = update
    lists = chosen(run(state, make_verified(tiny_model, [0], length=60, emitted=2)), 0)
    assert len({tuple(positions) for positions in lists.reshape(-1, lists.shape[-1])}) == 4


def test_heads_share_the_list_of_a_layer_by_the_shifted_rule(tiny_model):
    """What counts is the mean over the heads."""
    pillar = make_pillar(tiny_model, score_rule="shifted")
    state = pillar.init_state(BATCH + 1)
    assert state.selected.shape[2] == 1
    verified = make_verified(tiny_model, [1], length=60, emitted=2)
    after = pillar.update(state, verified)
    by_head = verified.scores.probabilities
    mean = jnp.broadcast_to(by_head.mean(axis=2, keepdims=True), by_head.shape)
    alike = pillar.update(state, verified._replace(scores=DenseScores(mean)))
    assert chosen(after, 1).shape[-1]
    np.testing.assert_array_equal(chosen(after, 1), chosen(alike, 1))


def test_lists_ascend_without_repetition_and_end_before_the_recents(tiny_model, update):
    run, state = update
    after = run(state, make_verified(tiny_model, [0, 1, 2], length=[20, 40, 60], emitted=[1, 3, 5]))
    for row in range(BATCH):
        positions = chosen(after, row)
        assert positions.shape[-1] > 0
        assert (np.diff(positions) > 0).all()
        assert positions.max() < after.recent_start[row]


def test_recent_positions_count_towards_the_budget(tiny_model, update):
    """All that a draft attends to is the budget, and the tokens drafted since."""
    run, state = update
    for emitted in range(1, K + 2):
        after = run(state, make_verified(tiny_model, [0], length=61, emitted=emitted))
        cached = 60
        assert after.count[0] + (cached - after.recent_start[0]) == 0.25 * cached


@pytest.mark.parametrize("sparsity", [0, 1, 2])
def test_the_host_may_say_which_share_of_the_context_is_listed(tiny_model, sparsity):
    """In a list that has room for the largest; all else is as with that share alone."""
    pillar = make_pillar(tiny_model, sparsity="auto", min_budget=1)
    share = SpeculationConfig(sparsity="auto").sparsities[sparsity]
    alone = make_pillar(tiny_model, sparsity=share, min_budget=1)
    verified = make_verified(tiny_model, [0], length=61, emitted=1)
    told = jax.jit(pillar.update)(
        pillar.init_state(BATCH + 1), verified._replace(sparsity=jnp.int32(sparsity))
    )
    expected = alone.update(alone.init_state(BATCH + 1), verified)
    assert told.selected.shape[-1] == np.ceil(0.1 * MAX_CONTEXT)
    assert told.count[0] == expected.count[0] == np.ceil(share * 60) - 1
    np.testing.assert_array_equal(chosen(told, 0), chosen(expected, 0))


@pytest.mark.parametrize("length", [3, 5, 9])
def test_a_short_context_is_selected_whole(tiny_model, update, length):
    run, state = update
    after = run(state, make_verified(tiny_model, [0], length=length, emitted=1))
    start = length - 2
    np.testing.assert_array_equal(
        chosen(after, 0), np.broadcast_to(np.arange(start), (2, 2, start))
    )


def test_the_first_token_of_all_is_a_recent(tiny_model, update):
    """A prompt of one token: nothing lies before its only query."""
    run, state = update
    after = run(state, make_verified(tiny_model, [0], length=2, emitted=1, queries=1))
    assert after.count[0] == after.recent_start[0] == 0


def test_an_old_list_is_replaced_not_extended(tiny_model, update):
    run, state = update
    state = run(state, make_verified(tiny_model, [0], length=64, emitted=1))
    assert state.count[0] == 15
    state = run(state, make_verified(tiny_model, [0], length=10, emitted=1))
    assert state.count[0] == 7
    assert not state.selected[:, 0, :, 7:16].any()


def test_only_verified_rows_change(tiny_model, update):
    run, state = update
    before = run(state, make_verified(tiny_model, [0, 1, 2], length=50, emitted=2))
    rows = [1, TRASH_ROW, TRASH_ROW]
    verified = make_verified(tiny_model, rows, length=[60, 1, 1], emitted=[2, 0, 0])
    after = run(before, verified)
    for row in (0, 2):
        np.testing.assert_array_equal(after.selected[:, row], before.selected[:, row])
        assert after.count[row] == before.count[row]
        assert after.recent_start[row] == before.recent_start[row]
    assert after.recent_start[1] == 57


def test_the_trash_row_selects_nothing(tiny_model, update):
    """Padding is a verification of the trash row, of length 1, whose first query is at 0."""
    run, state = update
    verified = make_verified(tiny_model, [TRASH_ROW] * 2, length=1, emitted=0, queries=0)
    after = run(state, verified._replace(start=jnp.zeros(2, jnp.int32)))
    jax.tree.map(np.testing.assert_array_equal, after, state)


def test_a_done_row_keeps_a_valid_list(tiny_model, update):
    """It emits nothing, but may be verified once more before the host knows."""
    run, state = update
    after = run(state, make_verified(tiny_model, [0], length=40, emitted=0))
    assert after.count[0] == 10
    assert chosen(after, 0).max() < after.recent_start[0] == 39


@pytest.mark.parametrize("score_rule", ["paper", "shifted"])
def test_coded_scores_choose_the_same_positions(tiny_model, score_rule):
    """As the GPU kernel leaves them: apart by query head, and padded to whole blocks."""
    pillar = make_pillar(tiny_model, score_rule=score_rule)
    verified = make_verified(tiny_model, [0, 2], length=[50, 60], emitted=[1, 4], queries=[3, 5])
    rng = np.random.default_rng(0)
    group = tiny_model.num_heads // tiny_model.num_kv_heads
    lead = (tiny_model.num_layers, 2, tiny_model.num_kv_heads, (K + 1) * group)
    coded = CodedScores(
        encode(jnp.asarray(rng.random((*lead, CONTEXT)) * 100, jnp.float32)),
        jnp.asarray(rng.random(lead) / 128, jnp.float32),
    )
    states = [
        pillar.update(pillar.init_state(BATCH + 1), verified._replace(scores=scores))
        for scores in (coded, dense(coded, jnp.full(2, CONTEXT), group))
    ]
    for row in (0, 2):
        coded_list, dense_list = (chosen(state, row).ravel() for state in states)
        assert len(coded_list)
        # Rankings of coded scores are rounded to float16.
        assert np.isin(coded_list, dense_list).mean() > 0.9
    assert states[0].selected.shape == states[1].selected.shape


def test_equal_scores_go_to_the_newer_position(tiny_model, update):
    run, state = update
    verified = make_verified(tiny_model, [0], length=41, emitted=1)
    alike = DenseScores(jnp.ones_like(verified.scores.probabilities))
    verified = verified._replace(scores=alike)
    np.testing.assert_array_equal(chosen(run(state, verified), 0)[0, 0], np.arange(30, 39))


def test_a_bucket_narrower_than_the_largest_list_fills_its_part(tiny_model):
    pillar = make_pillar(tiny_model, max_context=256, min_budget=100)
    state = pillar.update(
        pillar.init_state(BATCH + 1),
        make_verified(tiny_model, [0], length=30, emitted=2, context=32),
    )
    assert state.selected.shape[-1] == 100
    np.testing.assert_array_equal(chosen(state, 0)[0, 0], np.arange(27))


@pytest.mark.parametrize(("sparsity", "width"), [(0.15, 20), (0.5, 64), (1.0, 128), (0.001, 8)])
def test_lists_are_as_long_as_the_budget_of_the_longest_context(tiny_model, sparsity, width):
    pillar = make_pillar(tiny_model, max_context=128, sparsity=sparsity)
    state = pillar.init_state(BATCH + 1)
    assert state.selected.shape == (2, BATCH + 1, 2, width)
    assert not state.count.any()


def test_drafts_attend_to_what_the_state_says(tiny_model, update):
    run, state = update
    state = run(state, make_verified(tiny_model, [0, 2], length=[20, 60], emitted=[1, 5]))
    row, position = jnp.array([2, 0]), jnp.array([59, 19])
    rows = make_pillar(tiny_model).draft_rows(state, row, position)
    assert rows.row is row
    assert rows.position is position
    assert rows.selected is state.selected
    assert rows.count is state.count
    assert rows.recent_start is state.recent_start


def test_the_recents_of_the_last_draft_are_bounded(tiny_model):
    """All of a full cycle was accepted, and k - 1 more are drafted behind its last token."""
    pillar = make_pillar(tiny_model)
    accepted_all = make_verified(tiny_model, [0], length=40, emitted=K + 1)
    state = pillar.update(pillar.init_state(BATCH + 1), accepted_all)
    last_draft = 40 - 1 + K - 1
    assert last_draft - state.recent_start[0] + 1 <= pillar.max_recent


def test_the_method_names_the_drafter(tiny_model):
    assert isinstance(make_drafter(tiny_model, SpeculationConfig(), 128, "xla"), PillarDrafter)
    none = make_drafter(tiny_model, SpeculationConfig(method="none"), 128, "xla")
    assert isinstance(none, NoDrafter)
    assert none.k == 0
    assert none.init_state(4) is None
