"""XLA reference of `append_kv`, and its arithmetic for whoever keeps keys and values elsewhere."""

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.matmul.reference import add_parts


def append_kv(
    k_pool: Array,
    v_pool: Array,
    qkv: Array,
    slots: Array,
    cos: Array,
    sin: Array,
    *,
    bias: Array | None,
    q_norm: Array | None,
    k_norm: Array | None,
    eps: float,
) -> tuple[Array, Array, Array]:
    q, k, v = rotate(add_parts(qkv), cos, sin, bias=bias, q_norm=q_norm, k_norm=k_norm, eps=eps)
    k, v = k.astype(k_pool.dtype), v.astype(v_pool.dtype)
    finite = jnp.isfinite(v)
    k = jnp.where(finite.all(-1, keepdims=True), k, jnp.nan)
    v = jnp.where(finite, v, 0)
    return q, k_pool.at[slots].set(k), v_pool.at[slots].set(v)


def rotate(
    qkv: Array,
    cos: Array,
    sin: Array,
    *,
    bias: Array | None = None,
    q_norm: Array | None = None,
    k_norm: Array | None = None,
    eps: float = 1e-6,
) -> tuple[Array, Array, Array]:
    """Rotated queries [..., Hkv * group, D] and keys, and values, [..., Hkv, D].

    Args:
        qkv: [..., Hkv, group + 2, D], per KV head its query heads, its key and its value.
        cos: [..., D / 2] float32.
        sin: like `cos`.
        bias: [Hkv, group + 2, D] to add, or None.
        q_norm: [D] scale of the queries' norm, or None.
        k_norm: [D] scale of the keys' norm, or None.
        eps: of the norms.
    """
    if bias is not None:
        qkv = qkv + bias
    *batch, n_kv_heads, members, head_dim = qkv.shape
    group = members - 2
    q, k, v = qkv[..., :group, :], qkv[..., group, :], qkv[..., group + 1, :]
    q = q.reshape(*batch, n_kv_heads * group, head_dim)
    if q_norm is not None:
        q, k = rms_norm(q, q_norm, eps), rms_norm(k, k_norm, eps)
    cos, sin = cos[..., None, :], sin[..., None, :]

    def turn(x: Array) -> Array:
        return jnp.concatenate(turn_halves(*jnp.split(x, 2, axis=-1), cos, sin), axis=-1)

    return turn(q), turn(k), v


def rms_norm(x: Array, scale: Array, eps: float) -> Array:
    """Root-mean-square norm (Zhang & Sennrich, 2019), computed in float32."""
    wide = x.astype(jnp.float32)
    wide = wide * lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    return wide.astype(x.dtype) * scale


def turn_halves(first: Array, second: Array, cos: Array, sin: Array) -> tuple[Array, Array]:
    """Rotary embedding (Su et al., 2021) of the two halves of heads, computed in float32."""
    x, y = first.astype(jnp.float32), second.astype(jnp.float32)
    return (x * cos - y * sin).astype(first.dtype), (y * cos + x * sin).astype(second.dtype)
