"""The launch that ends a call: draft rows, and the parts of verify and prefill rows to be merged.

Merging is short, and most of it is waiting. In a launch of its own it takes 5 us of a layer on an
H200; here its programs come last, where they fill the multiprocessors that have run out of drafts.
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

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


class _Branch(NamedTuple):
    """Some of the launch's programs."""

    kernel: Callable[..., None]
    """Called like a kernel of `triton_parts.launch`: with program ids, the layer and arrays."""
    grid: tuple[int, ...]
    inputs: tuple[Array, ...]

    @property
    def programs(self) -> int:
        return math.prod(self.grid)

    def run(self, i: Array, *refs) -> None:
        """Program `i` of them."""
        ids = []
        for size in self.grid:
            ids.append(lax.rem(i, size))
            i = lax.div(i, size)
        self.kernel(*ids, *refs)


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
    branches = []
    if drafts is not None:
        sizes = {"group": n_heads // n_kv_heads, "head_dim": head_dim, "tile": tile}
        attend = functools.partial(draft_kernel, **sizes, scale=scale, interpret=interpret)
        grid = drafts.length.shape[0], n_kv_heads
        branches.append(_Branch(attend, grid, (*drafts, q, k_pool, v_pool)))
    rows = _ROWS_PER_WARP * tile.warps
    for left in unmerged:
        merge = functools.partial(combine_kernel, rows=rows, sizes=left.sizes)
        grid = left.sizes.n_work, pl.cdiv(left.rows, rows), n_kv_heads
        branches.append(_Branch(merge, grid, (left.merges, left.place, *left.parts)))
    inputs = [array for branch in branches for array in branch.inputs]

    def kernel(i, layer_ref, *refs):
        refs, outs = refs[: len(inputs)], refs[len(inputs) :]
        for branch in branches:
            own, refs = refs[: len(branch.inputs)], refs[len(branch.inputs) :]
            here = (i >= 0) & (i < branch.programs)
            pl.when(here)(functools.partial(branch.run, i, layer_ref, *own, *outs))
            i = i - branch.programs

    outputs = [(jax.ShapeDtypeStruct(q.shape, q.dtype), None)]
    if factor_shape is not None:
        outputs.append((factor_shape, factor))
    out, *factors = launch(
        kernel,
        (layer[None], *inputs),
        outputs,
        grid=(sum(branch.programs for branch in branches),),
        name="draft_attention" if drafts is not None else "combine_attention",
        tile=tile,
        interpret=interpret,
    )
    return out, factors[0] if factors else None
