"""How much KV there is room for: slots of the device's pool, and chunks in host memory."""

from __future__ import annotations

import logging
import os
from typing import NamedTuple

import jax
import jax.numpy as jnp

from sparsespec_jax.config import EngineConfig
from sparsespec_jax.kv.offload import chunk_tokens
from sparsespec_jax.models.config import ModelConfig
from sparsespec_jax.parallel.processes import Processes
from sparsespec_jax.parallel.sharding import Placement

logger = logging.getLogger(__name__)

GPU_FRACTION = 0.85
CPU_BYTES = 2 * 2**30
HOST_FRACTION = 0.5


class KvSizes(NamedTuple):
    """slots: of the pool, the trash slot included. chunk: tokens of one. host_chunks: at most."""

    slots: int
    chunk: int
    host_chunks: int


def kv_sizes(
    model: ModelConfig,
    config: EngineConfig,
    width: int,
    dtype: jnp.dtype,
    placement: Placement,
    processes: Processes,
    reserved: int = 0,
) -> KvSizes:
    """What all processes have room for.

    model: one that divides among the devices. width: positions of a request, at most. reserved:
    bytes of each GPU that steps need. Raises ValueError if not even two tokens fit.
    """
    token_bytes = model.kv_bytes_per_token(dtype) // placement.shards  # of each device
    slots = processes.smallest("slots", _slots(config, width, token_bytes, placement, reserved))
    chunk = chunk_tokens(token_bytes)
    chunk_bytes = chunk * token_bytes * len(placement.mesh.local_devices)
    chunks = _host_chunks(config, width, slots, chunk, chunk_bytes)
    return KvSizes(slots, chunk, processes.smallest("host_chunks", chunks))


def _slots(
    config: EngineConfig, width: int, token_bytes: int, placement: Placement, reserved: int
) -> int:
    """For `config.kv_cache_memory` of every device; no more than `max_batch` requests can use."""
    devices = placement.mesh.local_devices
    memory = min(_pool_bytes(config.kv_cache_memory, device, reserved) for device in devices)
    slots = min(memory // token_bytes, config.max_batch * width + 1)
    if slots < 3:
        raise ValueError(
            f"kv_cache_memory={config.kv_cache_memory!r} gives {max(0, memory)} bytes, but a "
            f"token's KV takes {token_bytes}"
            + (f"; steps need {reserved} bytes: see max_batch and max_context" if reserved else "")
        )
    logger.info("KV pool: %d slots, %.2f GiB a device", slots, slots * token_bytes / 2**30)
    return slots


def _host_chunks(config: EngineConfig, width: int, slots: int, chunk: int, chunk_bytes: int) -> int:
    """Chunks that host memory may hold, for `config.max_host_kv_bytes`.

    No more than `max_batch` requests of `width` tokens need beside a pool of `slots`, and two more
    for each request, since every row and every prefix has a chunk that is not full.
    """
    beside = config.max_batch * width - (slots - 1)
    if config.kv_policy == "recompute" or beside <= 0:
        return 0
    most = config.max_host_kv_bytes
    if most is None:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        most = int(HOST_FRACTION * free)
    useful = -(-beside // chunk) + 2 * config.max_batch
    return min(most // chunk_bytes, useful)


def _pool_bytes(memory: float | int | None, device: jax.Device, reserved: int) -> int:
    if isinstance(memory, int):
        return memory
    if device.platform == "cpu":
        if memory is None:
            return CPU_BYTES
        return int(memory * os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    stats = device.memory_stats()
    free = stats["bytes_limit"] - stats["bytes_in_use"] - reserved
    return int((GPU_FRACTION if memory is None else memory) * free)
