"""`fused_attention` in Pallas (Triton lowering): gathers of single-token rows, online softmax.

Four kernels, each skipped if no row needs it:

- draft: one program per draft row and KV head walks the selected positions, then the recent ones.
- causal: verify and prefill rows. The queries of a KV head's group are packed into tiles,
  `p = query * group + head`, and the keys are split: one program owns (row, tile, split, KV head).
  Programs past the end of their row exit at once.
- combine: merges the splits of a tile. A causal kernel with a single split writes the output
  itself.
- score: recomputes q.k of the scored queries and, knowing the final log-sum-exp, writes
  probabilities averaged over the group.

All write their part of one output array (each later kernel aliases it), so nothing is concatenated.
Logits are in base 2. The layer is an operand, not a constant, so the kernels of all layers are
traced, lowered and compiled once.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.fused_attention.rows import CausalRows, DraftRows

LOG2E = math.log2(math.e)
_DEAD = -1e30  # logit of a masked key; finite, so that fully masked rows stay free of NaN
_PROGRAMS = 528  # enough to fill a large GPU (132 SMs, four programs each)


class Tile(NamedTuple):
    """Queries and keys of a program's inner product, and its launch parameters."""

    rows: int
    block: int
    warps: int
    stages: int


class Tiles(NamedTuple):
    """Overrides of the tiles and ranges that are otherwise chosen from the shapes, for tuning."""

    draft: Tile | None = None
    causal: Tile | None = None
    length: int | None = None
    score: Tile | None = None
    span: int | None = None


def _lanes(n: int) -> int:
    """Triton arrays are powers of two, and at least 16 on each side of a product."""
    return max(16, pl.next_power_of_2(n))


def _fit(tile: Tile, head_dim: int, dtype: jnp.dtype) -> Tile:
    """Adapts a tile tuned for 2-byte heads of 128."""
    if dtype.itemsize > 2:  # exact products run on scalar units and unroll: keep them small
        return Tile(16, 16, 4, 2)
    if head_dim > 128:
        return tile._replace(block=max(16, tile.block // 2), stages=2)
    return tile


def draft_tile(group: int, head_dim: int, dtype: jnp.dtype) -> Tile:
    return _fit(Tile(_lanes(group), 32, 2, 3), head_dim, dtype)._replace(rows=_lanes(group))


def causal_tile(n_packed: int, head_dim: int, dtype: jnp.dtype) -> Tile:
    rows = min(64, _lanes(n_packed))
    if n_packed > rows:  # several tiles: prefill, bound by arithmetic
        tile = Tile(rows, 64, 4, 3)
    else:
        tile = {16: Tile(16, 64, 4, 3), 32: Tile(32, 64, 2, 2), 64: Tile(64, 32, 4, 3)}[rows]
    return _fit(tile, head_dim, dtype)


def score_tile(score_queries: int, head_dim: int, dtype: jnp.dtype) -> Tile:
    rows = _lanes(score_queries)
    return _fit(Tile(rows, 64, 4, 3), head_dim, dtype)._replace(rows=rows)


def split_length(n_programs: int, n_tiles: int, tile: Tile, context: int) -> int:
    """Keys per split: few enough to fill the GPU and to balance rows of unequal length."""
    longest = (1024 if tile.rows == 32 else 2048) if n_tiles == 1 else context
    splits = max(pl.cdiv(context, longest), _PROGRAMS // n_programs)
    length = pl.cdiv(context, min(splits, pl.cdiv(context, 256)))
    return pl.cdiv(length, tile.block) * tile.block


def _dot(a: Array, b: Array) -> Array:
    return jnp.dot(a, b, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


class _Softmax(NamedTuple):
    """Online softmax of a tile of queries: unnormalised output, running maximum and normaliser."""

    out: Array
    peak: Array
    norm: Array

    @classmethod
    def empty(cls, rows: int, lanes: int) -> "_Softmax":
        return cls(
            jnp.zeros((rows, lanes), jnp.float32),
            jnp.full((rows,), _DEAD, jnp.float32),
            jnp.zeros((rows,), jnp.float32),
        )

    def attend(self, logits: Array, values: Array) -> "_Softmax":
        peak = jnp.maximum(self.peak, logits.max(1))
        decay = jnp.exp2(self.peak - peak)
        weights = jnp.exp2(logits - peak[:, None])
        out = self.out * decay[:, None] + _dot(weights.astype(values.dtype), values)
        return _Softmax(out, peak, self.norm * decay + weights.sum(1))

    def merge(self, lse: Array, out: Array) -> "_Softmax":
        """Adds a normalised part whose base-2 log-sum-exp is `lse`."""
        peak = jnp.maximum(self.peak, lse)
        decay, weight = jnp.exp2(self.peak - peak), jnp.exp2(lse - peak)
        merged = self.out * decay[:, None] + out * weight[:, None]
        return _Softmax(merged, peak, self.norm * decay + weight)

    def result(self) -> tuple[Array, Array]:
        """Output and base-2 log-sum-exp; 0 and a very negative number if nothing was attended."""
        norm = jnp.where(self.norm == 0, 1, self.norm)
        return self.out / norm[:, None], self.peak + jnp.log2(norm)


class _Columns(NamedTuple):
    """The padded head dimension: lane ids and the mask of those that exist (None if all do)."""

    at: Array
    live: Array | None

    @classmethod
    def of(cls, head_dim: int) -> "_Columns":
        lanes = _lanes(head_dim)
        at = lax.broadcasted_iota(jnp.int32, (1, lanes), 1)
        return cls(at, None if lanes == head_dim else at < head_dim)

    def mask(self, rows: Array | None) -> Array | None:
        """Mask of a [rows, lanes] array, from the mask of its rows (None if all are live)."""
        if rows is None:
            return self.live
        return rows[:, None] if self.live is None else rows[:, None] & self.live


def _load(ref: Any, *index: Any, mask: Array | None) -> Array:
    """Loads a [rows, lanes] array; masked entries are 0."""
    if mask is None:
        return plt.load(ref.at[index])
    shape = jnp.broadcast_shapes(*(jnp.shape(i) for i in index))
    return plt.load(ref.at[index], mask=jnp.broadcast_to(mask, shape), other=0)


def _gather(pool_ref: Any, slot: Array, head: Array, columns: _Columns) -> Array:
    """The [keys, lanes] rows of one head of the pool.

    Keys to be masked name the slot of some live key: that costs no bandwidth and no registers, and
    keeps whatever the trash slot holds out of the products.
    """
    return _load(pool_ref, slot[:, None], head, columns.at, mask=columns.live)


def _store(ref: Any, *index: Any, value: Array, mask: Array) -> None:
    value = value.astype(ref.dtype)
    plt.store(ref.at[index], value, mask=jnp.broadcast_to(mask, value.shape))


def _launch(
    kernel: Callable[..., None],
    inputs: tuple[Array, ...],
    out_shape: list[jax.ShapeDtypeStruct],
    *,
    into: Array | None,
    grid: tuple[int, ...],
    name: str,
    warps: int,
    stages: int,
    interpret: bool,
) -> list[Array]:
    """Runs a kernel on whole arrays; with `into`, the first output is that array in place."""
    n = len(inputs)
    alias = into is not None

    def body(*refs):
        kernel(*refs[:n], *refs[n + alias :])

    return pl.pallas_call(
        body,
        out_shape=out_shape,
        grid=grid,
        name=name,
        input_output_aliases={n: 0} if alias else {},
        compiler_params=plt.CompilerParams(num_warps=warps, num_stages=stages),
        interpret=interpret,
    )(*inputs, *([into] if alias else []))


# Drafts.


def _draft_kernel(
    layer_ref,
    row_ref,
    position_ref,
    selected_ref,
    count_ref,
    recent_ref,
    q_ref,
    k_ref,
    v_ref,
    table_ref,
    out_ref,
    *,
    group: int,
    head_dim: int,
    tile: Tile,
    scale: float,
):
    i, h = pl.program_id(0), pl.program_id(1)
    layer, row, position = layer_ref[0], row_ref[i], position_ref[i]
    count, start = count_ref[row], recent_ref[row]
    total = count + jnp.maximum(position - start + 1, 0)
    newest = jnp.maximum(position, 0)

    columns = _Columns.of(head_dim)
    head = jnp.arange(tile.rows)
    in_group = columns.mask(head < group)
    q = _load(q_ref, i, (h * group + head)[:, None], columns.at, mask=in_group)

    def body(b, softmax):
        at = b * tile.block + jnp.arange(tile.block)
        listed = at < count
        selected = plt.load(selected_ref.at[layer, row, h, at], mask=listed, other=0)
        key = jnp.where(listed, selected, jnp.minimum(start + at - count, newest))
        slot = plt.load(table_ref.at[row, key])
        k, v = (_gather(ref, slot, h, columns) for ref in (k_ref, v_ref))
        live = jnp.where(listed, selected < start, at < total)
        logits = jnp.where(live[None], _dot(q, k.T) * (scale * LOG2E), _DEAD)
        return softmax.attend(logits, v)

    softmax = _Softmax.empty(tile.rows, columns.at.shape[1])
    out, _ = lax.fori_loop(0, pl.cdiv(total, tile.block), body, softmax).result()
    _store(out_ref, i, (h * group + head)[:, None], columns.at, value=out, mask=in_group)


def _draft(
    q: Array,
    k_pool: Array,
    v_pool: Array,
    page_table: Array,
    layer: Array,
    drafts: DraftRows,
    *,
    scale: float,
    interpret: bool,
    tiles: Tiles,
) -> Array:
    """Allocates the output [T, Hq, D] and writes the draft queries, its first."""
    _, n_heads, head_dim = q.shape
    n_kv_heads = k_pool.shape[1]
    group = n_heads // n_kv_heads
    tile = tiles.draft or draft_tile(group, head_dim, q.dtype)
    [out] = _launch(
        functools.partial(_draft_kernel, group=group, head_dim=head_dim, tile=tile, scale=scale),
        (layer[None], *drafts, q, k_pool, v_pool, page_table),
        [jax.ShapeDtypeStruct(q.shape, q.dtype)],
        into=None,
        grid=(drafts.row.shape[0], n_kv_heads),
        name="draft_attention",
        warps=tile.warps,
        stages=tile.stages,
        interpret=interpret,
    )
    return out


# Verify and prefill.


class _Packed(NamedTuple):
    """A tile of packed queries of one row: p = query * group + head."""

    p: Array
    query: Array
    head: Array
    live: Array
    end: Array
    """One past the last position any live query attends to; 0 if none is live."""

    @classmethod
    def of(cls, first: Array, rows: int, group: int, start: Array, count: Array) -> "_Packed":
        p = first + jnp.arange(rows)
        query = p // group
        last = jnp.minimum((first + rows - 1) // group, count - 1)
        end = jnp.where(first < count * group, start + last + 1, 0)
        return cls(p, query, p % group, query < count, end)


def _causal_kernel(
    row_ref,
    start_ref,
    count_ref,
    q_ref,
    k_ref,
    v_ref,
    table_ref,
    out_ref,
    lse_ref,
    *,
    n: int,
    first_query: int,
    group: int,
    head_dim: int,
    tile: Tile,
    length: int,
    n_tiles: int,
    n_splits: int,
    scale: float,
):
    # Longest work first: early splits are full, late tiles of a chunk see the most keys.
    u, h = pl.program_id(0), pl.program_id(1)
    n_rows = row_ref.shape[0]
    r, t = u % n_rows, n_tiles - 1 - u // n_rows % n_tiles
    split = u // (n_rows * n_tiles)
    row, start, count = row_ref[r], start_ref[r], count_ref[r]
    packed = _Packed.of(t * tile.rows, tile.rows, group, start, count)
    low = split * length
    high = jnp.minimum(packed.end, low + length)

    def run():
        columns = _Columns.of(head_dim)
        exists = columns.mask(packed.p < n * group)
        at = (first_query + r * n + packed.query)[:, None]
        q = _load(q_ref, at, (h * group + packed.head)[:, None], columns.at, mask=exists)

        def body(b, softmax, *, masked: bool):
            position = low + b * tile.block + jnp.arange(tile.block)
            key = jnp.minimum(position, high - 1) if masked else position
            slot = plt.load(table_ref.at[row, key])
            k, v = (_gather(ref, slot, h, columns) for ref in (k_ref, v_ref))
            logits = _dot(q, k.T) * (scale * LOG2E)
            if masked:
                causal = position[None] <= (start + packed.query)[:, None]
                logits = jnp.where((position < high)[None] & causal, logits, _DEAD)
            return softmax.attend(logits, v)

        # Blocks that every query of the tile sees in full need no mask.
        seen_by_all = start + t * tile.rows // group + 1
        unmasked = jnp.maximum(jnp.minimum(high, seen_by_all) - low, 0) // tile.block
        softmax = _Softmax.empty(tile.rows, columns.at.shape[1])
        softmax = lax.fori_loop(0, unmasked, functools.partial(body, masked=False), softmax)
        softmax = lax.fori_loop(
            unmasked,
            pl.cdiv(jnp.maximum(high - low, 0), tile.block),
            functools.partial(body, masked=True),
            softmax,
        )
        out, lse = softmax.result()
        if n_splits == 1:
            out = jnp.where(packed.live[:, None], out, 0)
            heads = (h * group + packed.head)[:, None]
            _store(out_ref, at, heads, columns.at, value=out, mask=exists)
            _store(lse_ref, r, h, packed.p, value=lse, mask=packed.p < n * group)
        else:
            _store(out_ref, r, split, h, packed.p[:, None], columns.at, value=out, mask=exists)
            _store(lse_ref, r, split, h, packed.p, value=lse, mask=packed.p < n * group)

    if n_splits == 1:
        run()
    else:
        pl.when(low < high)(run)


def _combine_kernel(
    start_ref,
    count_ref,
    part_ref,
    part_lse_ref,
    out_ref,
    lse_ref,
    *,
    n: int,
    first_query: int,
    group: int,
    head_dim: int,
    rows: int,
    length: int,
):
    r, t, h = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    packed = _Packed.of(t * rows, rows, group, start_ref[r], count_ref[r])
    columns = _Columns.of(head_dim)
    in_row = packed.p < n * group
    exists = columns.mask(in_row)

    def body(split, softmax):
        lse = plt.load(part_lse_ref.at[r, split, h, packed.p], mask=in_row, other=_DEAD)
        part = _load(part_ref, r, split, h, packed.p[:, None], columns.at, mask=exists)
        return softmax.merge(lse, part)

    softmax = _Softmax.empty(rows, columns.at.shape[1])
    out, lse = lax.fori_loop(0, pl.cdiv(packed.end, length), body, softmax).result()
    out = jnp.where(packed.live[:, None], out, 0)
    at, heads = (first_query + r * n + packed.query)[:, None], (h * group + packed.head)[:, None]
    _store(out_ref, at, heads, columns.at, value=out, mask=exists)
    _store(lse_ref, r, h, packed.p, value=lse, mask=in_row)


def _causal(
    q: Array,
    k_pool: Array,
    v_pool: Array,
    page_table: Array,
    rows: CausalRows,
    out: Array | None,
    *,
    n: int,
    first_query: int,
    scale: float,
    context: int,
    interpret: bool,
    tiles: Tiles,
) -> tuple[Array, Array]:
    """Writes queries first_query .. of `out`; returns the log-sum-exp [R, Hkv, n * group] too."""
    _, n_heads, head_dim = q.shape
    n_kv_heads, n_rows = k_pool.shape[1], rows.row.shape[0]
    group = n_heads // n_kv_heads
    n_packed = n * group
    tile = tiles.causal or causal_tile(n_packed, head_dim, q.dtype)
    n_tiles = pl.cdiv(n_packed, tile.rows)
    length = tiles.length or split_length(n_rows * n_tiles * n_kv_heads, n_tiles, tile, context)
    n_splits = pl.cdiv(context, length)

    final = [
        jax.ShapeDtypeStruct(q.shape, q.dtype),
        jax.ShapeDtypeStruct((n_rows, n_kv_heads, n_packed), jnp.float32),
    ]
    parts = [
        jax.ShapeDtypeStruct((n_rows, n_splits, n_kv_heads, n_packed, head_dim), jnp.float32),
        jax.ShapeDtypeStruct((n_rows, n_splits, n_kv_heads, n_packed), jnp.float32),
    ]
    sizes = {"n": n, "first_query": first_query, "group": group, "head_dim": head_dim}
    result = _launch(
        functools.partial(
            _causal_kernel,
            **sizes,
            tile=tile,
            length=length,
            n_tiles=n_tiles,
            n_splits=n_splits,
            scale=scale,
        ),
        (*rows, q, k_pool, v_pool, page_table),
        final if n_splits == 1 else parts,
        into=out if n_splits == 1 else None,
        grid=(n_rows * n_tiles * n_splits, n_kv_heads),
        name="causal_attention",
        warps=tile.warps,
        stages=tile.stages,
        interpret=interpret,
    )
    if n_splits > 1:
        result = _launch(
            functools.partial(_combine_kernel, **sizes, rows=16, length=length),
            (rows.start, rows.count, *result),
            final,
            into=out,
            grid=(n_rows, pl.cdiv(n_packed, 16), n_kv_heads),
            name="combine_attention",
            warps=4,
            stages=2,
            interpret=interpret,
        )
    return result[0], result[1]


# Scores.


def _score_kernel(
    scored_ref,
    row_ref,
    start_ref,
    count_ref,
    q_ref,
    k_ref,
    table_ref,
    lse_ref,
    scores_ref,
    *,
    n: int,
    first_query: int,
    first_row: int,
    group: int,
    head_dim: int,
    score_queries: int,
    tile: Tile,
    span: int,
    context: int,
    scale: float,
):
    f, h = pl.program_id(0), pl.program_id(2)
    low = pl.program_id(1) * span
    r = jnp.maximum(scored_ref[f], 0)
    row, start = row_ref[r], start_ref[r]
    count = jnp.where(scored_ref[f] < 0, 0, count_ref[r])
    end = jnp.where(count > 0, start + count, 0)

    columns = _Columns.of(head_dim)
    i = jnp.arange(tile.rows)
    query = jnp.maximum(count - score_queries, 0) + i
    live = (query < count) & (i < score_queries)
    exists = columns.mask(live)
    at = (first_query + r * n + query)[:, None]

    def store(position, value):
        mask = (i < score_queries)[:, None] & (position < context)[None]
        _store(scores_ref, first_row + f, h, i[:, None], position[None], value=value, mask=mask)

    def body(b, _):
        position = low + b * tile.block + jnp.arange(tile.block)
        slot = plt.load(table_ref.at[row, jnp.minimum(position, end - 1)])
        k = _gather(k_ref, slot, h, columns)

        def add_head(g, total):
            q = _load(q_ref, at, h * group + g, columns.at, mask=exists)
            lse = plt.load(lse_ref.at[r, h, query * group + g], mask=live, other=0.0)
            return total + jnp.exp2(_dot(q, k.T) * (scale * LOG2E) - lse[:, None])

        total = jnp.zeros((tile.rows, tile.block), jnp.float32)
        if q_ref.dtype == jnp.float32:
            total = lax.fori_loop(0, group, add_head, total)
        else:
            total = functools.reduce(lambda total, g: add_head(g, total), range(group), total)
        causal = live[:, None] & (position[None] <= (start + query)[:, None])
        store(position, jnp.where(causal, total / group, 0))

    def clear(b, _):
        position = low + b * tile.block + jnp.arange(tile.block)
        store(position, jnp.zeros((tile.rows, tile.block), jnp.float32))

    n_blocks = span // tile.block
    used = jnp.clip(pl.cdiv(end - low, tile.block), 0, n_blocks)
    lax.fori_loop(0, used, body, None)
    lax.fori_loop(used, n_blocks, clear, None)


def _score(
    q: Array,
    k_pool: Array,
    page_table: Array,
    rows: CausalRows,
    lse: Array,
    scored: Array,
    scores: Array | None,
    *,
    n: int,
    first_query: int,
    first_row: int,
    n_scored: int,
    score_queries: int,
    scale: float,
    context: int,
    interpret: bool,
    tiles: Tiles,
) -> Array:
    """Writes rows first_row .. of `scores` [n_scored, Hkv, score_queries, context]."""
    _, n_heads, head_dim = q.shape
    n_kv_heads = k_pool.shape[1]
    tile = tiles.score or score_tile(score_queries, head_dim, q.dtype)
    span = min(tiles.span or 512, pl.cdiv(context, tile.block) * tile.block)
    dtype = jnp.float32 if q.dtype == jnp.float32 else jnp.float16
    [scores] = _launch(
        functools.partial(
            _score_kernel,
            n=n,
            first_query=first_query,
            first_row=first_row,
            group=n_heads // n_kv_heads,
            head_dim=head_dim,
            score_queries=score_queries,
            tile=tile,
            span=span,
            context=context,
            scale=scale,
        ),
        (scored, *rows, q, k_pool, page_table, lse),
        [jax.ShapeDtypeStruct((n_scored, n_kv_heads, score_queries, context), dtype)],
        into=scores,
        grid=(scored.shape[0], pl.cdiv(context, span), n_kv_heads),
        name="attention_scores",
        warps=tile.warps,
        stages=tile.stages,
        interpret=interpret,
    )
    return scores


@functools.partial(
    jax.jit,
    static_argnames=(
        "n_queries",
        "chunk",
        "score_queries",
        "scale",
        "max_recent",
        "context",
        "interpret",
        "tiles",
    ),
)
def fused_attention(
    q: Array,
    k_pool: Array,
    v_pool: Array,
    page_table: Array,
    *,
    layer: Array,
    drafts: DraftRows | None,
    verify: CausalRows | None,
    prefill: CausalRows | None,
    n_queries: int,
    chunk: int,
    score_queries: int,
    scored: Array | None,
    scale: float,
    max_recent: int,
    context: int,
    interpret: bool,
    tiles: Tiles = Tiles(),  # noqa: B008
) -> tuple[Array, Array | None]:
    del max_recent  # the draft kernel's loop has a dynamic end
    out = scores = None
    first_query = first_row = 0
    n_verify = 0 if verify is None else verify.row.shape[0]
    n_scored = n_verify + (0 if scored is None else scored.shape[0])
    if drafts is not None:
        out = _draft(
            q,
            k_pool,
            v_pool,
            page_table,
            layer,
            drafts,
            scale=scale,
            interpret=interpret,
            tiles=tiles,
        )
        first_query = drafts.row.shape[0]
    for rows, n in ((verify, n_queries), (prefill, chunk)):
        if rows is None:
            continue
        common = {
            "n": n,
            "first_query": first_query,
            "scale": scale,
            "context": context,
            "interpret": interpret,
            "tiles": tiles,
        }
        out, lse = _causal(q, k_pool, v_pool, page_table, rows, out, **common)
        first_query += rows.row.shape[0] * n
        which = jnp.arange(n_verify, dtype=jnp.int32) if rows is verify else scored
        if not score_queries or which is None or which.shape[0] == 0:
            continue
        scores = _score(
            q,
            k_pool,
            page_table,
            rows,
            lse,
            which,
            scores,
            first_row=first_row,
            n_scored=n_scored,
            score_queries=score_queries,
            **common,
        )
        first_row += which.shape[0]
    return out, scores
