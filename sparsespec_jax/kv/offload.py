"""KV that moves between the device's pool and host memory.

A chunk leaves in two steps: a gather packs it into one array on the device, in the order of the
steps around it, so that its slots are free for the next one; a thread then copies that array
to pinned host memory while the steps go on. It comes back the same way. Only whole arrays cross:
nothing indexes host memory inside a compiled function. The dispatching thread pays for each call,
whatever it moves: so several chunks share one.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import pack_kv, unpack_kv
from sparsespec_jax.config import Implementation
from sparsespec_jax.kv.allocator import TRASH_SLOT
from sparsespec_jax.kv.pool import Pools
from sparsespec_jax.kv.space import Evict, Map, Move, Restore
from sparsespec_jax.parallel.sharding import Placement

CHUNK_BYTES = 32 * 2**20  # smaller ones copy more slowly, and cost the dispatching thread more
CHUNKS_PER_STEP = 4  # back to the device: up to 128 MiB, 2.7 ms at 48 GB/s
_AT_ONCE = (4, 2, 1)  # chunks of one call
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
            lambda pools, slots: pack_kv(
                pools, slots, chunks=len(slots) // chunk, implementation=implementation
            ),
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
        for count in _AT_ONCE:
            slots = np.tile(nothing, count)
            packed = self._pack(pools, slots)
            pools = self._unpack(pools, packed, slots)
            table = self._map(table, slots, np.zeros((count, 2), np.int32))
        if not self._on_cpu:
            [packed] = packed
            chunks = min(chunks, _RESERVED_BYTES // packed.nbytes)
            jax.block_until_ready([jax.device_put(packed, self._on_host) for _ in range(chunks)])
        return pools, table

    def move(self, moves: list[Move], pools: Pools, table: jax.Array) -> tuple[Pools, jax.Array]:
        """Carries out `moves` in order. Pools and page table [R, N] are donated."""
        of_table = [move for move in moves if isinstance(move, Map)]
        of_pools = [move for move in moves if not isinstance(move, Map)]
        for kind, run in itertools.groupby(of_pools, type):
            for group in _groups(run):
                if kind is Evict:
                    self._evict(pools, group)
                elif kind is Restore:
                    pools = self._restore(pools, group)
                else:
                    for forgotten in group:
                        del self._chunks[forgotten.chunk]
        for group in _groups(of_table):
            places = np.array([[move.row, move.position] for move in group], np.int32)
            table = self._map(table, self._slots(group), places)
        return pools, table

    def close(self) -> None:
        """Wait for copies under way, and forget all chunks; new ones may follow."""
        if self._threads is not None:
            self._threads.shutdown()
        self._threads = None
        self._chunks.clear()

    def _evict(self, pools: Pools, moves: Sequence[Evict]) -> None:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(_COPIES, thread_name_prefix="kv-offload")
        for _ in moves:
            self._in_flight.acquire()
        packed = self._pack(pools, self._slots(moves))
        copies = [Future() for _ in moves]
        self._chunks |= {move.chunk: copy for move, copy in zip(moves, copies, strict=True)}
        self._threads.submit(self._to_host, packed, copies)

    def _restore(self, pools: Pools, moves: Sequence[Restore]) -> Pools:
        packed = tuple(self._chunks.pop(move.chunk).result() for move in moves)
        packed = jax.device_put(packed, self._on_device)
        return self._unpack(pools, packed, self._slots(moves))

    def _to_host(self, packed: Sequence[jax.Array], copies: Sequence[Future[jax.Array]]) -> None:
        """Each has a future of its own: what has come back leaves host memory, whoever stays."""
        try:
            on_host = jax.block_until_ready(jax.device_put(packed, self._on_host))
            for copy, array in zip(copies, on_host, strict=True):
                copy.set_result(array)
        except Exception as error:
            for copy in copies:
                copy.set_exception(error)
        finally:
            self._in_flight.release(len(packed))

    def _slots(self, moves: Sequence[Evict | Restore | Map]) -> np.ndarray:
        """Of all chunks, each padded with the trash slot."""
        padded = np.full((len(moves), self._chunk), TRASH_SLOT, np.int32)
        for row, move in zip(padded, moves, strict=True):
            row[: len(move.slots)] = move.slots
        return padded.ravel()


def _groups(moves: Iterable[Move]) -> Iterator[list[Move]]:
    """Moves that may happen at once, as many as one call takes; in order."""
    group: list[Move] = []
    for move in moves:
        if any(_meet(move, other) for other in group):
            yield from _split(group)
            group = []
        group.append(move)
    yield from _split(group)


def _split(moves: list[Move]) -> Iterator[list[Move]]:
    while moves:
        count = next(count for count in _AT_ONCE if count <= len(moves))
        yield moves[:count]
        moves = moves[count:]


def _meet(move: Move, other: Move) -> bool:
    """Whether the two, of one kind, write to the same place: then their order matters."""
    match move, other:
        case Restore(), Restore():
            return bool(np.isin(move.slots, other.slots).any())
        case Map(), Map():
            ends = move.position + len(move.slots), other.position + len(other.slots)
            starts = move.position, other.position
            return move.row == other.row and max(starts) < min(ends)
    return False


def _map(table: jax.Array, slots: jax.Array, places: jax.Array) -> jax.Array:
    """Enters `slots`, but for the padding, in the page table.

    slots: [n * C], those of one chunk after another. places: [n, 2], row and position of each.
    """
    slots = slots.reshape(len(places), -1)
    row, position = places[:, :1], places[:, 1:]
    position = jnp.where(slots == TRASH_SLOT, table.shape[1], position + jnp.arange(slots.shape[1]))
    return table.at[row, position].set(slots, mode="drop")
