"""Arrays that are the same in every run."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array


def ints(x: Any) -> Array:
    return jnp.asarray(x, jnp.int32)


def normal(shape: tuple[int, ...], dtype: str, seed: int) -> Array:
    return jax.random.normal(jax.random.key(seed), shape, dtype)
