"""Score rules: how much each query counts in the ranking of the positions."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import DenseScores, rank_positions
from sparsespec_jax.config import ScoreRule, SpeculationConfig
from sparsespec_jax.drafters.score_rules import SCORE_RULES, SHIFT_AGES, SHIFT_WEIGHT

LAYERS, HEADS, QUERIES, CONTEXT = 2, 2, 6, 12


def weights_of(rule, queries, committed):
    queries, committed = (jnp.asarray(x, jnp.int32) for x in (queries, committed))
    here, ahead = SCORE_RULES[rule].weigh(queries, committed, QUERIES)
    return np.asarray(here), None if ahead is None else np.asarray(ahead)


def ranking_of(rule, probabilities, queries, committed):
    rows = len(queries)
    end = jnp.full(rows, CONTEXT, jnp.int32)
    queries, committed = (jnp.asarray(x, jnp.int32) for x in (queries, committed))
    here, ahead = SCORE_RULES[rule].weigh(queries, committed, QUERIES)
    scores = DenseScores(jnp.asarray(probabilities, jnp.float32))
    return rank_positions(
        scores, end, here, ahead, committed, group=1, lists=probabilities.shape[2],
        drafts=QUERIES - 1, context=CONTEXT, ages=SHIFT_AGES,
    )  # fmt: skip


def test_every_rule_that_can_be_configured_exists():
    assert set(SCORE_RULES) == set(ScoreRule.__args__)
    assert SpeculationConfig().score_rule in SCORE_RULES


@pytest.mark.parametrize("rule", SCORE_RULES)
def test_only_queries_that_exist_count(rule):
    queries, committed = [6, 6, 4, 4, 1], [6, 2, 4, 1, 1]
    exists = np.arange(QUERIES) < np.array(queries)[:, None]
    for weights in weights_of(rule, queries, committed):
        if weights is not None:
            assert weights.shape == (5, QUERIES)
            assert weights.dtype == np.float32
            assert (weights >= 0).all()
            assert not weights[~exists].any()


@pytest.mark.parametrize("rule", SCORE_RULES)
def test_a_row_without_queries_has_no_weights(rule):
    for weights in weights_of(rule, [0, 3], [0, 1]):
        assert weights is None or not weights[0].any()


def test_the_papers_rule_is_the_mean_over_all_queries_that_exist():
    for committed in (1, 2):  # those of rejected drafts included
        here, ahead = weights_of("paper", [6, 4, 2], [committed] * 3)
        for row, queries in enumerate([6, 4, 2]):
            np.testing.assert_allclose(here[row, :queries], 1 / queries, rtol=1e-6)
        assert ahead is None


def test_the_shifted_rule_looks_ahead_from_the_newest_committed_queries_only():
    _, ahead = weights_of("shifted", [6, 6, 3], [6, 2, 3])
    age = np.array([6, 2, 3])[:, None] - 1 - np.arange(QUERIES)
    np.testing.assert_array_equal(ahead > 0, (age >= 0) & (age < SHIFT_AGES))
    np.testing.assert_allclose(ahead.sum(axis=1), SHIFT_WEIGHT, rtol=1e-6)


@pytest.mark.parametrize("committed", [(1, 1, 1), (6, 3, 1), (5, 2, 1), (3, 3, 1)])
def test_the_shifted_rule_is_its_formula(committed):
    queries = (6, 3, 1)
    p = np.random.default_rng(0).random((LAYERS, len(queries), HEADS, QUERIES, CONTEXT))
    expected = np.zeros((LAYERS, len(queries), HEADS, CONTEXT))
    for row in range(len(queries)):
        final = p[:, row, :, : committed[row]][:, :, ::-1]  # by age, the newest first
        rejected = p[:, row, :, committed[row] : queries[row]]
        for age, weight in enumerate(_shares(0.8 ** np.arange(committed[row]))):
            expected[:, row] += weight * final[:, :, age]
        for age, weight in enumerate(_shares(0.5 ** np.arange(min(SHIFT_AGES, committed[row])))):
            for draft in range(QUERIES - 1):
                moved = age + 1 + draft
                ahead = np.zeros((LAYERS, HEADS, CONTEXT))
                ahead[..., moved:] = final[:, :, age, : CONTEXT - moved]
                expected[:, row] += 0.5 * weight * ahead / (QUERIES - 1)
        if rejected.shape[2]:
            expected[:, row] += rejected.mean(axis=2)
    ranking = ranking_of("shifted", p, queries, committed)
    np.testing.assert_allclose(ranking, expected, rtol=1e-5, atol=1e-6)


def test_the_shifted_rule_expects_attention_to_move_on():
    """All weight on one position: the rule ranks it, and those after it, before any other."""
    p = np.zeros((1, 1, 1, QUERIES, CONTEXT))
    p[..., 0, 4] = 1
    ranking = ranking_of("shifted", p, [1], [1])[0, 0, 0]
    assert ranking[4] > ranking[5]
    assert (ranking[5 : 4 + QUERIES] > 0).all()
    assert not ranking[:4].any()


def _shares(weights):
    return weights / weights.sum()
