"""Rules that turn the scores of a verification's queries into one ranking of the positions.

A rule sees every query's probabilities apart, and runs after acceptance is known.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from sparsespec_jax.drafters.base import Verified

Rule = Callable[[Verified], jax.Array]

AGE_DECAY, SHIFT_DECAY, SHIFT_WEIGHT = 0.8, 0.5, 0.5  # a flat optimum: see `shifted`


def paper(verified: Verified) -> jax.Array:
    """SparseSpec's rule: the plain mean over all queries, those of rejected drafts included."""
    n = verified.scores.shape[3]
    return _weighted_sum(_shares(jnp.arange(n) < verified.queries[:, None]), verified.scores)


def shifted(verified: Verified) -> jax.Array:
    """Newer queries count more, and attention is expected to move on as the text does.

    More than half of the attention that a list misses lies 1 to k positions after a selected one:
    heads that copy advance with the text. A query of age r (0: the newest committed one) predicts
    that the query of the j-th draft attends where it did, moved by r + 1 + j positions. With P_r
    the probabilities of the committed query of age r, R those of the rejected drafts' queries:

        score[n] = sum_r .8^r P_r[n] + .5 mean_j sum_r .5^r P_r[n - 1 - r - j] + mean R[n]

    where both sums over r are divided by the sum of their weights.
    """
    scores = verified.scores
    n, context = scores.shape[3:]
    query = jnp.arange(n)
    age = verified.committed[:, None] - 1 - query
    committed, rejected = age >= 0, (age < 0) & (query < verified.queries[:, None])
    here = _shares(jnp.where(committed, AGE_DECAY**age, 0.0)) + _shares(rejected)
    ahead = SHIFT_WEIGHT * _shares(jnp.where(committed, SHIFT_DECAY**age, 0.0))

    # All queries moved to the place of the first, then on by 0 to k - 1 drafts. Entry n + m of
    # these is position m of the first query. Barriers, or every entry would sum (k + 1) * k.
    padded = jnp.pad(scores, [(0, 0)] * 4 + [(n, n)])
    size, drafts = context + n, n - 1
    aligned = sum(ahead[:, i, None, None] * padded[..., i, i : i + size] for i in range(n))
    aligned = jnp.pad(jax.lax.optimization_barrier(aligned), [(0, 0)] * 3 + [(drafts - 1, 0)])
    moved = sum(aligned[..., j : j + size] for j in range(drafts)) / drafts
    moved = jax.lax.optimization_barrier(moved)
    at = jnp.arange(context) - verified.committed[:, None] + n
    return _weighted_sum(here, scores) + jnp.take_along_axis(moved, at[None, :, None], axis=-1)


def _weighted_sum(weights: jax.Array, scores: jax.Array) -> jax.Array:
    """Sum over the queries of scores [layers, E, kv_heads, Q, context] by weights [E, Q].

    In float32, and added up by hand: XLA's CPU backend is slow to reduce an axis in the middle.
    """
    return sum(weights[:, i, None, None] * scores[..., i, :] for i in range(weights.shape[1]))


def _shares(weights: jax.Array) -> jax.Array:
    """Weights [E, Q], divided by their sum where there is one."""
    weights = weights.astype(jnp.float32)
    return weights / jnp.maximum(weights.sum(axis=1, keepdims=True), 1e-6)


SCORE_RULES: dict[str, Rule] = {"paper": paper, "shifted": shifted}
