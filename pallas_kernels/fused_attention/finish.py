"""The launch that ends a call: draft rows, and the parts of verify and prefill rows to be merged.

Merging is short, and most of it is waiting. In a launch of its own it takes 5 us of a layer on an
H200; here its programs come last, where they fill the multiprocessors that have run out of drafts.
"""

import functools
import math
from collections.abc import Callable

import jax
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels.fused_attention.causal_kernel import Unmerged
from pallas_kernels.fused_attention.combine_kernel import combine_kernel
from pallas_kernels.fused_attention.draft_kernel import draft_kernel
from pallas_kernels.fused_attention.rows import DraftSlots
from pallas_kernels.fused_attention.tiles import Tile
from pallas_kernels.fused_attention.triton_parts import launch

_ROWS_PER_WARP = 2  # of a program that merges: few, for many programs to wait at the same time


def finish(
    q: Array,
    k_pool: Array,
    v_pool: Array,
    layer: Array,
    drafts: DraftSlots | None,
    unmerged: list[Unmerged],
    factor: Array | None,
    factor_shape: jax.ShapeDtypeStruct | None,
    *,
    scale: float,
    tile: Tile,
    interpret: bool,
) -> tuple[Array, Array | None]:
    """The output [T, Hq, D], and the factors of this layer's scores, in place (None without)."""
    _, n_heads, head_dim = q.shape
    n_kv_heads = k_pool.shape[1]
    inputs = [layer[None]]
    branches: list[tuple[tuple[int, ...], Callable[..., None]]] = []

    def add(grid: tuple[int, ...], kernel: Callable[..., None], arrays: tuple[Array, ...]) -> None:
        begin, end = len(inputs), len(inputs) + len(arrays)
        inputs.extend(arrays)

        def run(ids, layer_ref, *refs):
            kernel(*ids, layer_ref, *refs[begin - 1 : end - 1], *refs[len(inputs) - 1 :])

        branches.append((grid, run))

    if drafts is not None:
        sizes = {"group": n_heads // n_kv_heads, "head_dim": head_dim, "tile": tile}
        kernel = functools.partial(draft_kernel, **sizes, scale=scale, interpret=interpret)
        add((drafts.length.shape[0], n_kv_heads), kernel, (*drafts, q, k_pool, v_pool))
    rows = _ROWS_PER_WARP * tile.warps
    for left in unmerged:
        grid = left.sizes.n_work, pl.cdiv(left.rows, rows), n_kv_heads
        kernel = functools.partial(combine_kernel, rows=rows, sizes=left.sizes)
        add(grid, kernel, (left.merges, left.place, *left.parts))

    def kernel(i, *refs):
        for grid, run in branches:
            n = math.prod(grid)

            @pl.when((i >= 0) & (i < n))
            def _(i=i, grid=grid, run=run):
                ids = []
                for size in grid:
                    ids.append(lax.rem(i, size))
                    i = lax.div(i, size)
                run(ids, *refs)

            i = i - n

    outputs = [(jax.ShapeDtypeStruct(q.shape, q.dtype), None)]
    if factor_shape is not None:
        outputs.append((factor_shape, factor))
    out, *factors = launch(
        kernel,
        tuple(inputs),
        outputs,
        grid=(sum(math.prod(grid) for grid, _ in branches),),
        name="draft_attention" if drafts is not None else "combine_attention",
        tile=tile,
        interpret=interpret,
    )
    return out, factors[0] if factors else None
