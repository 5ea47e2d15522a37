"""Attention of verify and prefill rows, and the scores that come with it.

The queries of a KV head's group are packed into tiles; a row's tiles are *work rows*, each as long
as its last query sees. `plan.py` says which program attends to which of their keys; what the
programs made of each work row is left to be merged.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.columns import Columns, load, store
from pallas_kernels.fused_attention.plan import Part, make_plan, read
from pallas_kernels.fused_attention.rows import CausalRows
from pallas_kernels.fused_attention.scores import CodedScores, encode
from pallas_kernels.fused_attention.tiles import Tile
from pallas_kernels.fused_attention.triton_parts import DEAD, LOG2E, attend, dot, gather, launch
from pallas_kernels.fused_attention.work_rows import Sizes, WorkRow, place_of


def causal_kernel(
    u: Array,
    h: Array,
    layer_ref,
    parts_ref,
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
    columns = Columns.of(sizes.head_dim)

    def attend_to(carry):
        i, again = carry
        part = read(Part, parts_ref, i)
        work = WorkRow.of(part.r, part.first, tile.rows, part.start, part.count, sizes)
        low, high = part.low, part.high
        exists = columns.mask(work.p < sizes.n * sizes.group)
        at = (sizes.first_query + work.r * sizes.n + work.query)[:, None]
        q = load(q_ref, at, (h * sizes.group + work.head)[:, None], columns.at, mask=exists)

        n_scored = sizes.score_queries * sizes.group
        place = place_of(place_ref, work.r, sizes)

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
            slot = plt.load(table_ref.at[part.row, key])
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
        n_rows = part_ref.shape[2]
        to = jnp.minimum(jnp.arange(tile.rows), n_rows)  # past the end: masked
        kept = to < n_rows
        store(part_ref, i, h, to[:, None], columns.at, value=out, mask=columns.mask(kept))
        store(part_lse_ref, i, h, to, value=lse, mask=kept)
        if sizes.score_queries:
            part_reference_ref, _ = scores_refs
            kept &= again == 0
            store(part_reference_ref, i, h, to, value=softmax.reference, mask=kept)
        return jnp.where(next_again == 1, i, part.next), next_again

    lax.while_loop(lambda carry: carry[0] >= 0, attend_to, (u, jnp.int32(0)))


class Unmerged(NamedTuple):
    """What `causal_attention` leaves to be merged."""

    sizes: Sizes
    merges: Array
    """[n_work, 7] `plan.Merge`."""
    place: Array
    """[R] the rows' places among the scored ones."""
    parts: tuple[Array, ...]
    """[parts, Hkv, rows, D] outputs, [parts, Hkv, rows] base-2 log-sum-exps and, where rows are
    scored, references."""

    @property
    def rows(self) -> int:
        """Packed queries of a work row."""
        return self.parts[1].shape[2]


def causal_attention(
    q: Array,
    k_pool: Array,
    v_pool: Array,
    page_table: Array,
    layer: Array,
    rows: CausalRows,
    place: Array | None,
    codes: Array | None,
    codes_shape: jax.ShapeDtypeStruct | None,
    *,
    n: int,
    first_query: int,
    score_queries: int,
    scale: float,
    tile: Tile,
    programs: int,
    interpret: bool,
) -> tuple[Unmerged, Array | None]:
    """Attends, and writes `codes` of the rows that have a place >= 0.

    All rows have one, in their order, if `place` is None; none are written without `codes_shape`.
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
        score_queries if codes_shape is not None else 0,
        place is None,
    )
    if place is None:
        place = rows.row  # not looked at
    plan = make_plan(rows, sizes)
    n_parts = sizes.programs + sizes.n_work
    per_row = jax.ShapeDtypeStruct((n_parts, n_kv_heads, min(tile.rows, n * group)), jnp.float32)
    parts = [jax.ShapeDtypeStruct((*per_row.shape, head_dim), jnp.float32), per_row]
    outputs = []
    if sizes.score_queries:
        parts.append(per_row)  # references
        outputs.append((codes_shape, codes))
    done = launch(
        functools.partial(causal_kernel, sizes=sizes, scale=scale, interpret=interpret),
        (layer[None], plan.parts, place, q, k_pool, v_pool, page_table),
        [(shape, None) for shape in parts] + outputs,
        grid=(sizes.programs, n_kv_heads),
        name="causal_attention",
        tile=tile,
        interpret=interpret,
    )
    left = Unmerged(sizes, plan.merges, place, tuple(done[: len(parts)]))
    return left, done[-1] if sizes.score_queries else codes


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
