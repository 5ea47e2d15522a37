"""`rank_positions` of coded scores in Pallas (Triton lowering): every code is read once.

One program per span of positions of one layer, row and list. It holds sums over the queries of all
heads that share the list, one position a lane, so that every load is aligned and nothing crosses
lanes. Queries come by age, the newest committed one first; those that speak of the positions ahead
get a sum for each age, which XLA moves on (`reference.look_ahead`): that is a hundredth of the
codes.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.fused_attention.scores import FIRST, SHIFT, CodedScores
from pallas_kernels.rank_positions.reference import MOST_FACTOR, look_ahead

BLOCK = 32  # positions of a row of the tile
_UNROLLED = 64  # packed queries; of more, the older ones are added in a loop


class Tile(NamedTuple):
    """Blocks of a program, its warps, and the KV heads in each pass of its loop."""

    blocks: int
    warps: int
    heads: int = 1


TILE = Tile(32, 2)  # 16 codes a thread, one wide load


# A code's steps from the first, put where a float32 has exponent and mantissa, are its weight times
# 2^-111, SMALLEST included; below that they are denormal and count double.
_EXPONENT = FIRST >> 3
_TO_STEPS = -FIRST % 256  # what to add, modulo 256


def _add(total: Array, codes: Array, factor: Array, interpret: bool) -> Array:
    """total + factor * 2^-_EXPONENT * the weights of `codes`, each up to SMALLEST more.

    The kernel is bound by its instructions as much as by memory, and the compiler takes two for a
    code's bits and fuses no multiplication with an addition: hence assembly, of four codes each.
    """
    if interpret:
        steps = (codes.astype(jnp.int32) + _TO_STEPS) & 0xFF
        bits = (steps << SHIFT) | (1 << (SHIFT - 1))
        return total + lax.bitcast_convert_type(bits, jnp.float32) * factor
    [total] = plt.elementwise_inline_asm(
        _ADD_FOUR,
        args=[codes, jnp.broadcast_to(factor, codes.shape), total],
        constraints="=f,=f,=f,=f,r,f,f,f,f,f,f,f,f",
        pack=4,
        result_shape_dtypes=[jax.ShapeDtypeStruct(total.shape, jnp.float32)],
    )
    return total


def _add_four() -> str:
    high, low = _TO_STEPS & 0x80, _TO_STEPS & 0x7F
    every = 0x01010101
    # Bytewise sum but for its highest bits, which are no sums and go with the masks.
    steps = f"""
    and.b32 steps, $4, {0x7F * every};
    add.u32 steps, steps, {low * every};
    lop3.b32 steps, steps, $4, {0x80 * every}, 0x78;"""
    # Shifts leave the other code of a pair outside of the register, or far down the mantissa. The
    # bit below each, for the middle of what a code stands for, has room but for the first code's.
    return f"""{{
    .reg .b32 steps, even, odd, w0, w1, w2, w3;{steps if low else " mov.b32 steps, $4;"}
    lop3.b32 even, steps, 0x00FF00FF, {high * 0x00010001 + 0x00008000}, 0x6A;
    lop3.b32 odd, steps, 0xFF00FF00, {high * 0x01000100 + 0x00800080}, 0x6A;
    mad.lo.u32 w0, even, {1 << SHIFT}, {1 << (SHIFT - 1)};
    shl.b32 w1, odd, {SHIFT - 8};
    shl.b32 w2, even, {SHIFT - 16};
    shr.b32 w3, odd, {24 - SHIFT};
    fma.rn.f32 $0, w0, $5, $9;
    fma.rn.f32 $1, w1, $6, $10;
    fma.rn.f32 $2, w2, $7, $11;
    fma.rn.f32 $3, w3, $8, $12;
}}"""


_ADD_FOUR = _add_four()


def _kernel(
    end_ref,
    committed_ref,
    here_ref,
    *refs,
    group: int,
    lists: int,
    context: int,
    ages: int,
    n_spans: int,
    tile: Tile,
    interpret: bool,
):
    *ahead_refs, codes_ref, factor_ref = refs[: -1 - ages]
    out_ref, *moving_refs = refs[-1 - ages :]
    index, row, layer = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    listed, span = index // n_spans, index % n_spans
    n_heads, n_queries = codes_ref.shape[2] // lists, here_ref.shape[1]
    end, committed = end_ref[row], committed_ref[row]
    share = 1 / (group * n_heads)

    block, lane = span * tile.blocks + jnp.arange(tile.blocks), jnp.arange(BLOCK)
    to = block[:, None] * BLOCK + lane[None]
    last = jnp.maximum(end - 1, 0) // BLOCK
    position = jnp.minimum(block, last)[:, None] * BLOCK + lane[None]
    zeros = jnp.zeros((tile.blocks, BLOCK), jnp.float32)

    def store(ref, sums):
        sums = jnp.where(to < end, sums, 0).astype(ref.dtype)
        plt.store(ref.at[layer, row, listed, to], sums, mask=to < context)

    # Loads have no masks, which would cost instructions: what is not to be read is replaced by
    # something near, and gets the weight 0 or lies past the end.

    def query_and_weights(age):
        """The query `age` before the newest committed one; behind the oldest come the rejected."""
        query = committed - 1 - age
        query = jnp.where(query < 0, query + n_queries, query)
        here, ahead = here_ref[row, query], jnp.float32(0)
        if isinstance(age, int) and age < ages:
            ahead = jnp.where(age < committed, ahead_refs[0][row, query], 0)
        return jnp.where((here != 0) | (ahead != 0), query, 0), here * share, ahead * share

    together = max(n for n in range(1, 9) if group % n == 0)  # heads, for short programs

    def add_query(total, head, query, weight):
        """Adds the probabilities of a query, times `weight`."""

        def add_heads(i, total):
            for p in [query * group + i * together + j for j in range(together)]:
                codes = plt.load(codes_ref.at[layer, row, head, p, position])
                factor = factor_ref[layer, row, head, p]
                factor = jnp.where(factor < MOST_FACTOR, factor, 0) * (weight * 2.0**_EXPONENT)
                total = _add(total, codes, factor, interpret)
            return total

        if together == group:
            return add_heads(0, total)
        return lax.fori_loop(0, group // together, add_heads, total)

    def rank():
        newest = [query_and_weights(age) for age in range(ages)]

        def add_head(i, sums):
            head = listed * n_heads + i
            older, *by_age = sums
            by_age = [
                add_query(total, head, query, 1.0)
                for total, (query, _, _) in zip(by_age, newest, strict=True)
            ]

            def add_older(age, older):
                query, weight, _ = query_and_weights(age)
                return add_query(older, head, query, weight)

            if n_queries * group <= _UNROLLED:
                for age in range(ages, n_queries):
                    older = add_older(age, older)
            else:
                older = lax.fori_loop(ages, n_queries, add_older, older)
            return older, *by_age

        at_once = math.gcd(n_heads, tile.heads)

        def add_some(i, sums):
            for j in range(at_once):
                sums = add_head(i * at_once + j, sums)
            return sums

        sums = (zeros,) * (1 + ages)
        passes = n_heads // at_once
        ranking, *by_age = (
            add_some(0, sums) if passes == 1 else lax.fori_loop(0, passes, add_some, sums)
        )
        for ref, total, (_, here, ahead) in zip(moving_refs, by_age, newest, strict=True):
            ranking += total * here
            store(ref, total * ahead)
        store(out_ref, ranking)

    pl.when(span * tile.blocks * BLOCK < end)(rank)

    @pl.when(span * tile.blocks * BLOCK >= end)
    def _():
        for ref in (out_ref, *moving_refs):
            store(ref, zeros)


@functools.partial(
    jax.jit,
    static_argnames=("group", "lists", "drafts", "context", "ages", "interpret", "tile"),
)
def rank_positions(
    scores: CodedScores,
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
    interpret: bool,
    tile: Tile = TILE,
) -> Array:
    n_layers, n_rows, _, _ = scores.factor.shape
    ages = 0 if ahead is None else min(ages, here.shape[1])
    n_spans = pl.cdiv(context, tile.blocks * BLOCK)
    kernel = functools.partial(
        _kernel,
        group=group,
        lists=lists,
        context=context,
        ages=ages,
        n_spans=n_spans,
        tile=tile,
        interpret=interpret,
    )
    sums = jax.ShapeDtypeStruct((n_layers, n_rows, lists, context), jnp.float16)
    ranking, *moving = pl.pallas_call(
        kernel,
        out_shape=(sums,) * (1 + ages),
        grid=(n_spans * lists, n_rows, n_layers),
        name="rank_positions",
        compiler_params=plt.CompilerParams(num_warps=tile.warps, num_stages=1),
        interpret=interpret,
    )(end, committed, here, *([ahead] if ages else []), *scores)
    if not moving:
        return ranking
    return (ranking + look_ahead(moving, end, drafts)).astype(ranking.dtype)
