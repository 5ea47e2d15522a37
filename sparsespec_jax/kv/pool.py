"""The KV pool: one slot a token, a pair of arrays a layer."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from sparsespec_jax.models.config import ModelConfig
from sparsespec_jax.parallel.sharding import Placement

Pools = tuple[tuple[jax.Array, jax.Array], ...]  # keys and values of each layer


def make_pools(model: ModelConfig, slots: int, dtype: jnp.dtype, placement: Placement) -> Pools:
    """Zeroed keys and values [slots, kv_heads, head_dim] of every layer.

    A pair of arrays per layer: a kernel given a slice of a stacked pool would copy the layer.
    Zeroed, since even masked values enter a product with 0, and 0 * NaN is NaN.
    """
    shape = (slots, model.num_kv_heads, model.head_dim)
    zeros = jax.jit(
        lambda: jnp.zeros(shape, dtype), out_shardings=placement.of(None, "kv_heads", None)
    )
    return tuple((zeros(), zeros()) for _ in range(model.num_layers))
