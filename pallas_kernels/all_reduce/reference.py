"""XLA reference of `all_reduce` and `all_reduce_add_norm`."""

from collections.abc import Hashable

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.add_norm import reference as add_norm_reference


def all_reduce(x: Array, axis_name: Hashable) -> Array:
    return lax.psum(x, axis_name)


def all_reduce_add_norm(
    x: Array, delta: Array, scale: Array, axis_name: Hashable, *, eps: float
) -> tuple[Array, Array]:
    total = lax.psum(sum_parts(delta, x.ndim), axis_name)
    return add_norm_reference.add_norm(x, total, scale, eps=eps)


def sum_parts(delta: Array, ndim: int) -> Array:
    """`delta`, or the sum of its parts, [S, ..., hidden], in float32 and rounded once."""
    if delta.ndim == ndim:
        return delta
    return jnp.sum(delta, axis=0, dtype=jnp.float32).astype(delta.dtype)
