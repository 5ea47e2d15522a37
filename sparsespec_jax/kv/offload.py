"""KV that moves between the device's pool and host memory.

A chunk leaves in two steps: a gather packs it into one array on the device, in the order of the
steps around it, so that its slots are free for the next one; a thread then copies that array
to pinned host memory while the steps go on. It comes back the same way. Only whole arrays cross:
nothing indexes host memory inside a compiled function.
"""

from __future__ import annotations

import functools
import threading
from concurrent.futures import Future, ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import pack_kv, unpack_kv
from sparsespec_jax.config import Implementation
from sparsespec_jax.kv.allocator import TRASH_SLOT
from sparsespec_jax.kv.pool import Pools
from sparsespec_jax.kv.space import Evict, Forget, Map, Move, Restore
from sparsespec_jax.parallel.sharding import Placement

CHUNK_BYTES = 32 * 2**20  # smaller ones copy more slowly, and cost the dispatching thread more
CHUNKS_PER_STEP = 4  # back to the device: up to 128 MiB, 2.7 ms at 48 GB/s
_AT_ONCE = (4, 2, 1)  # chunks that one call unpacks: to the host it costs the same, however many
_IN_FLIGHT = 8  # chunks packed on the device and not on the host yet
_COPIES = 4  # at once: each waits until the steps enqueued before it are done
_RESERVED_BYTES = 8 * 2**30  # of pinned memory, allocated early: that stops the GPU for a while


def chunk_tokens(token_bytes: int) -> int:
    """Tokens of a chunk: a power of two, 16 to 256."""
    tokens = CHUNK_BYTES // token_bytes
    return min(256, max(16, 1 << max(0, tokens.bit_length() - 1)))


class KvOffload:
    """Carries out moves; owns the chunks in host memory. One thread at a time may use it."""

    def __init__(self, placement: Placement, chunk: int, implementation: Implementation = "auto"):
        """`chunk`: tokens of each; `implementation`: of `pack_kv` and `unpack_kv`."""
        self._chunk = chunk
        self._on_device = placement.of(None, None, None, "kv_heads", None)
        device = placement.mesh.local_devices[0]
        self._on_cpu = device.platform == "cpu"
        kinds = {memory.kind for memory in device.addressable_memories()}
        kind = "pinned_host" if "pinned_host" in kinds else device.default_memory().kind
        self._on_host = self._on_device.with_memory_kind(kind)
        self._chunks: dict[int, Future[jax.Array]] = {}
        self._threads: ThreadPoolExecutor | None = None
        self._in_flight = threading.BoundedSemaphore(_IN_FLIGHT)
        pools, replicated = placement.of(None, "kv_heads", None), placement.replicated
        self._pack = placement.jit(
            functools.partial(pack_kv, implementation=implementation),
            (pools, replicated),
            self._on_device,
        )
        self._unpack = placement.jit(
            functools.partial(unpack_kv, implementation=implementation),
            (pools, self._on_device, replicated),
            pools,
            donate_argnums=0,
        )
        self._map = jax.jit(_map, donate_argnums=0, out_shardings=replicated)

    def warmup(self, pools: Pools, table: jax.Array, chunks: int) -> tuple[Pools, jax.Array]:
        """Compile what moves, and allocate host memory for up to `chunks`. Donates as `move`."""
        nothing = np.full(self._chunk, TRASH_SLOT, np.int32)
        packed = self._pack(pools, nothing)
        for count in _AT_ONCE:
            pools = self._unpack(pools, (packed,) * count, np.tile(nothing, count))
        table = self._map(table, nothing, np.zeros(2, np.int32))
        if not self._on_cpu:
            chunks = min(chunks, _RESERVED_BYTES // packed.nbytes)
            jax.block_until_ready([jax.device_put(packed, self._on_host) for _ in range(chunks)])
        return pools, table

    def move(self, moves: list[Move], pools: Pools, table: jax.Array) -> tuple[Pools, jax.Array]:
        """Carries out `moves` in order. Pools and page table [R, N] are donated."""
        back: list[Restore] = []
        for move in moves:
            match move:
                case Evict(slots, chunk):
                    pools = self._restore(pools, back)
                    self._evict(pools, slots, chunk)
                case Restore(_, slots):
                    if any(np.isin(slots, other.slots).any() for other in back):
                        pools = self._restore(pools, back)  # order matters
                    back.append(move)
                case Map(row, position, slots):
                    table = self._map(table, self._padded(slots), np.int32([row, position]))
                case Forget(chunk):
                    del self._chunks[chunk]
        return self._restore(pools, back), table

    def close(self) -> None:
        """Wait for copies under way, and forget all chunks; new ones may follow."""
        if self._threads is not None:
            self._threads.shutdown()
        self._threads = None
        self._chunks.clear()

    def _evict(self, pools: Pools, slots: np.ndarray, chunk: int) -> None:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(_COPIES, thread_name_prefix="kv-offload")
        self._in_flight.acquire()
        packed = self._pack(pools, self._padded(slots))
        self._chunks[chunk] = self._threads.submit(self._to_host, packed)

    def _restore(self, pools: Pools, moves: list[Restore]) -> Pools:
        """Carries out `moves`, several at once, and empties the list."""
        while moves:
            count = next(count for count in _AT_ONCE if count <= len(moves))
            now, moves[:] = moves[:count], moves[count:]
            packed = [self._chunks.pop(move.chunk).result() for move in now]
            packed = tuple(jax.device_put(packed, self._on_device))
            slots = np.concatenate([self._padded(move.slots) for move in now])
            pools = self._unpack(pools, packed, slots)
        return pools

    def _to_host(self, packed: jax.Array) -> jax.Array:
        try:
            return jax.block_until_ready(jax.device_put(packed, self._on_host))
        finally:
            self._in_flight.release()

    def _padded(self, slots: np.ndarray) -> np.ndarray:
        padded = np.full(self._chunk, TRASH_SLOT, np.int32)
        padded[: len(slots)] = slots
        return padded


def _map(table: jax.Array, slots: jax.Array, row_and_position: jax.Array) -> jax.Array:
    """Enters `slots`, but for the padding, in a row of the page table."""
    row, position = row_and_position
    positions = jnp.where(slots == TRASH_SLOT, table.shape[1], position + jnp.arange(len(slots)))
    return table.at[row, positions].set(slots, mode="drop")
