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
`--settle` seconds after all of them decode (`auto` has tried what there is to try by then). What
the pool has no room for waits, as it would.

Weights are random, and so would be acceptance: whether a draft is accepted is drawn instead, with
the probabilities of its place in the cycle that `--accepted` lists (those measured on
SmolLM2-135M-Instruct: 6.1 of 8). Nothing else of a step is made up.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.models import SHAPES, model_of, random_params
from benchmarks.report import environment, write
from benchmarks.step_time import randomize
from benchmarks.watching import Copies, Progress, Recorder
from benchmarks.workload import ACCEPTED, Workload, draw_acceptance
from sparsespec_jax.config import EngineConfig, SpeculationConfig
from sparsespec_jax.engine.engine import Engine
from sparsespec_jax.kv.prefix import PrefixCache
from sparsespec_jax.models.config import ModelConfig
from sparsespec_jax.models.parameters import Params
from sparsespec_jax.sampling.params import SamplingParams

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
    "k=4": {"k": 4},
    "k=2": {"k": 2},
    "auto": {"k": "auto"},
    "auto, sparsity too": {"k": "auto", "sparsity": "auto"},
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
        sparsity=changes.pop("sparsity", 0.05),
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
    recorder = Recorder(engine)
    chunk = model.num_layers, 2, engine._kv_chunk, model.num_kv_heads, model.head_dim
    copies = Copies(engine, chunk, params["embedding"].dtype) if args.copies else None
    copied = {"idle": copies.rates()} if copies else {}
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
        progress.done.wait(args.settle)
        start = time.perf_counter()
    before = engine.stats()
    finished = progress.done.wait(args.window or args.timeout)
    end, after = time.perf_counter(), engine.stats()
    if copies and not finished:
        copied["running"] = copies.rates()
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
        **{key: value for key, value in vars(args).items() if key not in ("json", "settings")},
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
        "copies_gb_s": copied,
        "stalled": after.stalled - before.stalled,
        "padding": round(1 - (after.step_tokens - before.step_tokens) / counted, 3),
        "pool_use": recorder.pool,
        **environment(),
    }


def percentiles(values: Sequence[float], digits: int) -> list[float]:
    if len(values) == 0:  # no request lasted as long as the window
        return []
    return [round(float(x), digits) for x in np.percentile(values, [50, 99])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-8b")
    parser.add_argument("--settings", default="balanced,lockstep", help="; ".join(SETTINGS))
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
    parser.add_argument("--settle", type=float, default=0, help="seconds until the window opens")
    parser.add_argument("--copies", action="store_true", help="time copies, too, after a window")
    parser.add_argument("--timeout", type=float, default=300)
    parser.add_argument("--compilation-cache")
    parser.add_argument("--json", type=Path, help="append the results to this file")
    args = parser.parse_args()
    names = re.split(r",(?! )", args.settings)
    if unknown := set(names) - set(SETTINGS):
        parser.error(f"--settings: {'; '.join(sorted(unknown))}: not among {'; '.join(SETTINGS)}")
    workload = Workload.aime(args.requests, args.scale, args.batch if args.window else 0)
    model = model_of(args.shape, workload.longest + 256)
    params = random_params(model, jnp.dtype(args.dtype))
    jax.block_until_ready(params)
    draw_acceptance(tuple(args.accepted))
    for name in names:
        write(measure(name, args, model, params, workload), args.json)


if __name__ == "__main__":
    main()
