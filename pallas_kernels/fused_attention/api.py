"""Contract and dispatch of `fused_attention`."""

import jax.numpy as jnp
from jax import Array

from pallas_kernels.dispatch import Implementation, check, resolve
from pallas_kernels.fused_attention import reference
from pallas_kernels.fused_attention.rows import CausalRows, DraftRows


def fused_attention(
    q: Array,
    k_pool: Array,
    v_pool: Array,
    page_table: Array,
    *,
    layer: int,
    drafts: DraftRows | None,
    verify: CausalRows | None,
    prefill: CausalRows | None,
    n_queries: int,
    chunk: int,
    score_queries: int = 0,
    scored: Array | None = None,
    scale: float,
    max_recent: int,
    context: int,
    implementation: Implementation = "auto",
    interpret: bool | None = None,
) -> tuple[Array, Array | None]:
    """Attention of one layer for all rows of a step: sparse drafts, full verification, prefill.

    The keys and values of this step's tokens must already be in the pool. Query heads `h * group ..
    (h + 1) * group - 1` share KV head `h`. Every row index, position and slot that a live row uses
    must be in range; slot 0 must exist, whatever it holds.

    Args:
        q: [Nd + Nv * n_queries + Nc * chunk, Hq, D]: the draft queries, then n_queries per verify
            row, then chunk per prefill row.
        k_pool: [slots, Hkv, D] keys of this layer.
        v_pool: like `k_pool`, values.
        page_table: [B, max_context] int32, slot of each position of each row.
        layer: which layer of `drafts.selected` to use.
        drafts: the Nd draft rows, or None.
        verify: the Nv verify rows, or None.
        prefill: the Nc prefill rows, or None.
        n_queries: queries per verify row.
        chunk: queries per prefill row.
        score_queries: scored queries per scored row; 0 for no scores, `n_queries` if there are
            verify rows.
        scored: [F] int32, the prefill rows to score (-1 is padding), or None.
        scale: factor of the logits, usually D**-0.5.
        max_recent: bound of `position - recent_start + 1` of the draft rows.
        context: bound of positions: every position in use is < context <= max_context.

    Returns:
        out: like `q`. Padding queries get finite values.
        scores: [Nv + F, Hkv, score_queries, context] or None: softmax probabilities, averaged over
            the query heads of a group, of every position for each scored query: query i of a verify
            row, query max(count - score_queries, 0) + i of a scored prefill row. Exactly 0 for dead
            queries, padding rows and positions after the query. float32 if `q` is, else float16.
    """
    pallas, interpret = resolve(implementation, interpret)
    _check_arrays(q, k_pool, v_pool, page_table)
    n_drafts, n_verify, n_prefill = (
        0 if rows is None else rows.row.shape[0] for rows in (drafts, verify, prefill)
    )
    expected = n_drafts + n_verify * n_queries + n_prefill * chunk
    check(
        q.shape[0] == expected,
        f"q has {q.shape[0]} queries, but {n_drafts} draft, {n_verify} verify and {n_prefill} "
        f"prefill rows with n_queries={n_queries} and chunk={chunk} have {expected}",
    )
    check(
        1 <= context <= page_table.shape[1],
        f"context={context}, but must be in 1..{page_table.shape[1]}, the width of page_table",
    )
    if drafts is not None:
        _check_drafts(drafts, page_table.shape[0], k_pool.shape[1], layer)
        check(max_recent >= 1, f"max_recent={max_recent}, but must be at least 1")
    if verify is not None:
        _check_causal("verify", verify)
        check(n_queries >= 1, f"n_queries={n_queries}, but must be at least 1")
        check(
            score_queries in (0, n_queries),
            f"score_queries={score_queries}, but with verify rows it must be 0 or "
            f"n_queries={n_queries}",
        )
    if prefill is not None:
        _check_causal("prefill", prefill)
        check(chunk >= 1, f"chunk={chunk}, but must be at least 1")
    check(score_queries >= 0, f"score_queries={score_queries}, but must not be negative")
    if scored is not None:
        check(
            scored.ndim == 1 and scored.dtype == jnp.int32,
            f"scored is {scored.dtype}{list(scored.shape)}, but must be int32[F]",
        )
        check(score_queries > 0, "scored is given, but score_queries is 0")
        check(
            n_prefill > 0 or scored.shape[0] == 0,
            "scored names prefill rows, but there are no prefill rows",
        )

    n_scored = n_verify + (0 if scored is None else scored.shape[0])
    check(
        score_queries == 0 or n_scored > 0,
        f"score_queries={score_queries}, but there are neither verify rows nor scored prefill rows",
    )
    check(expected > 0, "q is empty: there must be at least one draft, verify or prefill row")

    arguments = {
        "layer": jnp.int32(layer),  # an operand, so that all layers share one trace
        "drafts": drafts if n_drafts else None,
        "verify": verify if n_verify else None,
        "prefill": prefill if n_prefill else None,
        "n_queries": n_queries,
        "chunk": chunk,
        "score_queries": score_queries,
        "scored": scored if n_prefill else None,
        "scale": float(scale),
        "max_recent": max_recent,
        "context": context,
    }
    if not pallas:
        return reference.fused_attention(q, k_pool, v_pool, page_table, **arguments)
    from pallas_kernels.fused_attention import pallas_triton

    return pallas_triton.fused_attention(
        q, k_pool, v_pool, page_table, **arguments, interpret=interpret
    )


def _check_arrays(q: Array, k_pool: Array, v_pool: Array, page_table: Array) -> None:
    check(k_pool.ndim == 3, f"k_pool has shape {k_pool.shape}, but must be [slots, Hkv, D]")
    check(
        v_pool.shape == k_pool.shape and v_pool.dtype == k_pool.dtype,
        f"v_pool is {v_pool.dtype}{list(v_pool.shape)}, but must be like k_pool, "
        f"{k_pool.dtype}{list(k_pool.shape)}",
    )
    n_kv_heads, head_dim = k_pool.shape[1:]
    check(
        q.ndim == 3 and q.shape[2] == head_dim and q.shape[1] % n_kv_heads == 0,
        f"q has shape {q.shape}, but must be [T, Hq, D] with D={head_dim} and Hq a multiple of "
        f"Hkv={n_kv_heads}",
    )
    check(
        q.dtype == k_pool.dtype and q.dtype in (jnp.float16, jnp.bfloat16, jnp.float32),
        f"q is {q.dtype} and k_pool {k_pool.dtype}, but both must be the same of float16, "
        "bfloat16 and float32",
    )
    check(
        page_table.ndim == 2 and page_table.dtype == jnp.int32,
        f"page_table is {page_table.dtype}{list(page_table.shape)}, "
        "but must be int32[B, max_context]",
    )


def _check_drafts(drafts: DraftRows, n_table_rows: int, n_kv_heads: int, layer: int) -> None:
    n, selected = drafts.row.shape[0], drafts.selected
    for name, size in (
        ("row", n),
        ("position", n),
        ("count", n_table_rows),
        ("recent_start", n_table_rows),
    ):
        value = getattr(drafts, name)
        check(
            value.shape == (size,) and value.dtype == jnp.int32,
            f"drafts.{name} is {value.dtype}{list(value.shape)}, but must be int32[{size}]",
        )
    check(
        selected.ndim == 4
        and selected.dtype == jnp.int32
        and selected.shape[1:3] == (n_table_rows, n_kv_heads)
        and selected.shape[3] >= 1,
        f"drafts.selected is {selected.dtype}{list(selected.shape)}, "
        f"but must be int32[L, B, Hkv, K] with B={n_table_rows}, Hkv={n_kv_heads} and K >= 1",
    )
    check(
        0 <= layer < selected.shape[0],
        f"layer={layer}, but must be in 0..{selected.shape[0] - 1}, the layers of drafts.selected",
    )


def _check_causal(name: str, rows: CausalRows) -> None:
    for field, value in zip(rows._fields, rows, strict=True):
        check(
            value.shape == rows.row.shape and value.ndim == 1 and value.dtype == jnp.int32,
            f"{name}.{field} is {value.dtype}{list(value.shape)}, but must be int32[R], "
            f"R the same in all of {name}",
        )
