"""The KV pool: one slot a token, a pair of arrays a layer, and how many slots memory allows."""

from __future__ import annotations

import logging
import os

import jax
import jax.numpy as jnp

from sparsespec_jax.config import EngineConfig
from sparsespec_jax.models.config import ModelConfig
from sparsespec_jax.parallel.sharding import Placement

logger = logging.getLogger(__name__)

GPU_FRACTION = 0.85
CPU_BYTES = 2 * 2**30
HOST_FRACTION = 0.5

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


def pool_slots(
    model: ModelConfig, config: EngineConfig, width: int, dtype: jnp.dtype, placement: Placement
) -> int:
    """Slots of the pool, the trash slot included, for `config.kv_cache_memory` of every device.

    No more than `max_batch` requests of `width` tokens can use. Raises ValueError if not even two
    tokens fit.
    """
    token_bytes = model.kv_bytes_per_token(dtype) // placement.shards
    devices = placement.mesh.local_devices
    memory = min(_pool_bytes(config.kv_cache_memory, device) for device in devices)
    useful = config.max_batch * width + 1
    slots = min(memory // token_bytes, useful)
    if slots < 3:
        raise ValueError(
            f"kv_cache_memory={config.kv_cache_memory!r} gives {memory} bytes, but a token's KV "
            f"takes {token_bytes}"
        )
    logger.info("KV pool: %d slots, %.2f GiB a device", slots, slots * token_bytes / 2**30)
    return slots


def host_chunks(
    model: ModelConfig,
    config: EngineConfig,
    width: int,
    dtype: jnp.dtype,
    slots: int,
    chunk: int,
    placement: Placement,
) -> int:
    """Chunks of `chunk` tokens that host memory may hold, for `config.max_host_kv_bytes`.

    No more than `max_batch` requests of `width` tokens need beside a pool of `slots`, and two more
    for each request, since every row and every prefix has a chunk that is not full.
    """
    beside = config.max_batch * width - (slots - 1)
    if config.kv_policy == "recompute" or beside <= 0:
        return 0
    token_bytes = model.kv_bytes_per_token(dtype) // placement.shards  # of each device
    chunk_bytes = chunk * token_bytes * len(placement.mesh.local_devices)
    most = config.max_host_kv_bytes
    if most is None:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        most = int(HOST_FRACTION * free)
    useful = -(-beside // chunk) + 2 * config.max_batch
    return min(most // chunk_bytes, useful)


def _pool_bytes(memory: float | int | None, device: jax.Device) -> int:
    if isinstance(memory, int):
        return memory
    if device.platform == "cpu":
        if memory is None:
            return CPU_BYTES
        return int(memory * os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    stats = device.memory_stats()
    free = stats["bytes_limit"] - stats["bytes_in_use"]
    return int((GPU_FRACTION if memory is None else memory) * free)
