"""Contract and dispatch of `fused_attention`."""

import jax.numpy as jnp
from jax import Array

from pallas_kernels import gpus
from pallas_kernels.dispatch import Implementation, check, resolve
from pallas_kernels.fused_attention import reference
from pallas_kernels.fused_attention.rows import CausalRows, DraftSlots
from pallas_kernels.fused_attention.scores import AttentionScores, CodedScores, DenseScores


def fused_attention(
    q: Array,
    k_pool: Array,
    v_pool: Array,
    page_table: Array,
    *,
    layer: int,
    drafts: DraftSlots | None,
    verify: CausalRows | None,
    prefill: CausalRows | None,
    n_queries: int,
    chunk: int,
    score_queries: int = 0,
    scored: Array | None = None,
    scores: AttentionScores | None = None,
    n_layers: int = 1,
    scale: float,
    context: int,
    implementation: Implementation = "auto",
    interpret: bool | None = None,
) -> tuple[Array, AttentionScores | None]:
    """Attention of one layer for all rows of a step: sparse drafts, full verification, prefill.

    The keys and values of this step's tokens must already be in the pool, where values are finite
    (`append_kv` sees to both). Query heads `h * group ..
    (h + 1) * group - 1` share KV head `h`. Every row index, position and slot that a live row uses
    must be in range; slot 0 must exist, whatever it holds.

    Args:
        q: [Nd + Nv * n_queries + Nc * chunk, Hq, D]: the draft queries, then n_queries per verify
            row, then chunk per prefill row.
        k_pool: [slots, Hkv, D] keys of this layer.
        v_pool: like `k_pool`, values.
        page_table: [B, max_context] int32, slot of each position of each row.
        layer: which layer of `drafts.slots` to use, and of the scores to write.
        drafts: the Nd draft rows (`draft_slots`), or None.
        verify: the Nv verify rows, or None.
        prefill: the Nc prefill rows, or None.
        n_queries: queries per verify row.
        chunk: queries per prefill row.
        score_queries: scored queries per scored row; 0 for no scores, `n_queries` if there are
            verify rows.
        scored: [F] int32, the prefill rows to score (-1 is padding), each once, or None.
        scores: of the layers before, to be completed in place; None in the first call of a step.
        n_layers: layers that the scores are of.
        scale: factor of the logits, usually D**-0.5.
        context: bound of positions: every position in use is < context <= max_context.

    Returns:
        out: like `q`. Padding queries get finite values.
        scores: of R = Nv + F scored rows, or None: softmax probabilities of every position for
            each scored query, which is query i of a verify row, and query
            max(count - score_queries, 0) + i of a scored prefill row.
    """
    pallas, interpret = resolve(implementation, interpret)
    _check_arrays(q, k_pool, v_pool, page_table)
    n_drafts, n_verify, n_prefill = (
        0 if rows is None else rows[-1].shape[0] for rows in (drafts, verify, prefill)
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
        _check_drafts(drafts, k_pool.shape[1], layer)
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
    if score_queries:
        check(
            0 <= layer < n_layers,
            f"layer={layer}, but must be in 0..{n_layers - 1}, the n_layers={n_layers} of scores",
        )
        form = CodedScores if pallas else DenseScores
        check(
            scores is None or isinstance(scores, form),
            f"scores is {type(scores).__name__}, but this implementation makes {form.__name__}",
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
        "scores": scores if score_queries else None,
        "n_layers": n_layers,
        "scale": float(scale),
        "context": context,
    }
    if not pallas:
        return reference.fused_attention(q, k_pool, v_pool, page_table, **arguments)
    from pallas_kernels.fused_attention import pallas_triton

    return pallas_triton.fused_attention(
        q, k_pool, v_pool, page_table, **arguments, gpu=gpus.current(), interpret=interpret
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


def _check_drafts(drafts: DraftSlots, n_kv_heads: int, layer: int) -> None:
    slots, length = drafts
    check(
        length.ndim == 1 and length.dtype == jnp.int32,
        f"drafts.length is {length.dtype}{list(length.shape)}, but must be int32[Nd]",
    )
    check(
        slots.ndim == 4
        and slots.dtype == jnp.int32
        and slots.shape[1] == length.shape[0]
        and slots.shape[2] >= 1
        and n_kv_heads % slots.shape[2] == 0
        and slots.shape[3] >= 1,
        f"drafts.slots is {slots.dtype}{list(slots.shape)}, but must be int32[L, Nd, lists, W] "
        f"with Nd={length.shape[0]}, lists a divisor of Hkv={n_kv_heads} and W >= 1",
    )
    check(
        0 <= layer < slots.shape[0],
        f"layer={layer}, but must be in 0..{slots.shape[0] - 1}, the layers of drafts.slots",
    )


def _check_causal(name: str, rows: CausalRows) -> None:
    for field, value in zip(rows._fields, rows, strict=True):
        check(
            value.shape == rows.row.shape and value.ndim == 1 and value.dtype == jnp.int32,
            f"{name}.{field} is {value.dtype}{list(value.shape)}, but must be int32[R], "
            f"R the same in all of {name}",
        )
