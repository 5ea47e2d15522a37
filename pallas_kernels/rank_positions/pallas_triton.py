"""`rank_positions` of coded scores in Pallas (Triton lowering): every code is read once.

One program per span of blocks of one layer, row and KV head. It holds a tile [blocks, BLOCK] of the
ranking, one position a lane, and adds the queries up one after another, the newest committed one
first, so that every load is aligned and no sum crosses lanes.

What moves on with the text goes through products with banded matrices: from position m of a block,
age a reaches the positions m + a + 1 .. m + a + drafts, of the same block or of the next. The
part for the next block is moved there by another product. So the tile starts a block early (more,
should drafts reach further), with what belongs to the span before.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.fused_attention.scores import FIRST, SHIFT, CodedScores
from pallas_kernels.rank_positions.reference import MOST_FACTOR

BLOCK = 32  # positions of a row of the tile
_UNROLLED = 64  # packed queries; of more, the older ones are added in a loop


class Tile(NamedTuple):
    """Blocks of a program, the early ones included, and its warps."""

    blocks: int
    warps: int


def default_tile(ages: int) -> Tile:
    """16 codes a thread, one wide load. Longer tiles repeat fewer of the early blocks."""
    return Tile(64, 4) if ages else Tile(32, 2)


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


def _dot(a: Array, b: Array) -> Array:
    return jnp.dot(a, b, preferred_element_type=jnp.float32)


def _bands(ages: int, drafts: int) -> np.ndarray:
    """[1 + early, ages, BLOCK, BLOCK]: whether position m of a block, at that age, reaches position
    n of the same block, of the next .. of the last it can reach."""
    block = np.arange(1 + pl.cdiv(ages - 1 + drafts, BLOCK))[:, None, None, None]
    distance = block * BLOCK + np.arange(BLOCK) - np.arange(BLOCK)[:, None]
    age = np.arange(ages)[:, None, None]
    return (distance > age) & (distance <= age + drafts)


def _kernel(
    end_ref,
    committed_ref,
    here_ref,
    *refs,
    group: int,
    drafts: int,
    context: int,
    ages: int,
    early: int,
    n_spans: int,
    tile: Tile,
    interpret: bool,
):
    *ahead_refs, codes_ref, factor_ref, out_ref = refs
    u, row, layer = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    head, span = u // n_spans, u % n_spans
    n_blocks = codes_ref.shape[4] // BLOCK
    n_queries = here_ref.shape[1]
    end, committed = end_ref[row], committed_ref[row]

    first = span * (tile.blocks - early)
    index, lane = jnp.arange(tile.blocks), jnp.arange(BLOCK)
    block = first - early + index
    own = (index >= early) & (block < n_blocks)
    last = jnp.maximum(end - 1, 0) // BLOCK
    at = jnp.clip(block, 0, last)
    position = at[:, None] * BLOCK + lane[None]
    zeros = jnp.zeros((tile.blocks, BLOCK), jnp.float32)

    def store(ranking):
        to = jnp.where(own, block, n_blocks)[:, None] * BLOCK + lane[None]
        ranking = jnp.where(to < end, ranking, 0).astype(out_ref.dtype)
        mask = own[:, None] & (to < context)
        plt.store(out_ref.at[layer, row, head, to], ranking, mask=mask)

    heads = max(n for n in range(1, 9) if group % n == 0)  # at once, for short programs

    def add_query(total, query, weight):
        """Adds the probabilities of a query's heads, times `weight`."""

        def add_heads(i, total):
            for p in [query * group + i * heads + j for j in range(heads)]:
                codes = plt.load(codes_ref.at[layer, row, head, p, position])
                factor = factor_ref[layer, row, head, p]
                factor = jnp.where(factor < MOST_FACTOR, factor, 0) * weight
                total = _add(total, codes, factor, interpret)
            return total

        if heads == group:
            return add_heads(0, total)
        return lax.fori_loop(0, group // heads, add_heads, total)

    def query_and_weight(age):
        """The query `age` before the newest committed one; behind the oldest come the rejected."""
        query = committed - 1 - age
        query = jnp.where(query < 0, query + n_queries, query)
        return query, here_ref[row, query] * (2.0**_EXPONENT / group)

    # Loads have no masks, which would cost instructions: what is not to be read is replaced by
    # something near, and gets the weight 0 or lies past the end.

    def rank():
        ranking, reached = zeros, [zeros] * (1 + early)
        for age in range(ages):
            query, weight = query_and_weight(age)
            moving = jnp.where(age < committed, ahead_refs[0][row, query], 0)
            query = jnp.where((weight != 0) | (moving != 0), query, 0)
            probabilities = add_query(zeros, query, jnp.float32(2.0**_EXPONENT))
            ranking += probabilities * (weight * 2.0**-_EXPONENT)
            moving = jnp.where(block >= 0, moving * (1 / (group * drafts)), 0)
            moved = (probabilities * moving[:, None]).astype(jnp.bfloat16)
            for i in range(1 + early):
                band = plt.load(ahead_refs[1].at[i, age, lane[:, None], lane[None]])
                reached[i] += _dot(moved, band)

        def add_older(age, ranking):
            query, weight = query_and_weight(age)
            return add_query(ranking, jnp.where(weight != 0, query, 0), weight)

        if n_queries * group <= _UNROLLED:
            for age in range(ages, n_queries):
                ranking = add_older(age, ranking)
        else:
            ranking = lax.fori_loop(ages, n_queries, add_older, ranking)
        if ages:
            ranking += reached[0]
        for i in range(1, 1 + early):  # what is said of the i-th block behind
            down = (index[:, None] == index[None] + i).astype(jnp.bfloat16)
            ranking += _dot(down, reached[i].astype(jnp.bfloat16))
        store(ranking)

    pl.when(first * BLOCK < end)(rank)
    pl.when(first * BLOCK >= end)(lambda: store(zeros))


@functools.partial(
    jax.jit, static_argnames=("group", "drafts", "context", "ages", "interpret", "tile")
)
def rank_positions(
    scores: CodedScores,
    end: Array,
    here: Array,
    ahead: Array | None,
    committed: Array,
    *,
    group: int,
    drafts: int,
    context: int,
    ages: int,
    interpret: bool,
    tile: Tile | None = None,
) -> Array:
    n_layers, n_rows, n_heads, _ = scores.factor.shape
    ages, early, moving = 0 if ahead is None else min(ages, here.shape[1]), 0, ()
    tile = tile or default_tile(ages)
    if ages:
        bands = _bands(ages, drafts)
        early, moving = len(bands) - 1, (ahead, jnp.asarray(bands, jnp.bfloat16))
    n_spans = pl.cdiv(context, (tile.blocks - early) * BLOCK)
    kernel = functools.partial(
        _kernel,
        group=group,
        drafts=drafts,
        context=context,
        ages=ages,
        early=early,
        n_spans=n_spans,
        tile=tile,
        interpret=interpret,
    )
    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((n_layers, n_rows, n_heads, context), jnp.float16),
        grid=(n_spans * n_heads, n_rows, n_layers),
        name="rank_positions",
        compiler_params=plt.CompilerParams(num_warps=tile.warps, num_stages=1),
        interpret=interpret,
    )(end, committed, here, *moving, *scores)
