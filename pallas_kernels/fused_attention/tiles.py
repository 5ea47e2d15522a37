"""Tile shapes of the attention kernels, by compute capability.

Measured on an H200 (`python -m pallas_kernels.bench fused_attention --sweep`); elsewhere they are
the same as far as shared memory allows, until somebody measures them there.
"""

from typing import NamedTuple

import jax.numpy as jnp

from pallas_kernels.columns import lanes
from pallas_kernels.gpus import Gpu


class Tile(NamedTuple):
    """Queries and keys of a program's inner product, and its launch parameters."""

    rows: int
    block: int
    warps: int
    stages: int


class Tiles(NamedTuple):
    """The tiles of a call, and in how many programs its causal rows are cut."""

    draft: Tile
    causal: Tile
    programs: int


# Tiles of verify rows by their number of rows, and how many of their programs a multiprocessor
# holds at once. From Hopper on, 64 rows use its larger matrix instructions: better than 32 even
# where half of them are padding. 128 are for rows that fit one such tile, but no smaller one: two
# tiles would read all keys twice. Longer rows are bound by products, not by keys.
_CAUSAL = {
    16: (Tile(16, 64, 2, 3), 4),
    32: (Tile(32, 64, 4, 5), 2),
    64: (Tile(64, 32, 4, 5), 3),
    128: (Tile(128, 64, 8, 5), 1),
}
_DRAFT = Tile(16, 16, 1, 5)


def choose_tiles(n_packed: int, group: int, head_dim: int, dtype: jnp.dtype, gpu: Gpu) -> Tiles:
    """Tiles for causal rows of `n_packed` = queries * group packed queries."""
    hopper = gpu.capability >= (9, 0)
    rows = lanes(n_packed)
    if rows > (128 if hopper and head_dim <= 128 else 64) or (rows == 32 and hopper):
        rows = 64
    causal, resident = _CAUSAL[rows]
    draft = _DRAFT._replace(rows=lanes(group))
    return Tiles(
        _fit(draft, head_dim, dtype, gpu),
        _fit(causal, head_dim, dtype, gpu),
        gpu.multiprocessors * resident,
    )


def _fit(tile: Tile, head_dim: int, dtype: jnp.dtype, gpu: Gpu) -> Tile:
    """Adapts a tile tuned for 2-byte heads of 128 to shared memory, where keys, values wait."""
    if dtype.itemsize > 2:  # exact products run on scalar units and unroll: keep them small
        return tile._replace(rows=16, block=16, warps=4, stages=2)
    if head_dim > 128:  # conversions of wide tiles need shared memory, too
        tile = tile._replace(stages=min(tile.stages, 3))
    key_bytes = 2 * lanes(head_dim) * dtype.itemsize
    query_bytes = tile.rows * lanes(head_dim) * dtype.itemsize

    def needed(tile: Tile) -> int:
        buffers = (tile.stages + 1) // 2 + 1  # two stages each, and room for conversions
        return query_bytes + buffers * tile.block * key_bytes

    while needed(tile) > gpu.shared_memory:
        if tile.stages > 2:
            tile = tile._replace(stages=tile.stages - 1)
        else:
            tile = tile._replace(block=tile.block // 2)
    return tile
