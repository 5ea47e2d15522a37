"""Sizes of the sampler's programs, smaller for small vocabularies."""

from typing import NamedTuple

from jax.experimental import pallas as pl


class Tiles(NamedTuple):
    """Sizes that are powers of two. Results do not depend on them, but for sums' rounding."""

    part: int = 2048  # ids of a scan program, which share one bound
    lanes: int = 128  # of them, what is loaded at once
    scan_warps: int = 1
    chunk: int = 4096  # ids of a scan program with filters
    group: int = 16  # ids that share one maximum
    listed: int = 512  # groups of a list
    stream: int = 8192  # ids at a time where a whole row is read
    warps: int = 8
    collect_warps: int = 16
    pick_warps: int = 8
    filter_warps: int = 16  # of a pick with filters


def fit_tiles(tiles: Tiles, vocab: int) -> Tiles:
    """Smaller tiles for small vocabularies."""
    most = max(tiles.group, pl.next_power_of_2(vocab))
    part = min(tiles.part, most)
    return tiles._replace(
        part=part,
        lanes=min(tiles.lanes, part),
        chunk=min(tiles.chunk, most),
        stream=min(tiles.stream, most),
    )
