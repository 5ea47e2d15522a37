"""Tiles of the matmul kernel, which products it takes, and how XLA does the others.

The kernel beats XLA's (which pick their tiles and splits by trial) where all its blocks run at
once and leave few multiprocessors idle. Measured on an H200: at 256 rows the projections of
Qwen3-8B gain; its head, many waves of blocks long, does not, nor do those of Qwen3-1.7B at 136.
"""

from typing import NamedTuple

from pallas_kernels.gpus import Gpu


class Tile(NamedTuple):
    """What a warpgroup computes; a block has two of them."""

    rows: int
    columns: int
    stages: int
    """Operands in flight, of K_STEP of K each."""
    beside: bool = False
    """Whether the warpgroups of a block share rows and not columns."""
    pairs: bool = False
    """Whether neighbours along N load the rows they share once, in a cluster of two."""
    parts: int = 1
    """Blocks that divide K, each of which leaves a part of the sum."""

    @property
    def block_rows(self) -> int:
        return self.rows if self.beside else 2 * self.rows

    @property
    def block_columns(self) -> int:
        return 2 * self.columns if self.beside else self.columns

    def blocks(self, n_rows: int, n_columns: int) -> int:
        return -(-n_rows // self.block_rows) * (n_columns // self.block_columns) * self.parts


K_STEP = 64
MAX_PARTS = 4
_ROWS = 256
_MIN_STEPS = 32  # of K in a block: with fewer, its beginning and end are too much of its time
_MIN_SHARE = 0.9  # of the multiprocessors' time spent on what was asked for
# Larger ones load less for the same work, so they come first.
_TILES = (
    Tile(128, 192, stages=3),
    Tile(128, 128, stages=4, pairs=True),
    Tile(64, 192, stages=4),
    Tile(128, 64, stages=6, beside=True),
)


def choose_tile(n_rows: int, k: int, n_columns: int, gpu: Gpu, max_parts: int) -> Tile | None:
    """For [n_rows, k] x [k, n_columns]; None where XLA is expected to be as good."""
    # Fewer rows wait for the weights alone. TMA cuts rows in groups of 8.
    if gpu.capability != (9, 0) or not _ROWS // 2 < n_rows <= _ROWS or n_rows % 8:
        return None
    for tile in _TILES:
        if n_columns % (tile.block_columns * (2 if tile.pairs else 1)):
            continue
        for parts in range(1, max_parts + 1):
            split = tile._replace(parts=parts)
            if k % (K_STEP * parts) or k // (K_STEP * parts) < _MIN_STEPS:
                continue
            area = split.block_rows * split.block_columns * gpu.multiprocessors
            one_wave = split.blocks(n_rows, n_columns) <= gpu.multiprocessors
            if one_wave and n_rows * n_columns * parts >= _MIN_SHARE * area:
                return split
    return None


_XLA_BLOCK = 128  # rows and columns
_XLA_MIN_K = 512  # of a part
_XLA_MIN_ROWS = 64  # fewer are nearly vectors, for which XLA has other kernels


def choose_parts(n_rows: int, k: int, n_columns: int, gpu: Gpu, max_parts: int) -> int:
    """In how many parts XLA does [n_rows, k] x [k, n_columns].

    Where one kernel would leave multiprocessors idle it splits K on its own, but into float32, and
    a kernel of its own adds that. A step of Qwen3-1.7B (136 rows) on an H200: 2.81 ms against 3.01.
    """
    if n_rows < _XLA_MIN_ROWS:
        return 1
    blocks = -(-n_rows // _XLA_BLOCK) * -(-n_columns // _XLA_BLOCK)
    parts = 1
    while (
        2 * parts <= max_parts
        and 2 * parts * blocks <= gpu.multiprocessors
        and k % (2 * parts * K_STEP) == 0
        and k // (2 * parts) >= _XLA_MIN_K
    ):
        parts *= 2
    return parts
