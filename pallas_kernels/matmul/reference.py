"""XLA reference of `matmul`."""

import jax.numpy as jnp
from jax import Array, lax


def matmul(x: Array, weight: Array, contracted: int = 1) -> Array:
    """Contracts the last `contracted` axes of `x` with the first of `weight`."""
    axes = tuple(range(x.ndim - contracted, x.ndim)), tuple(range(contracted))
    return lax.dot_general(x, weight, (axes, ((), ())), precision=precision(x))


def precision(x: Array) -> lax.Precision:
    """Float32 is for exactness: never let a GPU round it to TF32."""
    return lax.Precision.HIGHEST if x.dtype == jnp.float32 else lax.Precision.DEFAULT
