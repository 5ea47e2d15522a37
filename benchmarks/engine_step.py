"""Step time of the engine at a real model's shapes, with random weights.

    python -m benchmarks.engine_step --shape qwen3-8b --batch 64 --context 8192 --json out.json

Every request has its own random prompt of about `--context` tokens. Once all of them decode, steps
are timed over a window: wall time a step, host time to dispatch one, and time the host then waits
for the device (a host that never waits is the bottleneck). Acceptance on random weights means
nothing, and no throughput is derived from it.
"""

from __future__ import annotations

import argparse
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.models import SHAPES, model_of, random_params
from benchmarks.profiling import kernel_times
from benchmarks.report import environment, peak_memory_gib, write
from sparsespec_jax.config import EngineConfig, SpeculationConfig
from sparsespec_jax.engine.engine import Engine
from sparsespec_jax.sampling.params import SamplingParams


def measure(args: argparse.Namespace) -> dict:
    width = args.context + args.new_tokens
    model = model_of(args.shape, width)
    dtype = jnp.dtype(args.dtype)
    config = EngineConfig(
        max_batch=args.batch,
        max_context=width,
        prefill_chunk=args.prefill_chunk,
        prefill_rows=args.prefill_rows,
        overlap=args.overlap,
        implementation=args.implementation,
        batch_buckets=(args.batch,),
        context_buckets=(width + 2 * args.k + 256,),
        kv_cache_memory=args.kv_cache_memory,
        seed=0,
    )
    speculation = SpeculationConfig(
        method=args.method, k=args.k, sparsity=args.sparsity, score_rule=args.score_rule
    )
    engine = Engine(model, random_params(model, dtype), config, speculation)
    start = time.perf_counter()
    engine.warmup()
    compile_seconds = time.perf_counter() - start

    rng, decoding, all_decoding = np.random.default_rng(0), set(), threading.Event()

    def sink(event):
        if event.error is not None:
            raise event.error
        decoding.add(event.request_id)
        if len(decoding) == args.batch:
            all_decoding.set()

    params = SamplingParams(
        temperature=args.temperature, max_tokens=args.new_tokens, ignore_eos=True
    )
    start = time.perf_counter()
    for _ in range(args.batch):
        length = args.context - int(rng.integers(0, 64))
        engine.submit(rng.integers(0, model.vocab_size, length), params, sink)
    if not all_decoding.wait(timeout=args.timeout):
        raise TimeoutError(f"only {len(decoding)} requests decode after {args.timeout} s")
    prefill_seconds = time.perf_counter() - start

    time.sleep(args.settle)
    before, start = engine.stats(), time.perf_counter()
    time.sleep(args.seconds)
    after, seconds = engine.stats(), time.perf_counter() - start
    if after.running < args.batch:
        raise RuntimeError("requests finished inside the window: raise --new-tokens")
    kernels = profile(engine, args.profile) if args.profile else None
    memory = peak_memory_gib()
    engine.close()
    steps = after.dispatch.steps - before.dispatch.steps
    dispatch = after.dispatch.dispatch_seconds - before.dispatch.dispatch_seconds
    waiting = after.device_wait_seconds - before.device_wait_seconds
    return {
        "benchmark": "engine_step",
        **{key: value for key, value in vars(args).items() if key not in ("json", "profile")},
        "steps": steps,
        "step_ms": 1e3 * seconds / steps,
        "dispatch_ms": 1e3 * dispatch / steps,
        "device_wait_ms": 1e3 * waiting / steps,
        "hidden_ms": 1e3 * (after.hidden_seconds - before.hidden_seconds) / steps,
        "tokens_per_step": (after.step_tokens - before.step_tokens) / steps,
        "prefill_seconds": prefill_seconds,
        "compile_seconds": compile_seconds,
        **({"kernels_us": kernels} if kernels else {}),
        "peak_memory_gib": memory,
        **environment(),
    }


def profile(engine: Engine, directory: Path) -> dict[str, float]:
    """`kernel_times` of a third of a second, and as `wall` the time of a step meanwhile."""
    with jax.profiler.trace(str(directory)):
        before, start = engine.stats().dispatch.steps, time.perf_counter()
        time.sleep(0.3)
        steps = engine.stats().dispatch.steps - before
        seconds = time.perf_counter() - start
    return kernel_times(directory, steps) | {"wall": round(1e6 * seconds / steps, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-8b")
    parser.add_argument("--method", default="pillar")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--context", type=int, default=8192, help="prompt tokens")
    parser.add_argument("--new-tokens", type=int, default=1024)
    parser.add_argument("--k", type=int, default=8)
    parser.add_argument("--sparsity", type=float, default=0.05)
    parser.add_argument("--temperature", type=float, default=0.65)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--overlap", default="resident")
    parser.add_argument("--implementation", default="auto")
    parser.add_argument("--prefill-chunk", type=int, default=256)
    parser.add_argument("--prefill-rows", type=int, default=8)
    parser.add_argument("--kv-cache-memory", type=float, default=None)
    parser.add_argument("--settle", type=float, default=0.5, help="seconds before the window")
    parser.add_argument("--seconds", type=float, default=2.0, help="of the window")
    parser.add_argument("--timeout", type=float, default=300)
    parser.add_argument("--score-rule", default="shifted")
    parser.add_argument("--profile", type=Path, help="also trace kernels, into this directory")
    parser.add_argument("--json", type=Path, help="append the result to this file")
    args = parser.parse_args()
    write(measure(args), args.json)


if __name__ == "__main__":
    main()
