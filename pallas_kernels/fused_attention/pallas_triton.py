"""`fused_attention` in Pallas (Triton lowering): gathers of single-token rows.

Not in Mosaic GPU, whose bulk copies fill operands of wgmma with 8 neighbouring rows at least
(tests/pallas_kernels/test_traps.py), while the slots of a row lie anywhere. Verify programs read
as fast as the GPU can; what they lose is at their start and end.

A launch for verify and one for prefill rows, and a last one for draft rows and for what is to be
merged of the others. Scores are one set of arrays for all layers, completed in place. The layer is
an operand, not a constant, so the kernels of all layers are traced, lowered and compiled once.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.fused_attention.causal_kernel import causal_attention, coded_shape
from pallas_kernels.fused_attention.finish import finish
from pallas_kernels.fused_attention.rows import CausalRows, DraftSlots
from pallas_kernels.fused_attention.scores import CodedScores
from pallas_kernels.fused_attention.tiles import Tiles, choose_tiles
from pallas_kernels.gpus import Gpu


@functools.partial(
    jax.jit,
    static_argnames=(
        "n_queries",
        "chunk",
        "score_queries",
        "n_layers",
        "scale",
        "context",
        "gpu",
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
    drafts: DraftSlots | None,
    verify: CausalRows | None,
    prefill: CausalRows | None,
    n_queries: int,
    chunk: int,
    score_queries: int,
    scored: Array | None,
    scores: CodedScores | None,
    n_layers: int,
    scale: float,
    context: int,
    gpu: Gpu,
    interpret: bool,
    tiles: Tiles | None = None,
) -> tuple[Array, CodedScores | None]:
    n_heads, head_dim = q.shape[1:]
    n_kv_heads = k_pool.shape[1]
    group = n_heads // n_kv_heads

    def tiles_of(n: int) -> Tiles:
        chosen = tiles or choose_tiles(n * group, group, head_dim, q.dtype, gpu)
        # The interpreter runs one program after the other: no more than it takes to cut rows.
        return chosen._replace(programs=3 * n_kv_heads) if interpret and not tiles else chosen

    codes, factor = scores or (None, None)
    first_query = 0 if drafts is None else drafts.length.shape[0]
    n_verify = 0 if verify is None else verify.row.shape[0]
    n_scored = n_verify + (0 if scored is None else scored.shape[0])
    block = tiles_of(score_queries).causal.block
    shapes = None
    if score_queries:
        n_packed = score_queries * group
        shapes = coded_shape(n_layers, n_scored, n_kv_heads, n_packed, context, block)

    unmerged = []
    for rows, n in ((verify, n_queries), (prefill, chunk)):
        if rows is None:
            continue
        chosen = tiles_of(n)
        tile, place, dumps = chosen.causal, None, None
        if rows is prefill and scored is not None:
            nowhere = jnp.full(rows.row.shape, -1, jnp.int32)
            to = jnp.where(scored < 0, rows.row.shape[0], scored)  # past the end: dropped
            place = nowhere.at[to].set(n_verify + jnp.arange(scored.shape[0], dtype=jnp.int32))
        if score_queries and (rows is verify or scored is not None):
            dumps = shapes.codes
            tile = tile._replace(block=block)  # one block size for all scores
        left, codes = causal_attention(
            q,
            k_pool,
            v_pool,
            page_table,
            layer,
            rows,
            place,
            codes,
            dumps,
            n=n,
            first_query=first_query,
            score_queries=score_queries,
            scale=scale,
            tile=tile,
            programs=chosen.programs,
            interpret=interpret,
        )
        unmerged.append(left)
        first_query += rows.row.shape[0] * n
    out, factor = finish(
        q,
        k_pool,
        v_pool,
        layer,
        drafts,
        unmerged,
        factor,
        shapes and shapes.factor,
        scale=scale,
        tile=tiles_of(1).draft,
        interpret=interpret,
    )
    return out, CodedScores(codes, factor) if score_queries else None
