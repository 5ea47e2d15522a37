"""Rules by which the scores of a verification's queries become one ranking of the positions.

A rule weighs the queries, once acceptance is known: `here` for where a query attended, `ahead` for
where it would have attended had it moved on with the text. `pallas_kernels.rank_positions` does the
sums.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

AGE_DECAY, SHIFT_DECAY, SHIFT_WEIGHT = 0.8, 0.5, 0.5  # a flat optimum: see `shifted`
SHIFT_AGES = 2  # queries that may have weight ahead: the newest committed ones


class Weights(NamedTuple):
    """Weights of the Q scored queries of E rows, 0 for those that do not exist.

    here: [E, Q] float32.
    ahead: [E, Q] float32, 0 but for the SHIFT_AGES newest committed queries; or None.
    """

    here: jax.Array
    ahead: jax.Array | None


class Rule(NamedTuple):
    """How positions are ranked, and how many lists of them a layer has.

    weigh: gets the numbers of a row's queries that exist and of those that are committed, from the
      front, both [E] int32, and Q.
    shared: whether the KV heads of a layer share one list, by their mean scores: less to select
      and to translate than a list for each, at a price in accepted drafts that depends on the
      model.
    """

    weigh: Callable[[jax.Array, jax.Array, int], Weights]
    shared: bool


def paper(queries: jax.Array, committed: jax.Array, n: int) -> Weights:
    """SparseSpec's rule: the plain mean over all queries, those of rejected drafts included."""
    return Weights(_shares(jnp.arange(n) < queries[:, None]), None)


def shifted(queries: jax.Array, committed: jax.Array, n: int) -> Weights:
    """Newer queries count more, and attention is expected to move on as the text does.

    More than half of the attention that a list misses lies 1 to k positions after a selected one:
    heads that copy advance with the text. A query of age r (0: the newest committed one) predicts
    that the query of the j-th draft attends where it did, moved by r + 1 + j positions. With P_r
    the probabilities of the committed query of age r, R those of the rejected drafts' queries:

        score[p] = sum_r .8^r P_r[p] + .5 mean_j sum_r<2 .5^r P_r[p - 1 - r - j] + mean R[p]

    where both sums over r are divided by the sum of their weights.
    """
    query = jnp.arange(n)
    age = committed[:, None] - 1 - query
    final, rejected = age >= 0, (age < 0) & (query < queries[:, None])
    here = _shares(jnp.where(final, AGE_DECAY**age, 0.0)) + _shares(rejected)
    ahead = _shares(jnp.where(final & (age < SHIFT_AGES), SHIFT_DECAY**age, 0.0))
    return Weights(here, SHIFT_WEIGHT * ahead)


def _shares(weights: jax.Array) -> jax.Array:
    """Weights [E, Q], divided by their sum where there is one."""
    weights = weights.astype(jnp.float32)
    return weights / jnp.maximum(weights.sum(axis=1, keepdims=True), 1e-6)


# The paper has a list for each KV head.
SCORE_RULES = {"paper": Rule(paper, shared=False), "shifted": Rule(shifted, shared=True)}
