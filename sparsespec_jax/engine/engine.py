"""The engine: tokens in, tokens out, one thread that keeps the device busy.

The thread plans and dispatches step i + 1 while step i runs, and reads the result of step i after
that. Nothing it needs for planning is on the device: see `scheduler.py`.
"""

from __future__ import annotations

import atexit
import dataclasses
import itertools
import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import jax
import numpy as np

from sparsespec_jax.config import EngineConfig, SpeculationConfig
from sparsespec_jax.engine.adaptive import Choice
from sparsespec_jax.engine.buckets import Buckets
from sparsespec_jax.engine.drafting import Drafting
from sparsespec_jax.engine.events import TokenEvent, token_event
from sparsespec_jax.engine.executor import Executor
from sparsespec_jax.engine.host_verification import HostVerifier, Verdict
from sparsespec_jax.engine.intake import Intake
from sparsespec_jax.engine.limits import Limits
from sparsespec_jax.engine.plan import StepResult
from sparsespec_jax.engine.planned import Emitting, PlannedStep
from sparsespec_jax.engine.request import Request
from sparsespec_jax.engine.scheduler import Scheduler
from sparsespec_jax.engine.stats import EngineStats, StepCounters
from sparsespec_jax.kv.manager import KvManager
from sparsespec_jax.kv.offload import CHUNKS_PER_STEP
from sparsespec_jax.kv.sizes import kv_sizes
from sparsespec_jax.kv.space import KvSpace
from sparsespec_jax.models.config import ModelConfig
from sparsespec_jax.models.parameters import Params
from sparsespec_jax.parallel.model_shards import divisible, place_params, shard_of
from sparsespec_jax.parallel.processes import Orders, Processes
from sparsespec_jax.parallel.sharding import Placement, placement_of
from sparsespec_jax.sampling.params import SamplingParams, sample_seed, validate_for_model
from sparsespec_jax.sampling.rows import pack_row
from sparsespec_jax.sampling.verification import RUNNING

logger = logging.getLogger(__name__)

_REQUEST_IDS = itertools.count()  # of all engines: an id names one request
PREFILL = {"gpu": (256, 8), "cpu": (64, 2)}  # tokens a row, rows a step
# Contexts that get a bucket of their own. A GPU's kernels read no more than there is; attention by
# XLA is as wide as it is compiled for.
LEAST_CONTEXT = {"gpu": 32768, "cpu": 1024}
# Dispatched steps not read yet when the next one is planned.
STEPS_IN_FLIGHT = {"resident": 1, "delayed": 1, "sync": 0}


class Engine:
    """Generates for any number of requests at once. Thread-safe; events come on its own thread.

    `params` are the model's, wherever they are, or what `load_model` has put in their places on the
    same `placement`. Raises ValueError if they do not fit, or do not divide among its devices.
    """

    def __init__(
        self,
        model: ModelConfig,
        params: Params,
        config: EngineConfig = EngineConfig(),
        speculation: SpeculationConfig = SpeculationConfig(),
        placement: Placement | None = None,
    ):
        self.model = model
        self.config = config
        self.speculation = speculation
        self.max_context = config.max_context or model.max_position_embeddings
        if self.max_context > model.max_position_embeddings:
            raise ValueError(
                f"max_context={self.max_context} is more than the model's "
                f"max_position_embeddings={model.max_position_embeddings}"
            )
        self.k = speculation.ks[0]
        placement = placement_of(config, placement)
        self._processes = Processes(placement.mesh)
        device = placement.mesh.local_devices[0]
        kv_model = divisible(model, placement.shards)
        platform = "cpu" if device.platform == "cpu" else "gpu"
        chunk, chunk_rows = PREFILL[platform]
        self._buckets = Buckets(
            max_batch=config.max_batch,
            max_context=self.max_context,
            k=self.k,
            chunk=config.prefill_chunk or chunk,
            prefill_rows=config.prefill_rows or chunk_rows,
            batch_buckets=config.batch_buckets,
            context_buckets=config.context_buckets,
            least_context=LEAST_CONTEXT[platform],
            phases=config.phases,
            ks=speculation.ks,
            delayed=config.overlap == "delayed",
        )
        self._verifier = HostVerifier(self._buckets, speculation.verification)
        dtype = params["embedding"].dtype
        weights = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
        self._drafting = Drafting(
            speculation,
            config,
            alone=not self._processes.several,
            weights=weights / model.kv_bytes_per_token(dtype),
        )
        # Weights first: the pool takes a share of what they leave.
        params = place_params(params, model, placement)
        width, part = self._buckets.width, shard_of(kv_model, placement.shards)
        scores = 0
        if platform == "gpu":
            scores = self._buckets.scores_bytes(part.num_layers, part.num_heads)
        sizes = kv_sizes(kv_model, config, width, dtype, placement, self._processes, scores)
        self._executor = Executor(
            model, params, config, speculation, self._buckets, sizes.slots, placement, *sizes[1:]
        )
        self._slots, self._kv_chunk, self._host_chunks = sizes
        self._limits = Limits(model.vocab_size, self.max_context, sizes.slots - 1, self.k)
        self._reset_host()

        entropy = secrets.randbits(64) if config.seed is None else config.seed
        self._entropy = self._processes.of_leader("entropy", entropy)
        self._unseeded = itertools.count()
        self._counters = StepCounters()
        self._intake = Intake(self._processes)
        self._failed = False
        self._thread: threading.Thread | None = None

    def _reset_host(self) -> None:
        self._space = KvSpace(self._slots, self._kv_chunk, self._host_chunks)
        kv = KvManager(self._space, self.config.kv_policy, self.k, CHUNKS_PER_STEP)
        self._kv_stats = kv.stats
        self._scheduler = Scheduler(self._buckets, kv, self.config.phases, self._drafting.rows)
        self._in_flight: deque[tuple[PlannedStep, jax.Array, Future[Verdict] | None]] = deque()
        self._live: dict[int, Request] = {}  # by number

    # What callers use.

    def submit(
        self,
        prompt: Sequence[int] | np.ndarray,
        params: SamplingParams,
        sink: Callable[[TokenEvent], None],
        *,
        seed: int | None = None,
        expected_tokens: int | None = None,
    ) -> Request:
        """Queue one completion of `prompt` (token ids).

        Args:
          sink: called with every event, on the engine's thread: it must be quick. One that raises
            is not called again.
          seed: overrides `params.seed`; `params.n` is the caller's business.
          expected_tokens: of output, for `kv_policy="conservative"` to reserve instead of the most
            there can be. No limit.

        Raises ValueError if the request can never run, RuntimeError if the engine is closed.
        """
        request_id = next(_REQUEST_IDS)
        if seed is None:
            seed = params.seed
        if seed is None:
            seed = sample_seed(self._entropy, next(self._unseeded))
        prompt = self._limits.check_prompt(prompt)
        validate_for_model(params, self.model.vocab_size)
        sampling = pack_row(params, seed, len(prompt), self.model.eos_token_ids)
        max_length = self._limits.max_length(len(prompt), params)
        expected = self._limits.expected_length(len(prompt), expected_tokens)
        request = Request(request_id, prompt, params, sampling, max_length, sink, expected)
        with self._intake.wake:
            self._intake.submit(request)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
                self._thread.start()
                atexit.register(self.close)  # a thread inside XLA at exit aborts the process
        return request

    def cancel(self, request: Request) -> None:
        """End a request early; its last event says `cancelled`, unless it has just ended."""
        self._intake.cancel(request)

    def close(self) -> None:
        """Cancel everything, stop the thread and free the device's memory. Idempotent."""
        self._intake.close()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        self._verifier.close()
        self._executor.release()
        atexit.unregister(self.close)

    def warmup(self, progress: Callable | None = None) -> None:
        """Compile the steps of ordinary traffic, before the first request, and run each once.

        `progress` wraps the list, as tqdm does. Of several processes none runs anything: the others
        might not do the same.
        """
        self._executor.warmup(self._buckets.main(), progress, run=not self._processes.several)

    def stats(self) -> EngineStats:
        return EngineStats(
            running=self._scheduler.running,
            waiting=self._scheduler.waiting + len(self._intake),
            parked=self._scheduler.parked,
            slots=self._space.capacity,
            slots_used=self._space.capacity - self._space.free,
            tokens_offloaded=self._space.away,
            kv=dataclasses.replace(self._kv_stats),
            dispatch=dataclasses.replace(self._executor.stats),
            **dataclasses.asdict(self._counters),
        )

    # The engine's thread.

    def _run(self) -> None:
        while not self._failed:
            try:
                arrived, orders = self._intake.take(self._busy(), self._drafting.choice)
                for request in arrived:
                    self._live[request.number] = request
                    self._scheduler.add(request)
                for number in list(self._live) if orders.closed else orders.cancelled:
                    if (request := self._live.get(number)) is not None:
                        self._scheduler.remove(request)
                        event = TokenEvent(request.request_id, (), finish_reason="cancelled")
                        self._send(request, event)
                if orders.closed:
                    return
                self._advance(orders)
            except Exception as error:
                self._fail(error)

    def _busy(self) -> bool:
        return bool(self._live or self._in_flight)

    def _advance(self, orders: Orders) -> None:
        """Dispatch one step, then read results until few enough are in flight."""
        if orders.choice is not None:
            self._scheduler.choice = Choice(*orders.choice)
        planned = self._scheduler.plan()
        if planned is not None:
            self._executor.compile(planned.bucket)  # before any process has gone on
            self._processes.compare(planned.bucket, planned.packed, planned.moves)
            self._executor.move(planned.moves)
            result = self._executor.dispatch(planned.bucket, planned.packed)
            delayed = self._buckets.delayed
            verdict = self._verifier.submit(planned, result) if delayed else None
            self._in_flight.append((planned, result, verdict))
            self._note(planned)
        else:
            self._executor.move(self._scheduler.take_moves())
            self._drafting.pause()
        keep = STEPS_IN_FLIGHT[self.config.overlap] if planned is not None else 0
        while len(self._in_flight) > keep:
            self._read(*self._in_flight.popleft())
            if planned is None:
                break  # something may have become possible

    def _note(self, planned: PlannedStep) -> None:
        self._counters.step_tokens += planned.tokens
        self._counters.step_queries += self._buckets.queries(planned.bucket)
        self._counters.steps_with_moves += bool(planned.moves)
        self._counters.stalled += planned.stalled
        now = time.monotonic()
        for request in planned.admitted:
            request.stats.admitted = now

    def _read(
        self, planned: PlannedStep, result: jax.Array, verdict: Future[Verdict] | None
    ) -> None:
        start = time.perf_counter()
        self._processes.wait_for(result)
        self._processes.note(result)
        if verdict is None:
            unpacked = self._buckets.result_layout(planned.bucket).unpack(np.asarray(result))
        else:
            unpacked = verdict.result().result
            if self._in_flight and not self._in_flight[-1][1].is_ready():
                self._counters.hidden_seconds += verdict.result().seconds
        self._counters.device_wait_seconds += time.perf_counter() - start
        self._drafting.note_step(planned, self._executor.stats.compiled)
        for emitting in planned.emitting:
            self._read_row(emitting, unpacked)

    def _read_row(self, emitting: Emitting, result: StepResult) -> None:
        entry, request = emitting.entry, emitting.row.request
        emitted, finish = int(result.emitted[entry]), int(result.finish[entry])
        if not self._scheduler.read(emitting, emitted, finish != RUNNING):
            return
        if self._buckets.delayed and finish == RUNNING:
            self._scheduler.commit(emitting.row, emitted, int(result.tokens[entry, emitted - 1]))
        stats = request.stats
        if emitted:
            stats.first_token = stats.first_token or time.monotonic()
            stats.output_tokens += emitted
            self._counters.output_tokens += emitted
        if emitted and emitting.n_drafts is not None:
            accepted = int(result.accepted[entry])
            if finish == RUNNING:
                self._drafting.note_cycle(emitting, accepted)
            stats.count_cycle(self.k, emitting.n_drafts, accepted, emitted, last=finish != RUNNING)
        event = token_event(request, result, entry)
        if event is not None:
            self._send(request, event)

    def _send(self, request: Request, event: TokenEvent) -> None:
        """Deliver an event. A sink that raises loses its request, and nobody else's."""
        if event.finish_reason is not None:
            request.stats.finished = time.monotonic()
            self._live.pop(request.number, None)
        try:
            request.sink(event)
        except Exception:
            logger.exception("the sink of request %d raised; it is dropped", request.request_id)
            self._live.pop(request.number, None)
            self._scheduler.remove(request)

    def _fail(self, error: Exception) -> None:
        """The step itself failed: every request ends with the error, and the engine starts over.

        One of several processes does not: their devices may have gone different ways.
        """
        logger.exception("the engine's step failed; %d requests end", len(self._live))
        failed = list(self._live.values())
        try:
            if self._processes.several:
                self._failed = True
                self._processes.fail(error)
            else:
                self._reset_host()
                self._executor.reset()
        except Exception as next_error:
            logger.exception("the engine could not start over and closes")
            self._failed = True
            error.add_note(f"starting over failed too: {next_error!r}")
        if self._failed:
            failed += self._intake.empty()
            self._live.clear()
        for request in failed:
            self._send(
                request,
                TokenEvent(request.request_id, (), finish_reason="error", error=error),
            )
