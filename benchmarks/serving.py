"""Throughput and latency of the whole engine under one workload, once for each setting.

    python -m benchmarks.serving --shape qwen3-8b --batch 128 --scale 0.08 \
        --settings balanced,conservative,recompute --json out.json
    python -m benchmarks.serving --shape qwen3-8b --batch 128 --window 8 \
        --settings balanced,random,lockstep,delayed,sync --json out.json

The workload is that of reasoning models on AIME problems: short prompts, and outputs of 13K tokens
on average (standard deviation 7.6K, 32K at most; a gamma distribution), times `--scale`, all there
from the start. An output's length is its end of sequence: the engine does not know it before, but
for the setting `oracle`. The KV pool is scaled with it (`--pool` tokens of one H200 at scale 1).

Such a run takes hours at scale 1. `--window SECONDS` measures so many seconds out of the middle of
one instead: the first `--batch` requests are found as a moment picks them, long ones more often,
each somewhere in its output, and their KV is said to be there (random numbers); the window opens
when they decode. What the pool has no room for waits, as it would.

Weights are random, and so would be acceptance: whether a draft is accepted is drawn instead, with
the probabilities of its place in the cycle that `--accepted` lists (those measured on
SmolLM2-135M-Instruct: 6.1 of 8). Nothing else of a step is made up.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.models import SHAPES, model_of, random_params
from benchmarks.profiling import copy_rates
from benchmarks.report import environment, write
from benchmarks.step_time import randomize
from sparsespec_jax.config import EngineConfig, SpeculationConfig
from sparsespec_jax.engine import emission, host_verification
from sparsespec_jax.engine.engine import Engine
from sparsespec_jax.engine.events import TokenEvent
from sparsespec_jax.kv.prefix import PrefixCache
from sparsespec_jax.kv.space import Evict, Restore
from sparsespec_jax.models.config import ModelConfig
from sparsespec_jax.models.parameters import Params
from sparsespec_jax.sampling.params import SamplingParams

SETTLED = 64  # steps without a prompt until a window opens
ACCEPTED = (0.98, 0.94, 0.87, 0.81, 0.74, 0.65, 0.60, 0.52)
SETTINGS: dict[str, dict] = {
    "balanced": {},
    "random": {"phases": "random"},
    "lockstep": {"phases": "lockstep"},
    "sync": {"overlap": "sync"},
    "delayed": {"overlap": "delayed"},
    "conservative": {"kv_policy": "conservative"},
    "recompute": {"kv_policy": "recompute"},
    "oracle": {"kv_policy": "conservative"},  # and the true lengths are told
    "no pressure": {"kv_cache_memory": None},
    "plain": {"method": "none"},
    "auto": {"k": "auto"},
}


@dataclasses.dataclass(frozen=True)
class Workload:
    """Prompt and output tokens of each request, and the output tokens that are there already."""

    prompts: np.ndarray
    outputs: np.ndarray
    done: np.ndarray
    longest: int

    @classmethod
    def aime(cls, count: int, scale: float, midway: int = 0) -> Workload:
        """`midway`: requests that are running, the first ones."""
        rng = np.random.default_rng(0)
        mean, std, longest = 13_000 * scale, 7_600 * scale, int(32_768 * scale)
        shape = (mean / std) ** 2
        outputs = rng.gamma(shape, mean / shape, count).clip(8, longest).astype(int)
        done = np.zeros(count, int)
        if midway:
            many = rng.gamma(shape, mean / shape, 8 * midway).clip(8, longest)
            outputs[:midway] = rng.choice(many, midway, p=many / many.sum())
            done[:midway] = rng.random(midway) * outputs[:midway]
        return cls(rng.integers(80, 240, count), outputs, done, longest)


def draw_acceptance(probabilities: tuple[float, ...]) -> None:
    """From now on drafts are accepted at random: by a hash of the target's tokens, anywhere."""

    def accepted(xp, drafts, n_drafts, sampled):
        words = sampled.astype(xp.uint32).sum(1, dtype=xp.uint32) * xp.uint32(2654435761)
        u = ((words ^ (words >> 15)) * xp.uint32(2246822519) >> 8).astype(xp.float32) / 2**24
        places = xp.arange(drafts.shape[1])
        thresholds = xp.asarray(probabilities, xp.float32)[: drafts.shape[1]]
        found = (u[:, None] < thresholds) & (places < n_drafts[:, None])
        return found.sum(1, dtype=xp.int32)

    emission.accept_coupled = lambda drafts, n, sampled: (
        accepted(jnp, drafts, n, sampled),
        sampled,
    )
    host_verification.accept_coupled = functools.partial(accepted, np)


class Step(NamedTuple):
    """What is known of a step when it is planned, and host seconds to dispatch it."""

    at: float
    tokens: int
    evicts: int
    restores: int
    chunks: int
    moving: float
    dispatching: float


class Recorder:
    """Every step that an engine dispatches; the pool's use a few times a second."""

    def __init__(self, engine: Engine):
        self.steps: list[Step] = []
        self.pool: list[tuple[float, int, int, int, int]] = []
        self._engine, self._start = engine, time.perf_counter()
        plan = engine._scheduler.plan
        move, dispatch = engine._executor.move, engine._executor.dispatch
        now = time.perf_counter

        def planned():
            step, self._step = plan(), None
            if step is not None:
                kinds = [type(move) for move in step.moves]
                counts = kinds.count(Evict), kinds.count(Restore), step.bucket.chunks
                self._step = Step(now(), step.tokens, *counts, 0, 0)
            return step

        def moved(moves):
            start = now()
            move(moves)
            self._moving = now() - start

        def dispatched(*args):
            start = now()
            result = dispatch(*args)
            self.steps.append(self._step._replace(moving=self._moving, dispatching=now() - start))
            return result

        engine._scheduler.plan = planned
        engine._executor.move, engine._executor.dispatch = moved, dispatched

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
        steps = Step(*np.array([s for s in self.steps if start <= s.at < end]).T)
        seconds = np.diff(steps.at)
        decoding, moves = steps.chunks[:-1] == 0, (steps.evicts + steps.restores)[:-1] > 0
        full = steps.tokens[:-1][decoding]

        def ms(values, mask) -> float | None:
            return round(1e3 * float(np.median(values[mask])), 3) if mask.any() else None

        evicts, restores = steps.evicts[:-1] > 0, steps.restores[:-1] > 0
        return {
            "steps": len(steps.at),
            "tokens_per_step_mean": round(float(full.mean()), 1),
            "tokens_per_step_std": round(float(full.std()), 1),
            "step_ms_without_moves": ms(seconds, decoding & ~moves),
            "step_ms_with_moves": ms(seconds, decoding & moves),
            "step_ms_with_evicts_only": ms(seconds, decoding & evicts & ~restores),
            "step_ms_with_restores_only": ms(seconds, decoding & restores & ~evicts),
            "step_ms_mean": round(1e3 * float(seconds[decoding].mean()), 3),
            "step_ms_mean_without_moves": round(1e3 * float(seconds[decoding & ~moves].mean()), 3),
            "step_ms_p99": round(1e3 * float(np.percentile(seconds[decoding], 99)), 3),
            "moving_ms": ms(steps.moving[:-1], decoding & moves),
            "dispatch_ms": ms(steps.dispatching, steps.chunks == 0),
            "steps_with_moves": int(moves.sum()),
            "chunks_out_and_back": [int(steps.evicts.sum()), int(steps.restores.sum())],
        }


def start_midway(engine: Engine, prompts: set[bytes]) -> None:
    """The KV of these prompts counts as computed; the pool holds random numbers."""
    kv = engine._scheduler._kv
    acquire = kv._acquire

    def computed(key: bytes, length: int):
        prefix = acquire(key, length)
        prefix.ready |= key in prompts
        return prefix

    kv._acquire = computed
    engine._executor.transform(lambda pools, state: (randomize(pools), state))


class Copies:
    """Rates of the copies of KV in a running engine, and of bare ones: GB/s, medians."""

    def __init__(self, engine: Engine):
        self._rates: dict[str, list[float]] = {"out": [], "back": []}
        self._watcher = ThreadPoolExecutor(1)
        self._offload = offload = engine._executor._offload
        to_host, unpack = offload._to_host, offload._unpack

        def timed_to_host(packed):
            jax.block_until_ready(packed)
            with self._timed("out", packed.nbytes):
                return to_host(packed)

        def watched_unpack(pools, packed, slots):
            self._watcher.submit(self._arrival, packed, time.perf_counter())
            return unpack(pools, packed, slots)

        offload._to_host, offload._unpack = timed_to_host, watched_unpack

    @contextlib.contextmanager
    def _timed(self, name: str, size: int):
        start = time.perf_counter()
        yield
        self._rates[name].append(size / (time.perf_counter() - start) / 1e9)

    def _arrival(self, packed: tuple[jax.Array, ...], start: float) -> None:
        jax.block_until_ready(packed)
        size = sum(chunk.nbytes for chunk in packed)
        self._rates["back"].append(size / (time.perf_counter() - start) / 1e9)

    def summary(self, shape: tuple[int, ...], dtype: jnp.dtype) -> dict:
        """`shape`, `dtype`: of a chunk, for the bare copies: one at a time, on an idle GPU."""
        self._watcher.shutdown()
        chunk = jax.device_put(jnp.ones(shape, dtype), self._offload._on_device)
        bare: dict[str, list[float]] = {"out": [], "back": []}
        for _ in range(9):
            there = self._bare(bare["out"], chunk, self._offload._on_host)
            self._bare(bare["back"], there, self._offload._on_device)
        return {
            "copied_gb_s": {name: _median(rates) for name, rates in self._rates.items()},
            "bare_copy_gb_s": {name: _median(rates) for name, rates in bare.items()},
        }

    @staticmethod
    def _bare(rates: list[float], array: jax.Array, to: jax.sharding.Sharding) -> jax.Array:
        start = time.perf_counter()
        there = jax.block_until_ready(jax.device_put(array, to))
        rates.append(array.nbytes / (time.perf_counter() - start) / 1e9)
        return there


def _median(rates: list[float]) -> float | None:
    return round(float(np.median(rates)), 1) if rates else None


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


def measure(
    name: str,
    args: argparse.Namespace,
    model: ModelConfig,
    params: Params,
    workload: Workload,
) -> dict:
    changes = dict(SETTINGS[name])
    speculation = SpeculationConfig(
        method=changes.pop("method", "pillar"),
        k=changes.pop("k", args.k),
        min_budget=args.min_budget,
    )
    width = workload.longest + 256
    token_bytes = model.kv_bytes_per_token(params["embedding"].dtype)
    settings = dict(
        max_batch=args.batch,
        max_context=width,
        batch_buckets=args.batch_buckets,
        context_buckets=(width + 2 * speculation.ks[0] + 256,),
        kv_cache_memory=int(args.pool * args.scale) * token_bytes,
        max_host_kv_bytes=int(args.host_gib * 2**30),
        seed=0,
        compilation_cache_dir=args.compilation_cache,
    )
    engine = Engine(model, params, EngineConfig(**settings | changes), speculation)
    start = time.perf_counter()
    engine.warmup()
    warmup_seconds = time.perf_counter() - start
    progress, rng = Progress(len(workload.prompts)), np.random.default_rng(1)
    recorder, copies = Recorder(engine), Copies(engine)
    watcher = threading.Thread(target=recorder.watch, args=(progress.done,))
    prompts = [
        rng.integers(0, model.vocab_size, count) for count in workload.prompts + workload.done
    ]
    if args.window:
        start_midway(engine, {PrefixCache.key(prompt) for prompt in prompts[: args.batch]})

    requests = []
    start = time.perf_counter()
    for prompt, left in zip(prompts, (workload.outputs - workload.done).tolist(), strict=True):
        request = engine.submit(
            prompt,
            SamplingParams(temperature=0.65, max_tokens=left, ignore_eos=True),
            progress,
            expected_tokens=left if name == "oracle" else workload.longest,
        )
        requests.append(request)
    watcher.start()
    if args.window:
        while not (recorder.decoding() or progress.done.wait(0.1)):
            if time.perf_counter() - start > args.timeout:
                raise TimeoutError(f"{name}: no steady state after {args.timeout} s")
        start = time.perf_counter()
    before = engine.stats()
    finished = progress.done.wait(args.window or args.timeout)
    end, after = time.perf_counter(), engine.stats()
    if args.trace:
        with jax.profiler.trace(str(args.trace / name)):
            progress.done.wait(args.trace_seconds)
    progress.done.set()
    watcher.join()
    engine.close()
    if progress.failed or finished == bool(args.window):
        message = f"{name}: {progress.left} requests left after {end - start:.0f} s"
        raise RuntimeError(message) from next(iter(progress.failed), None)

    tokens, each = progress.between(start, end)
    per_request = [request.stats for request in requests]
    if not args.window:
        each = [s.time_per_output_token or 0 for s in per_request]
    first = [1e3 * s.time_to_first_token for s in per_request if s.time_to_first_token]
    full = sum(s.full_cycles for s in per_request)
    full_batch = start + (end - start) * (1 if args.window else 0.5)  # later, few are left
    kv = {
        field: value - getattr(before.kv, field)
        for field, value in dataclasses.asdict(after.kv).items()
    }
    counted = after.step_queries - before.step_queries
    return {
        "benchmark": "serving",
        "setting": name,
        **{
            key: value
            for key, value in vars(args).items()
            if key not in ("json", "settings", "trace")
        },
        "pool_tokens": after.slots,
        "warmup_seconds": round(warmup_seconds, 1),
        "requests": len(requests),
        "running": after.running,
        "seconds": round(end - start, 2),
        "output_tokens": tokens,
        "tokens_per_second": round(tokens / (end - start), 1),
        "mean_accepted": round(sum(s.full_accepted for s in per_request) / full, 3)
        if full and speculation.method != "none"
        else None,
        **recorder.summary(start, full_batch),
        "device_wait_seconds": round(after.device_wait_seconds - before.device_wait_seconds, 2),
        "hidden_seconds": round(after.hidden_seconds - before.hidden_seconds, 2),
        "ttft_ms_p50_p99": percentiles(first, 1),
        "tpot_ms_p50_p99": percentiles(1e3 * np.array(each), 3),
        "kv": kv,
        **({"traced_copies_gb_s": copy_rates(args.trace / name)} if args.trace else {}),
        **copies.summary(
            (model.num_layers, 2, engine._kv_chunk, model.num_kv_heads, model.head_dim),
            params["embedding"].dtype,
        ),
        "stalled": after.stalled - before.stalled,
        "padding": round(1 - (after.step_tokens - before.step_tokens) / counted, 3),
        "pool_use": recorder.pool,
        **environment(),
    }


def percentiles(values: Sequence[float], digits: int) -> list[float]:
    return [round(float(x), digits) for x in np.percentile(values, [50, 99])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-8b")
    parser.add_argument("--settings", default="balanced,lockstep", help=", ".join(SETTINGS))
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--batch-buckets", type=int, nargs="+", help="default: the engine's")
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--scale", type=float, default=0.125)
    parser.add_argument("--pool", type=int, default=700_000, help="tokens of the pool at scale 1")
    parser.add_argument("--host-gib", type=float, default=32)
    parser.add_argument("--k", type=int, default=8)
    parser.add_argument("--min-budget", type=int, default=128)
    parser.add_argument("--accepted", type=float, nargs="+", default=ACCEPTED)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--window", type=float, default=0, help="seconds; 0: the whole workload")
    parser.add_argument("--trace", type=Path, help="trace copies behind the window, into this")
    parser.add_argument("--trace-seconds", type=float, default=2)
    parser.add_argument("--timeout", type=float, default=300)
    parser.add_argument("--compilation-cache")
    parser.add_argument("--json", type=Path, help="append the results to this file")
    args = parser.parse_args()
    names = args.settings.split(",")
    if unknown := set(names) - set(SETTINGS):
        parser.error(f"--settings: {', '.join(sorted(unknown))}: not among {', '.join(SETTINGS)}")
    workload = Workload.aime(args.requests, args.scale, args.batch if args.window else 0)
    model = model_of(args.shape, workload.longest + 256)
    params = random_params(model, jnp.dtype(args.dtype))
    jax.block_until_ready(params)
    draw_acceptance(tuple(args.accepted))
    for name in names:
        write(measure(name, args, model, params, workload), args.json)


if __name__ == "__main__":
    main()
