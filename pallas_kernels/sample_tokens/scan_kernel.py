"""Reads all logits, once: a program keeps an upper bound of its part's noisy scores, and the peak.

With filters it also keeps the part's normaliser and the largest logit of every group of ids; biased
and withheld ids are patched in, in the parts that hold one. Without filters it does not know of
them: bounds of untouched logits still hold where logits are lowered, and `best_token.py` scores all
biased ids, which may be raised.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.sample_tokens.bounds import bound_of
from pallas_kernels.sample_tokens.changes import Changes
from pallas_kernels.sample_tokens.row import Row
from pallas_kernels.sample_tokens.tiles import Tiles
from pallas_kernels.sample_tokens.triton_parts import first_id, high_and_norm, max_of


def scan_kernel(
    position_ref,
    temperature_ref,
    key0_ref,
    key1_ref,
    start_ref,
    logits_ref,
    bound_ref,
    peak_ref,
    *,
    vocab: int,
    tiles: Tiles,
    interpret: bool,
):
    p, r = pl.program_id(0), pl.program_id(1)
    # All small loads before anything waits for one of them.
    position, temperature, start = position_ref[r], temperature_ref[r], start_ref[0]
    keys = key0_ref[r], key1_ref[r]

    @pl.when(position >= 0)
    def _():
        row = Row(r, temperature, keys, start, None, logits_ref, vocab, interpret)
        low = first_id(p, tiles.part, vocab)
        at = low + jnp.arange(tiles.lanes)
        offsets = range(0, tiles.part, tiles.lanes)
        logits = [row.load_part(at + offset, tiles.part) for offset in offsets]
        high = functools.reduce(functools.partial(_higher, interpret=interpret), logits)
        peak = jnp.where(high < jnp.inf, high, jnp.inf).max()  # Triton's maximum ignores NaN
        peak_ref[r, p] = peak
        bound_ref[r, p] = bound_of(row, logits, at, peak, (start + low) % tiles.part == 0)


def scan_with_filters_kernel(
    position_ref,
    temperature_ref,
    key0_ref,
    key1_ref,
    start_ref,
    *refs,
    vocab: int,
    tiles: Tiles,
    interpret: bool,
):
    changes = Changes(*refs[:4])
    logits_ref, bound_ref, peak_ref, group_ref, high_ref, norm_ref = refs[4:]
    c, r = pl.program_id(0), pl.program_id(1)

    @pl.when(position_ref[r] >= 0)
    def _():
        scalars = temperature_ref, key0_ref, key1_ref, start_ref
        row = Row.of(r, scalars, changes, logits_ref, vocab=vocab, interpret=interpret)
        low = c * tiles.chunk
        n_groups = tiles.chunk // tiles.group
        at = low + _grid(n_groups, tiles.group)
        logits = row.load(at)
        peak_ref[r, c] = max_of(jnp.where(logits < jnp.inf, logits, jnp.inf))
        logits = row.patch(logits, at, (low, low + tiles.chunk))
        group_ref[r, c * n_groups + jnp.arange(n_groups)] = logits.max(1)
        high, norm = high_and_norm(logits, row.divisor)
        bound_ref[r, c] = bound_of(row, [logits], at, high)
        high_ref[r, c] = high
        norm_ref[r, c] = norm


def _grid(rows: int, columns: int) -> Array:
    """[rows, columns] consecutive numbers, row by row."""
    row, column = (lax.broadcasted_iota(jnp.int32, (rows, columns), axis) for axis in (0, 1))
    return row * columns + column


def _higher(one: Array, other: Array, interpret: bool) -> Array:
    """The maximum, NaN if either is, in one instruction."""
    if interpret:
        return jnp.maximum(one, other)
    [higher] = plt.elementwise_inline_asm(
        "max.NaN.f32 $0, $1, $2;",
        args=[one, other],
        constraints="=f,f,f",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(one.shape, jnp.float32)],
    )
    return higher
