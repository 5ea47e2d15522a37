"""What an engine does while it serves: its steps, its copies of KV, what requests get when."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter, defaultdict, deque
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from sparsespec_jax.engine.engine import Engine
from sparsespec_jax.engine.events import TokenEvent
from sparsespec_jax.kv.space import Evict, Restore

SETTLED = 64  # steps without a prompt until a window opens


class Step(NamedTuple):
    """at: when its result was read. seconds: since the result before, if steps followed each other.

    k: drafts of cycles that started then. moving, dispatching: host seconds of that.
    """

    at: float
    seconds: float
    tokens: int
    evicts: int
    restores: int
    chunks: int
    k: int
    moving: float
    dispatching: float


class Recorder:
    """Every step that an engine runs; the pool's use a few times a second."""

    def __init__(self, engine: Engine):
        self.steps: list[Step] = []
        self.pool: list[tuple[float, int, int, int, int]] = []
        self._engine, self._start = engine, time.perf_counter()
        self._host_seconds: deque[tuple[float, float]] = deque()  # of the steps in flight
        self._last = math.nan
        move, dispatch = engine._executor.move, engine._executor.dispatch
        note, pause = engine._drafting.note_step, engine._drafting.pause
        now = time.perf_counter

        def moved(moves):
            start = now()
            move(moves)
            self._moving = now() - start

        def dispatched(*args):
            start = now()
            result = dispatch(*args)
            self._host_seconds.append((self._moving, now() - start))
            return result

        def noted(planned, compiled):  # right after the result has been read
            at = now()
            kinds = [type(move) for move in planned.moves]
            moves, chunks = (kinds.count(Evict), kinds.count(Restore)), planned.bucket.chunks
            what = planned.tokens, *moves, chunks, planned.choice.k
            self.steps.append(Step(at, at - self._last, *what, *self._host_seconds.popleft()))
            self._last = at
            note(planned, compiled)

        def paused():
            self._last = math.nan
            pause()

        engine._executor.move, engine._executor.dispatch = moved, dispatched
        engine._drafting.note_step, engine._drafting.pause = noted, paused

    def watch(self, done: threading.Event) -> None:
        while not done.wait(0.25):
            stats = self._engine.stats()
            seconds = time.perf_counter() - self._start
            row = stats.slots_used, stats.tokens_offloaded, stats.running, stats.parked
            self.pool.append((round(seconds, 2), *row))

    def decoding(self) -> bool:
        """Whether all that runs decodes, for a while now."""
        return len(self.steps) > SETTLED and not any(s.chunks for s in self.steps[-SETTLED:])

    def summary(self, start: float, end: float) -> dict:
        """Of the steps between two times."""
        lasting = [s for s in self.steps if start <= s.at < end and not math.isnan(s.seconds)]
        steps = Step(*np.array(lasting).T)
        decoding, moves = steps.chunks == 0, steps.evicts + steps.restores > 0
        full = steps.tokens[decoding]

        def ms(values, mask, of=np.median) -> float | None:
            return round(1e3 * float(of(values[mask])), 3) if mask.any() else None

        seconds, evicts, restores = steps.seconds, steps.evicts > 0, steps.restores > 0
        by_k = {int(k): decoding & (steps.k == k) for k in np.unique(steps.k)}
        by_k = {k: [int(mask.sum()), ms(seconds, mask)] for k, mask in by_k.items()}
        return {
            "steps": len(lasting),
            "tokens_per_step_mean": round(float(full.mean()), 1),
            "tokens_per_step_std": round(float(full.std()), 1),
            "step_ms_without_moves": ms(seconds, decoding & ~moves),
            "step_ms_with_moves": ms(seconds, decoding & moves),
            "step_ms_with_evicts_only": ms(seconds, decoding & evicts & ~restores),
            "step_ms_with_restores_only": ms(seconds, decoding & restores & ~evicts),
            "step_ms_with_prompts": ms(seconds, ~decoding),
            "step_ms_mean": ms(seconds, decoding, np.mean),
            "step_ms_mean_without_moves": ms(seconds, decoding & ~moves, np.mean),
            "step_ms_mean_with_moves": ms(seconds, decoding & moves, np.mean),
            "step_ms_p99": round(1e3 * float(np.percentile(seconds[decoding], 99)), 3),
            "moving_ms": ms(steps.moving, decoding & moves),
            "dispatch_ms": ms(steps.dispatching, decoding),
            "steps_with_moves": int((decoding & moves).sum()),
            "steps_with_prompts": int((~decoding).sum()),
            "chunks_out_and_back": [int(steps.evicts.sum()), int(steps.restores.sum())],
            "steps_and_ms_by_k": by_k,
        }


class Copies:
    """How fast chunks of KV are copied to the host and back, whatever else goes on.

    By the calls of `KvOffload`, whose own copies are too few at a time for a clock of the host. A
    copy to the host waits for the steps that were enqueued before it: the difference between many
    chunks and a few shows the rate, and what the few took beyond that is the wait.
    """

    _FEW, _MANY, _TIMES = 16, 48, 5

    def __init__(self, engine: Engine, shape: tuple[int, ...], dtype: jnp.dtype):
        """`shape`, `dtype`: of a chunk."""
        offload = engine._executor._offload
        self._places = {"out": offload._on_host, "back": offload._on_device}
        make = jax.jit(lambda: jnp.ones(shape, dtype), out_shardings=offload._on_device)
        self._chunks = [make() for _ in range(self._MANY)]
        self.rates()  # allocates the memory there

    def rates(self) -> dict[str, float]:
        """GB/s, and milliseconds of waiting, each way; of medians."""
        seconds: dict[tuple[str, int], list[float]] = defaultdict(list)
        for _ in range(self._TIMES):
            for count in (self._FEW, self._MANY):
                chunks = jax.block_until_ready(self._chunks[:count])
                for way, place in self._places.items():
                    start = time.perf_counter()
                    chunks = jax.block_until_ready(jax.device_put(chunks, place))
                    seconds[way, count].append(time.perf_counter() - start)
        found = {}
        for way in self._places:
            few, many = (float(np.median(seconds[way, n])) for n in (self._FEW, self._MANY))
            rate = (self._MANY - self._FEW) * self._chunks[0].nbytes / (many - few)
            found[way] = round(rate / 1e9, 1)
            found[f"{way}_wait_ms"] = round(1e3 * (few - self._FEW * chunks[0].nbytes / rate), 2)
        return found


class Progress:
    """What requests have emitted, and when; how many are left."""

    def __init__(self, count: int):
        self.left, self.done, self.failed = count, threading.Event(), []
        self.tokens: list[tuple[float, int, int]] = []  # time, request, how many
        self.ended: dict[int, float] = {}

    def __call__(self, event: TokenEvent) -> None:
        self.tokens.append((time.perf_counter(), event.request_id, len(event.tokens)))
        if event.error is not None:
            self.failed.append(event.error)
        if event.finish_reason is not None:
            self.ended[event.request_id] = time.perf_counter()
            self.left -= 1
        if self.failed or not self.left:
            self.done.set()

    def between(self, start: float, end: float) -> tuple[int, list[float]]:
        """Tokens emitted, and seconds a token of each request that ran all the time."""
        counts: Counter[int] = Counter()
        before = {request for at, request, _ in self.tokens if at < start}
        for at, request, count in self.tokens:
            if start <= at < end:
                counts[request] += count
        lasting = [r for r in counts if r in before and self.ended.get(r, end) >= end]
        return counts.total(), [(end - start) / counts[request] for request in lasting]
