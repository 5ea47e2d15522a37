"""Work rows: tiles of the packed queries of a KV head's group, p = query * group + head."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.fused_attention.tiles import Tile


class Sizes(NamedTuple):
    """Static sizes of a call."""

    n: int
    """Queries per row."""
    first_query: int
    """Where the rows' queries start among all."""
    group: int
    head_dim: int
    tile: Tile
    n_tiles: int
    n_work: int
    programs: int
    """Shares per KV head."""
    score_queries: int
    all_scored: bool
    """Whether every row has a place among the scores."""


class WorkRow(NamedTuple):
    """Packed queries of one row."""

    r: Array
    p: Array
    query: Array
    head: Array
    live: Array
    start: Array
    end: Array
    """One past the last position any live query attends to; 0 if none is live."""
    seen_by_all: Array
    """Positions before it are seen by all queries of the tile."""
    scored: Array
    """The packed query's place among the scored ones; P if it has none."""

    @classmethod
    def of(cls, r: Array, first: Array, rows: int, start: Array, count: Array, sizes: Sizes):
        """`rows` packed queries of row `r` from `first` on."""
        p = first + jnp.arange(rows)
        query = lax.div(p, sizes.group)  # `//` would care for negative numbers
        live = query < count
        scored = p - jnp.maximum(count - sizes.score_queries, 0) * sizes.group
        n_scored = sizes.score_queries * sizes.group
        return cls(
            r=r,
            p=p,
            query=query,
            head=p - query * sizes.group,
            live=live,
            start=start,
            end=work_end(first, rows, start, count, sizes.group),
            seen_by_all=start + lax.div(first, sizes.group) + 1,
            scored=jnp.where(live & (scored >= 0) & (scored < n_scored), scored, n_scored),
        )


def work_end(first: Array, rows: int, start: Array, count: Array, group: int) -> Array:
    """One past the last position that packed queries first .. first + rows - 1 attend to."""
    last = jnp.minimum(lax.div(first + rows - 1, group), count - 1)
    return jnp.where(first < count * group, start + last + 1, 0)


def place_of(place_ref, r: Array, sizes: Sizes) -> Array:
    """The place of row `r` among the scored ones, or -1."""
    return r if sizes.all_scored else place_ref[r]
