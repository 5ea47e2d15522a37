"""XLA reference of `pack_kv` and `unpack_kv`."""

import jax.numpy as jnp
from jax import Array

Pools = tuple[tuple[Array, Array], ...]  # keys and values of each layer


def pack_kv(pools: Pools, slots: Array, chunks: int) -> tuple[Array, ...]:
    return tuple(
        jnp.stack([jnp.stack([pool[part] for pool in layer]) for layer in pools])
        for part in jnp.split(slots, chunks)
    )


def unpack_kv(pools: Pools, packed: tuple[Array, ...], slots: Array) -> Pools:
    return tuple(
        tuple(pool.at[slots].set(values) for pool, values in zip(layer, both, strict=True))
        for layer, both in zip(pools, jnp.concatenate(packed, axis=2), strict=True)
    )
