"""XLA reference of `fused_attention`: gather, mask, softmax, in float32.

Drafts gather the W rows of their lists of slots; verify and prefill rows gather
their whole context once per row, not per query. The pool is only ever read by gathers, so it is
never copied.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.fused_attention.rows import CausalRows, DraftSlots
from pallas_kernels.fused_attention.scores import DenseScores

_EXACT = lax.Precision.HIGHEST


def _softmax(logits: Array, live: Array) -> Array:
    """Softmax over the last axis of the live entries; 0 for the others, also where none is live."""
    logits = jnp.where(live, logits, -jnp.inf)
    peak = jnp.max(logits, axis=-1, keepdims=True, initial=jnp.finfo(jnp.float32).min)
    weights = jnp.exp(logits - peak)
    total = weights.sum(-1, keepdims=True)
    return weights / jnp.where(total == 0, 1, total)


def draft_attention(
    q: Array, k_pool: Array, v_pool: Array, layer: Array, drafts: DraftSlots, *, scale: float
) -> Array:
    """q [Nd, Hq, D] -> [Nd, Hq, D] float32."""
    n, n_heads, head_dim = q.shape
    n_kv_heads = k_pool.shape[1]
    entries = drafts.slots[layer]
    live = (entries >= 0) & (jnp.arange(entries.shape[-1]) < drafts.length[:, None, None])
    slots = jnp.where(entries < 0, ~entries, entries)
    slots, live = (jnp.repeat(x, n_kv_heads // x.shape[1], axis=1) for x in (slots, live))
    heads = jnp.arange(n_kv_heads)[:, None]
    k = k_pool[slots, heads].astype(jnp.float32)
    v = jnp.where(live[..., None], v_pool[slots, heads].astype(jnp.float32), 0)

    q = q.astype(jnp.float32).reshape(n, n_kv_heads, -1, head_dim)
    logits = jnp.einsum("nhgd,nhsd->nhgs", q, k, precision=_EXACT) * scale
    weights = _softmax(logits, live[:, :, None])
    out = jnp.einsum("nhgs,nhsd->nhgd", weights, v, precision=_EXACT)
    return out.reshape(n, n_heads, head_dim)


def causal_attention(
    q: Array,
    k_pool: Array,
    v_pool: Array,
    page_table: Array,
    rows: CausalRows,
    *,
    scale: float,
    context: int,
) -> tuple[Array, Array]:
    """q [R, n, Hq, D] -> float32 out, the same shape, and weights [R, Hkv, group, n, context]."""
    n_rows, n, n_heads, head_dim = q.shape
    n_kv_heads = k_pool.shape[1]
    position, query = jnp.arange(context), jnp.arange(n)
    in_row = position < (rows.start + rows.count)[:, None]
    slots = jnp.where(in_row, page_table[rows.row, :context], 0)
    # [R, Hkv, context, D]: gathered head by head, as the products want them.
    slots, heads = slots[:, None], jnp.arange(n_kv_heads)[:, None]
    k = k_pool[slots, heads].astype(jnp.float32)
    v = jnp.where(in_row[:, None, :, None], v_pool[slots, heads].astype(jnp.float32), 0)
    live = position <= (rows.start[:, None] + query)[..., None]
    live = live & (query < rows.count[:, None])[..., None]

    # A group's queries are the rows of one matrix: batched products of small ones are slow on CPUs.
    q = q.astype(jnp.float32).reshape(n_rows, n, n_kv_heads, -1, head_dim)
    q = q.transpose(0, 2, 3, 1, 4).reshape(n_rows, n_kv_heads, -1, head_dim)
    logits = jnp.einsum("rhqd,rhsd->rhqs", q, k, precision=_EXACT) * scale
    group = n_heads // n_kv_heads
    weights = logits.reshape(n_rows, n_kv_heads, group, n, context)
    weights = _softmax(weights, live[:, None, None])
    out = jnp.einsum(
        "rhqs,rhsd->rhqd",
        weights.reshape(logits.shape),
        v,
        precision=_EXACT,
    )
    out = out.reshape(n_rows, n_kv_heads, group, n, head_dim).transpose(0, 3, 1, 2, 4)
    return out.reshape(n_rows, n, n_heads, head_dim), weights


def _group_mean(weights: Array) -> Array:
    """Mean over the group of [R, Hkv, group, n, context]; added up by hand, since XLA's CPU backend
    takes 60 times as long (jax 0.10.2) to reduce an axis in the middle."""
    group = weights.shape[2]
    return sum(weights[:, :, head] for head in range(group)) / group


@functools.partial(
    jax.jit,
    static_argnames=("n_queries", "chunk", "score_queries", "n_layers", "scale", "context"),
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
    scores: DenseScores | None,
    n_layers: int,
    scale: float,
    context: int,
) -> tuple[Array, DenseScores | None]:
    n_heads, head_dim = q.shape[1:]
    outs, layer_scores = [], []
    begin = 0
    if drafts is not None:
        begin = drafts.length.shape[0]
        outs.append(draft_attention(q[:begin], k_pool, v_pool, layer, drafts, scale=scale))
    for rows, n in ((verify, n_queries), (prefill, chunk)):
        if rows is None:
            continue
        end = begin + rows.row.shape[0] * n
        out, weights = causal_attention(
            q[begin:end].reshape(-1, n, n_heads, head_dim),
            k_pool,
            v_pool,
            page_table,
            rows,
            scale=scale,
            context=context,
        )
        outs.append(out.reshape(-1, n_heads, head_dim))
        begin = end
        if score_queries and rows is verify:
            layer_scores.append(_group_mean(weights))
        elif score_queries and scored is not None:
            layer_scores.append(
                _last_scores(_group_mean(weights), rows.count, scored, score_queries)
            )
    out = jnp.concatenate(outs).astype(q.dtype)
    if not score_queries:
        return out, None
    probabilities = jnp.concatenate(layer_scores)
    if scores is None:
        scores = DenseScores(jnp.zeros((n_layers, *probabilities.shape), jnp.float32))
    return out, DenseScores(scores.probabilities.at[layer].set(probabilities))


def _last_scores(weights: Array, count: Array, scored: Array, score_queries: int) -> Array:
    """The rows of weights [Nc, Hkv, chunk, context] that belong to the scored queries."""
    row = jnp.maximum(scored, 0)
    query = jnp.maximum(count[row] - score_queries, 0)[:, None] + jnp.arange(score_queries)
    live = (scored >= 0)[:, None] & (query < count[row][:, None])
    query = jnp.minimum(query, weights.shape[2] - 1)
    picked = jnp.take_along_axis(weights[row], query[:, None, :, None], axis=2)
    return jnp.where(live[:, None, :, None], picked, 0)
