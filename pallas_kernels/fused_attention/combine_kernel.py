"""Merges the parts that programs have of a work row; writes the factors of its codes, too."""

import functools

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.columns import Columns, load, store
from pallas_kernels.fused_attention.plan import Merge, read
from pallas_kernels.fused_attention.triton_parts import DEAD, Softmax
from pallas_kernels.fused_attention.work_rows import Sizes, WorkRow, place_of

_PARTS = 5  # merged at once: as many as a verify row of a large batch has


def combine_kernel(
    w: Array,
    t: Array,
    h: Array,
    layer_ref,
    merges_ref,
    place_ref,
    part_ref,
    part_lse_ref,
    *refs,
    rows: int,
    sizes: Sizes,
):
    """Tile `t` of `rows` packed queries of work row `w`."""
    merge = read(Merge, merges_ref, w)
    at = t * rows + jnp.arange(rows)
    first = merge.first + t * rows
    work = WorkRow.of(merge.r, first, rows, merge.start, merge.count, sizes)
    columns = Columns.of(sizes.head_dim)
    n_rows = part_ref.shape[2]
    in_row = (work.p < sizes.n * sizes.group) & (at < n_rows)
    at = jnp.where(in_row, at, n_rows)

    def merge_some(i, softmax):
        """A few parts at once: their loads must not wait for each other."""
        parts = []
        for j in [i * _PARTS + j for j in range(_PARTS)]:
            part = jnp.where(j == 0, merge.part, merge.program + jnp.minimum(j, merge.n_parts - 1))
            there = in_row & (j < merge.n_parts)
            lse = plt.load(part_lse_ref.at[part, h, at], mask=there, other=DEAD)
            out = load(part_ref, part, h, at[:, None], columns.at, mask=columns.mask(there))
            parts.append((lse, out))
        return functools.reduce(lambda softmax, part: softmax.merge(*part), parts, softmax)

    softmax = Softmax.empty(rows, columns.at.shape[1])
    n_merges = pl.cdiv(merge.n_parts, _PARTS)
    out, lse = lax.fori_loop(0, n_merges, merge_some, softmax).result()
    out = jnp.where(work.live[:, None], out, 0)
    out_ref = refs[1] if sizes.score_queries else refs[0]
    query = (sizes.first_query + work.r * sizes.n + work.query)[:, None]
    heads = (h * sizes.group + work.head)[:, None]
    store(out_ref, query, heads, columns.at, value=out, mask=columns.mask(in_row))
    if not sizes.score_queries:
        return

    part_reference_ref, _, factor_ref = refs
    place = place_of(place_ref, work.r, sizes)
    scored = in_row & (work.scored < sizes.score_queries * sizes.group) & (place >= 0)
    reference = plt.load(part_reference_ref.at[merge.part, h, at], mask=scored, other=0)
    value = jnp.exp2(reference - lse)
    store(factor_ref, layer_ref[0], place, h, work.scored, value=value, mask=scored)
