"""XLA reference of `rank_positions`: the formula, on probabilities in float32.

The oracle, and what CPUs run.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.fused_attention.scores import AttentionScores, CodedScores, dense

MOST_FACTOR = 2.0**8  # a larger one is no factor of anything


@functools.partial(jax.jit, static_argnames=("group", "lists", "drafts", "context", "ages"))
def rank_positions(
    scores: AttentionScores,
    end: Array,
    here: Array,
    ahead: Array | None,
    committed: Array,
    *,
    group: int,
    lists: int,
    drafts: int,
    context: int,
    ages: int,
) -> Array:
    coded = isinstance(scores, CodedScores)
    if coded:  # without spare layers
        codes, factor = scores
        usable = factor < MOST_FACTOR  # not if it is no number
        scores = dense(CodedScores(codes[: len(factor)], jnp.where(usable, factor, 0)), end, group)
    probabilities = scores.probabilities[..., :context]
    n_heads = probabilities.shape[2] // lists
    scored = jnp.arange(context) < end[:, None, None]

    def weighed(weight: Array, probabilities: Array) -> Array:
        """[R] times [L, R, Hkv, context], a mean for each list; 0 where there is no weight or no
        score."""
        weight = weight[:, None, None]
        of_heads = jnp.where(scored & (weight != 0), weight * probabilities, 0)
        # Added up by hand: XLA's CPU backend is slow to reduce an axis in the middle.
        return sum(of_heads[:, :, head::n_heads] for head in range(n_heads)) / n_heads

    ranking = sum(weighed(here[:, i], probabilities[..., i, :]) for i in range(here.shape[1]))
    if ahead is not None:
        moving = []
        for age in range(min(ages, here.shape[1])):
            query = jnp.maximum(committed - 1 - age, 0)[:, None]
            weight = jnp.take_along_axis(ahead, query, axis=1)[:, 0]
            weight = jnp.where(age < committed, weight, 0)
            picked = jnp.take_along_axis(probabilities, query[None, :, None, :, None], axis=3)
            moving.append(weighed(weight, picked[..., 0, :]))
        ranking += look_ahead(moving, end, drafts)
    return ranking.astype(jnp.float16 if coded else jnp.float32)


def look_ahead(moving: Sequence[Array], end: Array, drafts: int) -> Array:
    """What queries say of the positions ahead, [L, R, lists, context] float32.

    Args:
        moving: like the result, by age of the query: what it gave each position, weighed.
        end: [R] int32.
        drafts: drafts of a cycle, whose mean it is.
    """
    moved = sum(_shift(x.astype(jnp.float32), age + 1) for age, x in enumerate(moving))
    moved = lax.optimization_barrier(moved)  # or every entry would sum ages * drafts others
    moved = sum(_shift(moved, draft) for draft in range(drafts)) / drafts
    return jnp.where(jnp.arange(moved.shape[-1]) < end[:, None, None], moved, 0)


def _shift(x: Array, by: int) -> Array:
    """Entry n is what entry n - by was."""
    by = min(by, x.shape[-1])
    return jnp.pad(x[..., : x.shape[-1] - by], [(0, 0)] * (x.ndim - 1) + [(by, 0)])
