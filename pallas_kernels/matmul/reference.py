"""XLA reference of `matmul`."""

from collections.abc import Sequence

import jax.numpy as jnp
from jax import Array, lax


def matmul(x: Array, weight: Array, contracted: int = 1) -> Array:
    """Contracts the last `contracted` axes of `x` with the first of `weight`."""
    axes = tuple(range(x.ndim - contracted, x.ndim)), tuple(range(contracted))
    return lax.dot_general(x, weight, (axes, ((), ())), precision=precision(x))


def split_matmul(x: Array, weight: Array, parts: int) -> Array:
    """[T, K] x [K, N] to [parts, T, N], whose sum is the product."""
    x = x.reshape(x.shape[0], parts, -1)
    weight = weight.reshape(parts, x.shape[2], -1)
    return lax.dot_general(x, weight, (((2,), (1,)), ((1,), (0,))), precision=precision(x))


def add_parts(parts: Sequence[Array]) -> Array:
    """The product that parts are of: their sum in float32, rounded once."""
    if len(parts) == 1:
        return parts[0]
    return total(parts).astype(parts[0].dtype)


def total(parts: Sequence[Array]) -> Array:
    """Their sum in float32."""
    first, *rest = (part.astype(jnp.float32) for part in parts)
    return sum(rest, first)


def precision(x: Array) -> lax.Precision:
    """Float32 is for exactness: never let a GPU round it to TF32."""
    return lax.Precision.HIGHEST if x.dtype == jnp.float32 else lax.Precision.DEFAULT
