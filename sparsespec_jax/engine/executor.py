"""The device side of the engine: parameters, pools and state, and the compiled steps over them."""

from __future__ import annotations

import dataclasses
import logging
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.all_reduce import Peers
from sparsespec_jax.config import EngineConfig, SpeculationConfig
from sparsespec_jax.drafters import make_drafter
from sparsespec_jax.engine.buckets import Buckets
from sparsespec_jax.engine.plan import Bucket
from sparsespec_jax.engine.state import DecodeState, initial_state, state_shardings
from sparsespec_jax.engine.step import Step
from sparsespec_jax.kv.offload import KvOffload
from sparsespec_jax.kv.pool import Pools, make_pools
from sparsespec_jax.kv.space import Move
from sparsespec_jax.models.config import ModelConfig
from sparsespec_jax.models.parameters import Params
from sparsespec_jax.parallel.collectives import Shards
from sparsespec_jax.parallel.model_shards import divisible, shard_of
from sparsespec_jax.parallel.sharding import Placement

logger = logging.getLogger(__name__)

_MESSAGE_ROWS = 512  # tokens of a step that shards exchange by `all_reduce`'s kernel at most
_GAP = 8 << 20  # bytes that are left free before the pools
_COMPILING = 8  # steps at once: tracing takes turns, what follows does not


@dataclasses.dataclass
class DispatchStats:
    """Steps dispatched, and host seconds spent in dispatching them and in compiling."""

    steps: int = 0
    dispatch_seconds: float = 0.0
    compiled: int = 0
    compile_seconds: float = 0.0


class Executor:
    """Owns every device array of the engine. One thread at a time may use it."""

    def __init__(
        self,
        model: ModelConfig,
        params: Params,
        config: EngineConfig,
        speculation: SpeculationConfig,
        buckets: Buckets,
        slots: int,
        placement: Placement,
        kv_chunk: int = 1,
        host_chunks: int = 0,
    ):
        """`params`: in their places (`place_params`). `kv_chunk`: tokens of the chunks that `move`
        takes; `host_chunks`: most that leave.
        """
        self._shards = Shards(placement.shards, placement.axis)
        self._kv_model = divisible(model, placement.shards)
        part = shard_of(self._kv_model, placement.shards)
        self._model = dataclasses.replace(part, vocab_size=model.vocab_size)
        self._params = params
        self._config = config
        self._speculation = speculation
        self._buckets = buckets
        self._slots = slots
        self._placement = placement
        self._host_chunks = host_chunks
        self._offload = KvOffload(placement, kv_chunk, config.implementation)
        self._drafter = make_drafter(self._model, speculation, buckets.width, config.implementation)
        self._state_shardings = state_shardings(placement, self._drafter)
        self._peers: Peers | None = None
        self._compiled: dict[Bucket, jax.stages.Compiled] = {}
        self.stats = DispatchStats()
        self.reset()

    @property
    def dtype(self) -> jnp.dtype:
        return self._params["embedding"].dtype

    def release(self) -> None:
        """Let go of all device arrays; nothing can be dispatched any more."""
        self._offload.close()
        self._params = self._pools = self._state = self._peers = None

    def reset(self) -> None:
        """Start over with an empty pool and no rows."""
        self._offload.close()
        self._pools = self._state = None  # free the old ones first
        gap = self._placement.jit(lambda: jnp.zeros(_GAP, bool), (), self._placement.replicated)()
        self._pools = make_pools(self._kv_model, self._slots, self.dtype, self._placement)
        initial = self._placement.jit(self._initial_state, (), self._state_shardings)
        self._state = initial()
        # The allocator takes the smallest room there is. So the plans and results of steps get the
        # gap, and temporaries always start behind the pools. Where small arrays lie among them they
        # move from step to step, and XLA updates each node of a step's command buffer for that.
        gap.delete()
        self._peers = self._placement.connect(_MESSAGE_ROWS, self._model.hidden_size)

    def _initial_state(self) -> DecodeState:
        rows, k = self._config.max_batch + 1, self._drafter.k
        hidden = None
        if self._speculation.verification == "rejection" and k:
            hidden = jnp.zeros((rows, k, self._model.hidden_size), self.dtype)
        drafter = self._drafter.init_state(rows)
        return initial_state(self._config.max_batch, self._buckets.width, drafter, hidden)

    def transform(self, change: Callable[[Pools, DecodeState], tuple[Pools, DecodeState]]) -> None:
        """Go on from what `change` makes of pools and state: for runs that start in the middle."""
        self._pools, self._state = change(self._pools, self._state)

    def move(self, moves: list[Move]) -> None:
        """Enqueue moves of KV between the pool and host memory, before the next step."""
        if moves:
            table = self._state.page_table
            self._pools, table = self._offload.move(moves, self._pools, table)
            self._state = self._state._replace(page_table=table)

    def dispatch(self, bucket: Bucket, packed: np.ndarray) -> jax.Array:
        """Enqueue a step and return its packed result, whose copy to the host is under way."""
        self.compile(bucket)
        start = time.perf_counter()
        result = self._run(bucket, packed)
        result.copy_to_host_async()
        self.stats.dispatch_seconds += time.perf_counter() - start
        self.stats.steps += 1
        return result

    def _run(self, bucket: Bucket, packed: np.ndarray) -> jax.Array:
        self._pools, self._state, result = self.compile(bucket)(
            self._params, self._pools, self._state, packed, self._peers
        )
        return result

    def compile(self, bucket: Bucket) -> jax.stages.Compiled:
        """The compiled step of a bucket, compiled now if it is new."""
        if bucket not in self._compiled:
            start = time.perf_counter()
            self._compiled[bucket] = self.lower(bucket).compile()
            seconds = time.perf_counter() - start
            self.stats.compiled += 1
            self.stats.compile_seconds += seconds
            logger.info("compiled %s in %.1f s", bucket, seconds)
        return self._compiled[bucket]

    def lower(self, bucket: Bucket, **kwargs) -> jax.stages.Lowered:
        """The step of a bucket, lowered; keywords go to `jax.stages.Traced.lower`."""
        layout = self._buckets.layout(bucket)
        step = Step(
            self._model,
            self._drafter,
            layout,
            self._speculation.verification,
            self._config.implementation,
            self._shards,
        )
        replicated = self._placement.replicated
        packed = jax.ShapeDtypeStruct((layout.size,), jnp.int32, sharding=replicated)
        arguments = self._params, self._pools, self._state, packed, self._peers
        arguments = jax.tree.map(_abstract, arguments)
        shardings = jax.tree.map(lambda leaf: leaf.sharding, arguments)
        jitted = self._placement.jit(step, shardings, shardings[1:4], donate_argnums=(1, 2))
        return jitted.trace(*arguments).lower(**kwargs)

    def warmup(
        self, buckets: list[Bucket], progress: Callable | None = None, *, run: bool = True
    ) -> None:
        """Compile `buckets` ahead of use, several at a time, and what moves KV.

        `run`: each of them once, on padding alone. What a GPU loads and sets up for a step it does
        when that first runs.
        """
        if self._host_chunks:
            table = self._state.page_table
            self._pools, table = self._offload.warmup(self._pools, table, self._host_chunks)
            self._state = self._state._replace(page_table=table)
        with ThreadPoolExecutor(min(_COMPILING, os.cpu_count() or 1)) as pool:
            done = [pool.submit(self.compile, bucket) for bucket in buckets]
            for future in progress(done) if progress else done:
                future.result()
        if run:
            for bucket in buckets:
                self._run(bucket, self._buckets.layout(bucket).empty()[0]).block_until_ready()


def _abstract(array: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)
