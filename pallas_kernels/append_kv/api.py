"""Contract and dispatch of `append_kv`."""

import jax.numpy as jnp
from jax import Array

from pallas_kernels.append_kv import reference
from pallas_kernels.dispatch import Implementation, check, resolve


def append_kv(
    k_pool: Array,
    v_pool: Array,
    qkv: Array,
    slots: Array,
    cos: Array,
    sin: Array,
    *,
    bias: Array | None = None,
    q_norm: Array | None = None,
    k_norm: Array | None = None,
    eps: float = 1e-6,
    implementation: Implementation = "auto",
    interpret: bool | None = None,
) -> tuple[Array, Array, Array]:
    """From the fused projection of T tokens to queries, and keys and values in the pool.

    Adds the parts up and the bias to them, normalises queries and keys per head, rotates them
    (half-split layout) and writes keys and values to their slots; in place when the pools are
    donated. The arithmetic is that of `reference.rotate`: the sum with the bias in the dtype of
    `qkv`; norms, rotation and the sum of parts in float32, each result rounded to that dtype.

    Values that are no numbers are written as 0, and their key as NaN. They still reach the queries
    that attend to them, through the logits; but no query that masks them (0 * NaN is NaN).

    Slot 0 is the trash slot: padding tokens all write there, and what it then holds is undefined.
    Every other slot may appear only once, and every slot must lie in the pool.

    Args:
        k_pool: [slots, Hkv, D] keys of one layer.
        v_pool: like `k_pool`, values.
        qkv: parts [S, T, Hkv, group + 2, D] of the projection (`matmul_parts`), float16, bfloat16
            or float32: per KV head its query heads, its key and its value. Keys and values are cast
            to the pool's dtype.
        slots: [T] int32 destination of each token.
        cos: [T, D / 2] float32, of each token's position.
        sin: like `cos`.
        bias: [Hkv, group + 2, D] of qkv's dtype, or None.
        q_norm: [D] of qkv's dtype, scale of the RMS norm of each query head, or None.
        k_norm: like `q_norm`, of each key; given if and only if `q_norm` is.
        eps: of the norms.

    Returns:
        The queries, [T, Hkv * group, D] of qkv's dtype, and the updated `k_pool` and `v_pool`.
    """
    pallas, interpret = resolve(implementation, interpret)
    _check_pools(k_pool, v_pool)
    _check_tokens(k_pool, qkv, slots, cos, sin)
    _check_constants(qkv, bias, q_norm, k_norm, eps)
    _, n_tokens, n_kv_heads, members, head_dim = qkv.shape
    if n_tokens == 0:
        q = jnp.zeros((0, n_kv_heads * (members - 2), head_dim), qkv.dtype)
        return q, k_pool, v_pool
    arrays = k_pool, v_pool, qkv, slots, cos, sin
    constants = {"bias": bias, "q_norm": q_norm, "k_norm": k_norm, "eps": float(eps)}
    if not pallas:
        return reference.append_kv(*arrays, **constants)
    from pallas_kernels.append_kv import pallas_triton

    return pallas_triton.append_kv(*arrays, **constants, interpret=interpret)


def _check_pools(k_pool: Array, v_pool: Array) -> None:
    check(k_pool.ndim == 3, f"k_pool has shape {k_pool.shape}, but must be [slots, Hkv, D]")
    check(
        k_pool.shape[2] % 2 == 0,
        f"k_pool has shape {k_pool.shape}, but its last axis, D, must be even: heads are rotated "
        "by halves",
    )
    check(
        v_pool.shape == k_pool.shape and v_pool.dtype == k_pool.dtype,
        f"v_pool is {v_pool.dtype}{list(v_pool.shape)}, but must be like k_pool, "
        f"{k_pool.dtype}{list(k_pool.shape)}",
    )


def _check_tokens(k_pool: Array, qkv: Array, slots: Array, cos: Array, sin: Array) -> None:
    check(
        slots.ndim == 1 and slots.dtype == jnp.int32,
        f"slots is {slots.dtype}{list(slots.shape)}, but must be int32[T]",
    )
    n_tokens, (n_kv_heads, head_dim) = slots.shape[0], k_pool.shape[1:]
    check(
        qkv.ndim == 5
        and qkv.shape[0] >= 1
        and qkv.shape[1:3] == (n_tokens, n_kv_heads)
        and qkv.shape[3] >= 3
        and qkv.shape[4] == head_dim,
        f"qkv has shape {qkv.shape}, but must be [S, T, Hkv, group + 2, D] with T={n_tokens}, "
        f"Hkv={n_kv_heads}, group >= 1 and D={head_dim}",
    )
    check(
        qkv.dtype in (jnp.float16, jnp.bfloat16, jnp.float32),
        f"qkv is {qkv.dtype}, but must be float16, bfloat16 or float32",
    )
    for name, table in (("cos", cos), ("sin", sin)):
        check(
            table.shape == (n_tokens, head_dim // 2) and table.dtype == jnp.float32,
            f"{name} is {table.dtype}{list(table.shape)}, but must be float32[T, D / 2] = "
            f"float32[{n_tokens}, {head_dim // 2}]",
        )


def _check_constants(
    qkv: Array, bias: Array | None, q_norm: Array | None, k_norm: Array | None, eps: float
) -> None:
    check(
        (q_norm is None) == (k_norm is None),
        f"{'k_norm' if q_norm is None else 'q_norm'} is given, but q_norm and k_norm must be given "
        "both or neither",
    )
    for name, value, shape in (
        ("bias", bias, qkv.shape[2:]),
        ("q_norm", q_norm, qkv.shape[4:]),
        ("k_norm", k_norm, qkv.shape[4:]),
    ):
        if value is not None:
            check(
                value.shape == shape and value.dtype == qkv.dtype,
                f"{name} is {value.dtype}{list(value.shape)}, but must be "
                f"{qkv.dtype}{list(shape)}, or None",
            )
    check(eps >= 0, f"eps={eps}, but must not be negative")
