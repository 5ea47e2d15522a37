"""`select_positions` in Pallas (Triton lowering): one program per list, no sort.

The bits of a non-negative float order like the float, so the count-th largest score is found by
bisection, one bit a step. Everything above that threshold is taken, and of the scores equal to it
the newest. Rows that fit are held in registers, in up to three pieces (arrays are powers of two);
longer ones are read again, from cache, for every bit.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

_BLOCK = 32768  # scores held in registers for the bisection
_PIECE = 8192  # scores read at once where they do not fit
_STEP = 2048  # scores compacted at once, which takes more registers for each
_BITS = {2: jnp.int16, 4: jnp.int32}


def ordered_bits(scores: Array) -> Array:
    """Non-negative int32 keys that order like `scores`; the sign is ignored, so -0.0 is 0."""
    keys = lax.bitcast_convert_type(scores, _BITS[scores.dtype.itemsize]).astype(jnp.int32)
    return keys & ((1 << (8 * scores.dtype.itemsize - 1)) - 1)


def _kernel(
    scores_ref,
    candidates_ref,
    count_ref,
    out_ref,
    *,
    k: int,
    pieces: tuple[int, ...],
    step: int,
    n_bits: int,
):
    row, listed, layer = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    size = scores_ref.shape[-1]
    n_candidates, count = jnp.minimum(candidates_ref[row], size), count_ref[row]

    def load(start, block):
        """Positions of a block and their keys, -1 where they do not compete."""
        position = start + jnp.arange(block)
        live = position < n_candidates
        scores = plt.load(scores_ref.at[layer, row, listed, position], mask=live, other=0)
        return position, jnp.where(live, ordered_bits(scores), -1)

    starts = [sum(pieces[:i]) for i in range(len(pieces))]
    resident = [load(start, block)[1] for start, block in zip(starts, pieces, strict=True)]

    def number(keep):
        """How many keys satisfy `keep`."""
        if resident:
            return sum(keep(keys).astype(jnp.int32).sum() for keys in resident)

        def add(b, total):
            return total + keep(load(b * _PIECE, _PIECE)[1]).astype(jnp.int32).sum()

        return lax.fori_loop(0, pl.cdiv(n_candidates, _PIECE), add, jnp.int32(0))

    def fix_bit(i, threshold):
        higher = threshold | (1 << (n_bits - 1 - i))
        return jnp.where(number(lambda key: key >= higher) >= count, higher, threshold)

    threshold = lax.fori_loop(0, n_bits, fix_bit, jnp.int32(0))
    missing = count - number(lambda key: key > threshold)
    older = number(lambda key: key == threshold) - missing  # of the ties, how many not to take

    def compact(b, carry):
        taken_before, ties_before = carry
        position, key = load(b * step, step)
        tie = key == threshold
        ties = ties_before + jnp.cumsum(tie.astype(jnp.int32))
        take = (key > threshold) | (tie & (ties > older))
        rank = taken_before + jnp.cumsum(take.astype(jnp.int32)) - 1
        index = jnp.where(take, rank, k)
        plt.store(out_ref.at[layer, row, listed, index], position, mask=take)
        taken_before += take.astype(jnp.int32).sum()
        return taken_before, ties_before + tie.astype(jnp.int32).sum()

    lax.fori_loop(0, pl.cdiv(n_candidates, step), compact, (jnp.int32(0), jnp.int32(0)))
    rest = jnp.arange(pl.next_power_of_2(k))
    dead = (rest >= count) & (rest < k)
    index = jnp.where(dead, rest, k)
    plt.store(out_ref.at[layer, row, listed, index], jnp.zeros_like(rest), mask=dead)


def resident_pieces(size: int) -> tuple[int, ...]:
    """Powers of two that hold `size` scores: two exact ones at most, and one for the rest."""
    pieces: list[int] = []
    while sum(pieces) < size:
        rest = size - sum(pieces)
        piece = pl.next_power_of_2(rest)
        if piece > rest and len(pieces) < 2:
            piece //= 2
        pieces.append(max(piece, 16))
    return tuple(pieces)


@functools.partial(jax.jit, static_argnames=("k", "interpret", "block"))
def select_positions(
    scores: Array,
    candidates: Array,
    count: Array,
    *,
    k: int,
    interpret: bool,
    block: int = _BLOCK,
) -> Array:
    n_layers, n_rows, n_lists, size = scores.shape
    pieces = resident_pieces(size) if size <= block else ()
    largest = max(pieces, default=_PIECE)
    n_bits = 8 * scores.dtype.itemsize - 1
    return pl.pallas_call(
        functools.partial(_kernel, k=k, pieces=pieces, step=min(largest, _STEP), n_bits=n_bits),
        out_shape=jax.ShapeDtypeStruct((n_layers, n_rows, n_lists, k), jnp.int32),
        grid=(n_rows, n_lists, n_layers),
        name="select_positions",
        compiler_params=plt.CompilerParams(num_warps=max(4, largest // 1024), num_stages=2),
        interpret=interpret,
    )(scores, candidates, count)
