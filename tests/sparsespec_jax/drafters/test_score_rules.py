"""Score rules: from what each query gave each position to one ranking."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from sparsespec_jax.config import ScoreRule, SpeculationConfig
from sparsespec_jax.drafters.base import Verified
from sparsespec_jax.drafters.score_rules import SCORE_RULES

LAYERS, ROWS, HEADS, QUERIES, CONTEXT = 2, 3, 2, 4, 10


def make_verified(queries, *, accepted=0, dtype=np.float32, seed=0) -> Verified:
    rng = np.random.default_rng(seed)
    scores = rng.random((LAYERS, ROWS, HEADS, QUERIES, CONTEXT)).astype(dtype)
    dead = np.arange(QUERIES) >= np.array(queries)[:, None]
    scores[:, dead.nonzero()[0], :, dead.nonzero()[1]] = 0
    return Verified(
        row=jnp.arange(ROWS),
        scores=jnp.asarray(scores),
        queries=jnp.asarray(queries, jnp.int32),
        start=jnp.full(ROWS, 5),
        accepted=jnp.full(ROWS, accepted),
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
    rankings = [SCORE_RULES["paper"](make_verified([4, 4, 4], accepted=n)) for n in (0, 3)]
    np.testing.assert_array_equal(*rankings)


def test_half_precision_scores_are_summed_in_single_precision():
    verified = make_verified([4, 4, 4], dtype=np.float16)
    exact = np.asarray(verified.scores, np.float32).mean(axis=3)
    np.testing.assert_allclose(SCORE_RULES["paper"](verified), exact, rtol=1e-6)
