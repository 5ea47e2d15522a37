"""Throughput and latency of the whole engine under one workload, once for each setting.

    python -m benchmarks.serving --shape qwen3-8b --batch 128 --scale 0.125 \
        --settings balanced,lockstep,sync,conservative,recompute --json out.json

The workload is that of reasoning models on AIME problems: short prompts, and outputs of 13K tokens
on average (standard deviation 7.6K, 32K at most; a gamma distribution), times `--scale`, all there
from the start. An output's length is its end of sequence: the engine does not know it before, but
for the setting `oracle`. The KV pool is scaled with it (`--pool` tokens of one H200 at scale 1).

Weights are random, and so would be acceptance: whether a draft is accepted is drawn instead, with
the probabilities of its place in the cycle that `--accepted` lists (those measured on
SmolLM2-135M-Instruct: 6.1 of 8). Nothing else of a step is made up.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.models import SHAPES, model_of, random_params
from benchmarks.report import environment, write
from sparsespec_jax.config import EngineConfig, SpeculationConfig
from sparsespec_jax.engine import emission, host_verification
from sparsespec_jax.engine.engine import Engine
from sparsespec_jax.models.config import ModelConfig
from sparsespec_jax.models.parameters import Params
from sparsespec_jax.sampling.params import SamplingParams

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
}


@dataclasses.dataclass(frozen=True)
class Workload:
    """Prompt and output tokens of each request."""

    prompts: np.ndarray
    outputs: np.ndarray
    longest: int

    @classmethod
    def aime(cls, count: int, scale: float) -> Workload:
        rng = np.random.default_rng(0)
        mean, std, longest = 13_000 * scale, 7_600 * scale, int(32_768 * scale)
        shape = (mean / std) ** 2
        outputs = rng.gamma(shape, mean / shape, count).clip(8, longest).astype(int)
        return cls(rng.integers(80, 240, count), outputs, longest)


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


class Recorder:
    """Every step's dispatch time, tokens and moves; the pool's use a few times a second."""

    def __init__(self, engine: Engine):
        self.steps: list[tuple[float, int, int, int]] = []
        self.pool: list[tuple[float, int, int, int, int]] = []
        self._engine, self._start = engine, time.perf_counter()
        plan = engine._scheduler.plan

        def recorded():
            planned = plan()
            if planned is not None:
                moves, chunks = len(planned.moves), planned.bucket.chunks
                self.steps.append((time.perf_counter(), planned.tokens, moves, chunks))
            return planned

        engine._scheduler.plan = recorded

    def watch(self, done: threading.Event) -> None:
        while not done.wait(0.25):
            stats = self._engine.stats()
            seconds = time.perf_counter() - self._start
            row = stats.slots_used, stats.tokens_offloaded, stats.running, stats.parked
            self.pool.append((round(seconds, 2), *row))

    def summary(self) -> dict:
        at, tokens, moves, chunks = (np.array(column) for column in zip(*self.steps, strict=True))
        seconds, moves = np.diff(at), moves[:-1] > 0
        decoding = chunks[:-1] == 0
        full = tokens[:-1][decoding]
        half = full[: len(full) // 2]  # the batch is full until the last requests run out

        def ms(mask) -> float | None:
            return round(1e3 * float(np.median(seconds[mask])), 3) if mask.any() else None

        return {
            "steps": len(at),
            "tokens_per_step_mean": round(float(half.mean()), 1),
            "tokens_per_step_std": round(float(half.std()), 1),
            "step_ms_without_moves": ms(decoding & ~moves),
            "step_ms_with_moves": ms(decoding & moves),
            "steps_with_moves": int(moves.sum()),
        }


def measure(
    name: str,
    args: argparse.Namespace,
    model: ModelConfig,
    params: Params,
    workload: Workload,
) -> dict:
    changes = dict(SETTINGS[name])
    method = changes.pop("method", "pillar")
    width = workload.longest + 256
    token_bytes = model.kv_bytes_per_token(params["embedding"].dtype)
    settings = dict(
        max_batch=args.batch,
        max_context=width,
        batch_buckets=(args.batch,),
        context_buckets=(width + 2 * args.k + 256,),
        kv_cache_memory=int(args.pool * args.scale) * token_bytes,
        max_host_kv_bytes=int(args.host_gib * 2**30),
        seed=0,
        compilation_cache_dir=args.compilation_cache,
    )
    config = EngineConfig(**settings | changes)
    speculation = SpeculationConfig(method=method, k=args.k, min_budget=args.min_budget)
    engine = Engine(model, params, config, speculation)
    start = time.perf_counter()
    engine.warmup()
    warmup_seconds = time.perf_counter() - start
    recorder, done, left = Recorder(engine), threading.Event(), len(workload.prompts)
    failed: list[Exception] = []

    def sink(event):
        nonlocal left
        if event.error is not None:
            failed.append(event.error)
        if event.finish_reason is not None:
            left -= 1
            if not left:
                done.set()

    rng, requests = np.random.default_rng(1), []
    start = time.perf_counter()
    for prompt, output in zip(workload.prompts, workload.outputs.tolist(), strict=True):
        request = engine.submit(
            rng.integers(0, model.vocab_size, prompt),
            SamplingParams(temperature=0.65, max_tokens=output, ignore_eos=True),
            sink,
            expected_tokens=output if name == "oracle" else workload.longest,
        )
        requests.append(request)
    watcher = threading.Thread(target=recorder.watch, args=(done,))
    watcher.start()
    finished = done.wait(args.timeout)
    seconds = time.perf_counter() - start
    done.set()
    watcher.join()
    stats = engine.stats()
    engine.close()
    if failed or not finished:
        raise RuntimeError(f"{name}: {left} requests left after {seconds:.0f} s") from next(
            iter(failed), None
        )
    per_request = [request.stats for request in requests]
    first = [1e3 * s.time_to_first_token for s in per_request]
    each = [1e3 * (s.time_per_output_token or 0) for s in per_request]
    full = sum(s.full_cycles for s in per_request)
    return {
        "benchmark": "serving",
        "setting": name,
        **{key: value for key, value in vars(args).items() if key not in ("json", "settings")},
        "warmup_seconds": round(warmup_seconds, 1),
        "requests": len(requests),
        "seconds": round(seconds, 2),
        "output_tokens": stats.output_tokens,
        "tokens_per_second": round(stats.output_tokens / seconds, 1),
        "mean_accepted": round(sum(s.full_accepted for s in per_request) / full, 3)
        if full and method != "none"
        else None,
        **recorder.summary(),
        "device_wait_seconds": round(stats.device_wait_seconds, 2),
        "dispatch_seconds": round(stats.dispatch.dispatch_seconds, 2),
        "ttft_ms_p50_p99": [round(float(x), 1) for x in np.percentile(first, [50, 99])],
        "tpot_ms_p50_p99": [round(float(x), 3) for x in np.percentile(each, [50, 99])],
        "kv": dataclasses.asdict(stats.kv),
        "stalled": stats.stalled,
        "padding": round(1 - stats.step_tokens / stats.step_queries, 3),
        "slots": stats.slots,
        "pool": recorder.pool,
        **environment(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-8b")
    parser.add_argument("--settings", default="balanced,lockstep", help=", ".join(SETTINGS))
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--scale", type=float, default=0.125)
    parser.add_argument("--pool", type=int, default=700_000, help="tokens of the pool at scale 1")
    parser.add_argument("--host-gib", type=float, default=32)
    parser.add_argument("--k", type=int, default=8)
    parser.add_argument("--min-budget", type=int, default=128)
    parser.add_argument("--accepted", type=float, nargs="+", default=ACCEPTED)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--timeout", type=float, default=300)
    parser.add_argument("--compilation-cache")
    parser.add_argument("--json", type=Path, help="append the results to this file")
    args = parser.parse_args()
    names = args.settings.split(",")
    if unknown := set(names) - set(SETTINGS):
        parser.error(f"--settings: {', '.join(sorted(unknown))}: not among {', '.join(SETTINGS)}")
    workload = Workload.aime(args.requests, args.scale)
    model = model_of(args.shape, workload.longest + 256)
    params = random_params(model, jnp.dtype(args.dtype))
    jax.block_until_ready(params)
    draw_acceptance(tuple(args.accepted))
    for name in names:
        write(measure(name, args, model, params, workload), args.json)


if __name__ == "__main__":
    main()
