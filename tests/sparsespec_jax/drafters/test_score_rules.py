"""Score rules: from what each query gave each position to one ranking."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from sparsespec_jax.config import ScoreRule, SpeculationConfig
from sparsespec_jax.drafters.base import Verified
from sparsespec_jax.drafters.score_rules import SCORE_RULES

LAYERS, ROWS, HEADS, QUERIES, CONTEXT = 2, 3, 2, 4, 10


def make_verified(queries, *, committed=1, dtype=np.float32, seed=0) -> Verified:
    rng = np.random.default_rng(seed)
    scores = rng.random((LAYERS, ROWS, HEADS, QUERIES, CONTEXT)).astype(dtype)
    dead = np.arange(QUERIES) >= np.array(queries)[:, None]
    scores[:, dead.nonzero()[0], :, dead.nonzero()[1]] = 0
    return Verified(
        row=jnp.arange(ROWS),
        scores=jnp.asarray(scores),
        queries=jnp.asarray(queries, jnp.int32),
        committed=jnp.asarray(np.broadcast_to(committed, ROWS), jnp.int32),
        start=jnp.full(ROWS, 5),
        length=jnp.full(ROWS, 7),
    )


def test_every_rule_that_can_be_configured_exists():
    assert set(SCORE_RULES) == set(ScoreRule.__args__)
    assert SpeculationConfig().score_rule in SCORE_RULES


@pytest.mark.parametrize("rule", SCORE_RULES)
def test_a_ranking_has_one_non_negative_number_per_layer_row_head_and_position(rule):
    ranking = SCORE_RULES[rule](make_verified([4, 2, 0]))
    assert ranking.shape == (LAYERS, ROWS, HEADS, CONTEXT)
    assert ranking.dtype == jnp.float32
    assert (ranking >= 0).all()
    assert jnp.isfinite(ranking).all()


@pytest.mark.parametrize("rule", SCORE_RULES)
def test_a_row_without_queries_ranks_everything_alike(rule):
    assert not SCORE_RULES[rule](make_verified([4, 2, 0]))[:, 2].any()


def test_the_papers_rule_is_the_mean_over_all_queries_that_exist():
    verified = make_verified([4, 2, 1])
    scores = np.asarray(verified.scores, np.float64)
    for row, queries in enumerate([4, 2, 1]):
        np.testing.assert_allclose(
            SCORE_RULES["paper"](verified)[:, row],
            scores[:, row, :, :queries].mean(axis=2),
            rtol=1e-6,
        )


def test_the_papers_rule_counts_the_queries_of_rejected_drafts():
    rankings = [SCORE_RULES["paper"](make_verified([4, 4, 4], committed=n)) for n in (1, 4)]
    np.testing.assert_array_equal(*rankings)


def test_half_precision_scores_are_summed_in_single_precision():
    verified = make_verified([4, 4, 4], dtype=np.float16)
    exact = np.asarray(verified.scores, np.float32).mean(axis=3)
    np.testing.assert_allclose(SCORE_RULES["paper"](verified), exact, rtol=1e-6)


@pytest.mark.parametrize("committed", [(1, 1, 1), (4, 2, 1), (3, 1, 1), (2, 2, 1)])
def test_the_shifted_rule_is_its_formula(committed):
    queries = (4, 2, 1)
    verified = make_verified(queries, committed=committed)
    scores = np.asarray(verified.scores, np.float64)
    expected = np.zeros((LAYERS, ROWS, HEADS, CONTEXT))
    for row in range(ROWS):
        final = scores[:, row, :, : committed[row]][:, :, ::-1]  # by age, the newest first
        rejected = scores[:, row, :, committed[row] : queries[row]]
        ages = np.arange(committed[row])
        for age, near, far in zip(ages, _shares(0.8**ages), _shares(0.5**ages), strict=True):
            expected[:, row] += near * final[:, :, age]
            for draft in range(QUERIES - 1):
                moved = age + 1 + draft
                ahead = np.zeros((LAYERS, HEADS, CONTEXT))
                ahead[..., moved:] = final[:, :, age, : CONTEXT - moved]
                expected[:, row] += 0.5 * far * ahead / (QUERIES - 1)
        if rejected.shape[2]:
            expected[:, row] += rejected.mean(axis=2)
    np.testing.assert_allclose(SCORE_RULES["shifted"](verified), expected, rtol=1e-5, atol=1e-6)


def test_the_shifted_rule_expects_attention_to_move_on():
    """All weight on one position: the rule ranks it, and those after it, before any other."""
    verified = make_verified([1, 1, 1])
    scores = np.zeros(verified.scores.shape, np.float32)
    scores[..., 0, 4] = 1
    ranking = SCORE_RULES["shifted"](verified._replace(scores=jnp.asarray(scores)))
    assert (ranking[..., 4] > ranking[..., 5]).all()
    assert (ranking[..., 5 : 4 + QUERIES] > 0).all()
    assert not ranking[..., :4].any()


def _shares(weights):
    return weights / weights.sum()
