"""XLA reference of `add_norm`."""

import jax.numpy as jnp
from jax import Array

from pallas_kernels.append_kv.reference import rms_norm
from pallas_kernels.matmul.reference import total


def add_norm(x: Array, delta: Array | None, scale: Array, *, eps: float) -> tuple[Array, Array]:
    if delta is not None:
        x = add(x, delta)
    return x, rms_norm(x, scale, eps)


def add(x: Array, delta: Array) -> Array:
    """`x + delta`, rounded once; `delta` may be parts, [S, ..., hidden]."""
    return add_parts(x, [delta] if delta.ndim == x.ndim else list(delta))


def add_parts(x: Array, parts: list[Array]) -> Array:
    if len(parts) == 1:
        return x + parts[0]
    return (x.astype(jnp.float32) + total(parts)).astype(x.dtype)
