"""Rules that turn the scores of a verification's queries into one ranking of the positions.

A rule sees every query's probabilities apart, and runs after acceptance is known.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from sparsespec_jax.drafters.base import Verified

Rule = Callable[[Verified], jax.Array]


def paper(verified: Verified) -> jax.Array:
    """SparseSpec's rule: the plain mean over all queries, those of rejected drafts included."""
    total = verified.scores.sum(axis=3, dtype=jnp.float32)
    return total / jnp.maximum(verified.queries, 1)[:, None, None]


SCORE_RULES: dict[str, Rule] = {"paper": paper}
