"""The best token that the filters of a row keep, without a sort.

The top_k threshold is found by bisection in the list. The best token above it is taken, and asked
is whether the tokens above that one have the mass of top_p already; if so, the best of those is
next, and so on: one or two rounds, for what is drawn is likely to be kept. Rows whose filters keep
more than the list holds (over 512 tokens, at least) go the same way over the logits in memory:
slower, never wrong.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.sample_tokens.best_token import best_of_row
from pallas_kernels.sample_tokens.block import Block, Fold, enough, mass_of, top_k_threshold
from pallas_kernels.sample_tokens.filters import float_of_bits, ordered_bits
from pallas_kernels.sample_tokens.row import Row
from pallas_kernels.sample_tokens.tiles import Tiles
from pallas_kernels.sample_tokens.triton_parts import LOG2E, NO_ID, better, load_row, max_of, min_of

_FEW = 16  # lanes that look at one token


class Filters(NamedTuple):
    """References of what the filters of a row need."""

    top_k: Any
    top_p: Any
    min_p: Any
    filtered: Any
    high: Any
    norm: Any
    list: Any
    count: Any
    bound: Any


def best_filtered(
    row: Row, filters: Filters, bound: Array, part: int, tiles: Tiles
) -> tuple[Array, Array]:
    """Exact score and local id of the best token that top_k, top_p and min_p keep."""
    r = row.index
    top_k, top_p, min_p = filters.top_k[r], filters.top_p[r], filters.min_p[r]
    highs, norms = load_row(filters.high, r), load_row(filters.norm, r, other=0)
    high = highs.max()
    total = (norms * jnp.exp2((highs - high) * (LOG2E / row.divisor))).sum()

    lane = jnp.arange(tiles.listed)
    in_list = lane < filters.count[r]
    groups = plt.load(filters.list.at[r, lane], mask=in_list, other=0)
    column = lax.broadcasted_iota(jnp.int32, (1, tiles.group), 1)
    at = groups[:, None] * tiles.group + column
    listed = Block.of(row, at, jnp.broadcast_to(in_list[:, None], at.shape), high)

    def of_list(f, init):
        return f(listed, init)

    def of_row(f, init):
        def body(c, carry):
            at = c * tiles.stream + jnp.arange(tiles.stream)
            return f(Block.of(row, at, at >= 0, high), carry)

        return lax.fori_loop(0, pl.cdiv(row.vocab, tiles.stream), body, init)

    # Tokens outside the list have at most this key; a few units make up for division's rounding.
    complete = filters.bound[r] == 0
    at_most = float_of_bits(filters.bound[r]) / row.divisor
    limit = jnp.where(complete, np.uint32(0), ordered_bits(at_most) + np.uint32(4))
    excluded = jnp.exp(at_most - row.tempered(high)) * 1.0001 < min_p  # they are by min_p

    least = top_k_threshold(of_list, top_k)
    k_in_list = least > limit
    share = jnp.where(top_k > 0, mass_of(of_list, least), total)
    mass = mass_of(of_list, jnp.maximum(least, limit + np.uint32(1)))
    p_in_list = (top_p < 1) & enough(mass, top_p * share)
    share_known = (top_k <= 0) | k_in_list | (top_p >= 1)
    all_in_list = complete | (share_known & (k_in_list | p_in_list | excluded))

    def search_list(_):
        start = jnp.maximum(least, limit + np.uint32(1))
        first = _best_above(row, of_list, start, min_p)
        return _first_kept(row, of_list, first, start, high, top_p * share, top_p, min_p)

    def search_row(_):
        start = jnp.maximum(top_k_threshold(of_row, top_k), np.uint32(1))
        wanted = top_p * mass_of(of_row, start)
        first = best_of_row(row, bound, part)
        return _first_kept(row, of_row, first, start, high, wanted, top_p, min_p)

    return lax.cond(all_in_list, search_list, search_row, 0)


def _first_kept(
    row: Row,
    fold: Fold,
    best: tuple[Array, Array],
    start: Array,
    high: Array,
    wanted: Array,
    top_p: Array,
    min_p: Array,
) -> tuple[Array, Array]:
    """The best token that is kept; most often that is the first one tried, `best`.

    top_p keeps a token unless the more likely ones have the mass it wants. If one is not kept, no
    token of its key or a lower one is, so the best of those above is next. Keys below `start` are
    out from the beginning.
    """

    def try_one(state):
        _, score, token, start = state
        at = jnp.broadcast_to(jnp.minimum(token, row.vocab - 1), (_FEW,))
        block = Block.of(row, at, at >= 0, high)
        key, weight = ordered_bits(block.tempered.max()), block.weights.max()
        above = jnp.maximum(start, key + np.uint32(1))
        mass = lax.cond(top_p < 1, lambda _: mass_of(fold, above), lambda unused: unused, top_p)
        in_nucleus = (top_p >= 1) | ~enough(mass, wanted)
        kept = (key >= start) & (weight >= min_p) & in_nucleus
        score, token = lax.cond(
            kept,
            lambda found: found,
            lambda _: _best_above(row, fold, above, min_p),
            (score, token),
        )
        return kept | (token == NO_ID), score, token, above

    state = best[1] == NO_ID, *best, start
    _, score, token, _ = lax.while_loop(lambda state: ~state[0], try_one, state)
    return score, token


def _best_above(row: Row, fold: Fold, start: Array, min_p: Array) -> tuple[Array, Array]:
    """The best token whose key is at least `start` and that min_p keeps."""

    def best(block, found):
        scores = row.exact_scores(block.tempered, block.at)
        candidate = (block.keys >= start) & (block.weights >= min_p)
        scores = jnp.where(candidate, scores, -jnp.inf)
        score = max_of(scores)
        ids = jnp.where(candidate & (scores == score), block.at, NO_ID)
        return better((score, min_of(ids)), found)

    return fold(best, (jnp.float32(-jnp.inf), NO_ID))
