"""Attention of verify and prefill rows, and the scores that come with it.

The queries of a KV head's group are packed into tiles, p = query * group + head; a row's tiles are
*work rows*, each as long as its last query sees. All blocks of keys of all work rows form one line,
cut in equal shares, one for each program of a KV head: whatever the rows' lengths, the programs
fill the GPU once and end together (stream-K; Osama et al., 2023). A share may hold parts of several
work rows; program u leaves its part of work row w at u + w, which no other pair has, and a second
kernel merges the parts.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.fused_attention.rows import CausalRows
from pallas_kernels.fused_attention.scores import CodedScores, encode
from pallas_kernels.fused_attention.tiles import Tile
from pallas_kernels.fused_attention.triton_parts import (
    DEAD,
    LOG2E,
    Columns,
    Softmax,
    attend,
    dot,
    gather,
    launch,
    load,
    store,
)

_LEAST_KEYS = 256  # of a share, so that short contexts do not fall to pieces
_COMBINE = Tile(16, 16, 4, 2)
_PARTS = 4  # merged at once


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

    @property
    def least(self) -> int:
        return pl.cdiv(_LEAST_KEYS, self.tile.block)


class _WorkRow(NamedTuple):
    """A tile of packed queries of one row."""

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
    def of(cls, w, rows: int, offset: Array | int, start_ref, count_ref, sizes: Sizes):
        """`rows` packed queries from `offset` of work row `w` on."""
        r, first = w // sizes.n_tiles, w % sizes.n_tiles * sizes.tile.rows + offset
        start, count = start_ref[r], count_ref[r]
        p = first + jnp.arange(rows)
        query, live = p // sizes.group, p // sizes.group < count
        end = work_end(first, rows, start, count, sizes.group)
        scored = p - jnp.maximum(count - sizes.score_queries, 0) * sizes.group
        n_scored = sizes.score_queries * sizes.group
        scored = jnp.where(live & (scored >= 0) & (scored < n_scored), scored, n_scored)
        seen_by_all = start + first // sizes.group + 1
        return cls(r, p, query, p % sizes.group, live, start, end, seen_by_all, scored)


def work_end(first: Array, rows: int, start: Array, count: Array, group: int) -> Array:
    """One past the last position that packed queries first .. first + rows - 1 attend to."""
    last = jnp.minimum((first + rows - 1) // group, count - 1)
    return jnp.where(first < count * group, start + last + 1, 0)


def _place(place_ref, r: Array, sizes: Sizes) -> Array:
    """The place of row `r` among the scored ones, or -1."""
    return r if sizes.all_scored else place_ref[r]


def _share(bounds_ref, sizes: Sizes) -> Array:
    """Blocks of keys in each program's share."""
    return jnp.maximum(pl.cdiv(bounds_ref[sizes.n_work], sizes.programs), sizes.least)


def causal_kernel(
    u: Array,
    h: Array,
    layer_ref,
    bounds_ref,
    row_ref,
    start_ref,
    count_ref,
    place_ref,
    q_ref,
    k_ref,
    v_ref,
    table_ref,
    part_ref,
    part_lse_ref,
    *scores_refs,
    sizes: Sizes,
    scale: float,
    interpret: bool,
):
    tile = sizes.tile
    share = _share(bounds_ref, sizes)
    first = u * share
    last = jnp.minimum(first + share, bounds_ref[sizes.n_work])  # one past it

    all_work = jnp.arange(pl.next_power_of_2(sizes.n_work))
    ends = plt.load(bounds_ref.at[jnp.minimum(all_work, sizes.n_work - 1) + 1])
    ends = jnp.where(all_work < sizes.n_work, ends, jnp.iinfo(jnp.int32).max)

    def work_of(block):
        return (ends <= block).astype(jnp.int32).sum()

    columns = Columns.of(sizes.head_dim)

    def attend_to(carry):
        w, again = carry
        work = _WorkRow.of(w, tile.rows, 0, start_ref, count_ref, sizes)
        row = row_ref[work.r]
        low = jnp.maximum(first, bounds_ref[w]) - bounds_ref[w]
        high = jnp.minimum(last, bounds_ref[w + 1]) - bounds_ref[w]
        exists = columns.mask(work.p < sizes.n * sizes.group)
        at = (sizes.first_query + work.r * sizes.n + work.query)[:, None]
        q = load(q_ref, at, (h * sizes.group + work.head)[:, None], columns.at, mask=exists)

        n_scored = sizes.score_queries * sizes.group
        place = _place(place_ref, work.r, sizes)

        def dump(b, weights):
            def write():
                position = b * tile.block + jnp.arange(tile.block)
                codes_at = layer_ref[0], place, h, work.scored[:, None], position[None]
                mask = (work.scored < n_scored)[:, None]
                store(scores_refs[1], *codes_at, value=encode(weights), mask=mask)

            if sizes.all_scored:
                write()
            else:  # few tiles of a prompt are
                pl.when((place >= 0) & (work.scored.min() < n_scored))(write)

        def keys(b, *, masked: bool):
            position = b * tile.block + jnp.arange(tile.block)
            key = jnp.minimum(position, work.end - 1) if masked else position
            slot = plt.load(table_ref.at[row, key])
            products = dot(q, gather(k_ref, slot, h, columns).T)
            if masked:
                causal = position[None] <= (work.start + work.query)[:, None]
                products = jnp.where((position < work.end)[None] & causal, products, DEAD)
            return products, slot

        unmasked = jnp.clip(work.seen_by_all // tile.block, low, jnp.maximum(low, high))
        softmax, next_again = attend(
            (low, unmasked, high),
            keys,
            lambda slot: gather(v_ref, slot, h, columns),
            again,
            shape=(tile.rows, columns.at.shape[1]),
            dtype=v_ref.dtype,
            factor=scale * LOG2E,
            interpret=interpret,
            # Codes need one reference for all programs that have a part of the row.
            guess_at=0 if sizes.score_queries else None,
            dump=dump if sizes.score_queries else None,
        )
        out, lse = softmax.result()
        n_parts = part_ref.shape[2]
        to = jnp.minimum(jnp.arange(tile.rows), n_parts)  # past the end: masked
        kept = to < n_parts
        store(part_ref, u + w, h, to[:, None], columns.at, value=out, mask=columns.mask(kept))
        store(part_lse_ref, u + w, h, to, value=lse, mask=kept)
        if sizes.score_queries:
            part_reference_ref, _ = scores_refs
            kept &= again == 0
            store(part_reference_ref, u + w, h, to, value=softmax.reference, mask=kept)
        return jnp.where(next_again == 1, w, w + 1), next_again

    # A program without a share has no work rows: 0 .. 0.
    begin = jnp.where(first < last, work_of(first), 0)
    stop = jnp.where(first < last, work_of(last - 1) + 1, 0)
    lax.while_loop(lambda carry: carry[0] < stop, attend_to, (begin, jnp.int32(0)))


def combine_kernel(
    w: Array,
    t: Array,
    h: Array,
    layer_ref,
    bounds_ref,
    start_ref,
    count_ref,
    place_ref,
    part_ref,
    part_lse_ref,
    *refs,
    sizes: Sizes,
    rows: int,
):
    """Merges the parts of a work row; writes the factors that belong to its codes, too."""
    offset = t * rows
    work = _WorkRow.of(w, rows, offset, start_ref, count_ref, sizes)
    columns = Columns.of(sizes.head_dim)
    n_parts = part_ref.shape[2]
    in_row = (work.p < sizes.n * sizes.group) & (offset + jnp.arange(rows) < n_parts)
    at_part = jnp.where(in_row, offset + jnp.arange(rows), n_parts)
    exists = columns.mask(in_row)

    share = _share(bounds_ref, sizes)
    first, last = bounds_ref[w], bounds_ref[w + 1]
    begin, stop = first // share, jnp.where(first < last, (last - 1) // share + 1, 0)

    def merge(i, softmax):
        """A few parts at once: their loads must not wait for each other."""
        parts = []
        for u in [begin + i * _PARTS + j for j in range(_PARTS)]:
            there = in_row & (u < stop)
            at = jnp.minimum(u, stop - 1) + w
            lse = plt.load(part_lse_ref.at[at, h, at_part], mask=there, other=DEAD)
            part = load(part_ref, at, h, at_part[:, None], columns.at, mask=columns.mask(there))
            parts.append((lse, part))
        return functools.reduce(lambda softmax, part: softmax.merge(*part), parts, softmax)

    softmax = Softmax.empty(rows, columns.at.shape[1])
    n_merges = pl.cdiv(stop - begin, _PARTS)
    out, lse = lax.fori_loop(0, n_merges, merge, softmax).result()
    out = jnp.where(work.live[:, None], out, 0)
    out_ref = refs[1] if sizes.score_queries else refs[0]
    at = (sizes.first_query + work.r * sizes.n + work.query)[:, None]
    heads = (h * sizes.group + work.head)[:, None]
    store(out_ref, at, heads, columns.at, value=out, mask=exists)
    if not sizes.score_queries:
        return

    part_reference_ref, _, factor_ref = refs
    place = _place(place_ref, work.r, sizes)
    scored = in_row & (work.scored < sizes.score_queries * sizes.group) & (place >= 0)
    reference = plt.load(part_reference_ref.at[begin + w, h, at_part], mask=scored, other=0)
    value = jnp.exp2(reference - lse)
    store(factor_ref, layer_ref[0], place, h, work.scored, value=value, mask=scored)


def causal_attention(
    q: Array,
    k_pool: Array,
    v_pool: Array,
    page_table: Array,
    layer: Array,
    rows: CausalRows,
    place: Array | None,
    out: Array | None,
    scores: CodedScores | None,
    scores_shape: CodedScores | None,
    *,
    n: int,
    first_query: int,
    score_queries: int,
    scale: float,
    tile: Tile,
    programs: int,
    interpret: bool,
) -> tuple[Array, CodedScores | None]:
    """Writes queries first_query .. of `out`, and the scores of the rows that have a place >= 0.

    All rows have one, in their order, if `place` is None.
    """
    _, n_heads, head_dim = q.shape
    n_kv_heads, n_rows = k_pool.shape[1], rows.row.shape[0]
    group = n_heads // n_kv_heads
    n_tiles = pl.cdiv(n * group, tile.rows)
    sizes = Sizes(
        n,
        first_query,
        group,
        head_dim,
        tile,
        n_tiles,
        n_rows * n_tiles,
        max(1, programs // n_kv_heads),
        score_queries if scores_shape is not None else 0,
        place is None,
    )
    if place is None:
        place = rows.row  # not looked at
    bounds = _bounds(rows, sizes)
    n_parts = sizes.programs + sizes.n_work
    part_rows = min(tile.rows, n * group)
    per_row = jax.ShapeDtypeStruct((n_parts, n_kv_heads, part_rows), jnp.float32)
    parts = [(jax.ShapeDtypeStruct((*per_row.shape, head_dim), jnp.float32), None), (per_row, None)]
    dumps = []
    if sizes.score_queries:
        parts.append((per_row, None))  # references
        dumps = list(zip(scores_shape, scores or (None, None), strict=True))
    done = launch(
        functools.partial(causal_kernel, sizes=sizes, scale=scale, interpret=interpret),
        (layer[None], bounds, *rows, place, q, k_pool, v_pool, page_table),
        parts + dumps[:1],
        grid=(sizes.programs, n_kv_heads),
        name="causal_attention",
        tile=tile,
        interpret=interpret,
    )
    parts, codes = done[: len(parts)], done[len(parts) :]
    out, *others = launch(
        functools.partial(combine_kernel, sizes=sizes, rows=_COMBINE.rows),
        (layer[None], bounds, rows.start, rows.count, place, *parts),
        [(jax.ShapeDtypeStruct(q.shape, q.dtype), out), *dumps[1:]],
        grid=(sizes.n_work, pl.cdiv(part_rows, _COMBINE.rows), n_kv_heads),
        name="combine_attention",
        tile=_COMBINE,
        interpret=interpret,
    )
    return out, CodedScores(*codes, *others) if sizes.score_queries else None


def _bounds(rows: CausalRows, sizes: Sizes) -> Array:
    """[n_work + 1] int32, the first block of each work row in the line of all blocks."""
    first = jnp.arange(sizes.n_tiles) * sizes.tile.rows
    end = work_end(
        first, sizes.tile.rows, rows.start[:, None], rows.count[:, None], sizes.group
    ).ravel()
    blocks = jnp.cumsum(pl.cdiv(end, sizes.tile.block), dtype=jnp.int32)
    return jnp.concatenate([jnp.zeros(1, jnp.int32), blocks])


def coded_shape(
    n_layers: int, n_rows: int, n_kv_heads: int, n_packed: int, context: int, block: int
) -> CodedScores:
    """The arrays that hold the scores of all layers."""
    lead, layers = (n_rows, n_kv_heads, n_packed), n_layers
    size = pl.cdiv(context, max(block, 32)) * max(block, 32)
    layer_bytes = math.prod(lead) * size
    if 2**31 < n_layers * layer_bytes <= 2**32:
        # Pallas addresses arrays up to 4 GiB with signed 32-bit offsets: grow past them.
        layers = 2**32 // layer_bytes + 1
    return CodedScores(
        jax.ShapeDtypeStruct((layers, *lead, size), jnp.uint8),
        jax.ShapeDtypeStruct((n_layers, *lead), jnp.float32),
    )
