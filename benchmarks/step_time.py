"""Time of one whole step, at batches whose KV cache would not fit the GPU.

    python -m benchmarks.step_time --shape qwen3-8b --batch 128 --context 8192 --json out.json
    python -m benchmarks.step_time --shape qwen3-1.7b --batch 64 --context 2048
    python -m benchmarks.step_time --shape qwen3-32b --tp 2

The step is the engine's own, compiled for the engine's own bucket, but it starts in the middle of a
made-up run: weights, keys and values are random, every row has `--context` tokens, and the page
table maps them to random slots of a pool of `--slots`. Rows share slots, at random and in a pool
much larger than the L2 cache, so that what a step reads comes from memory as it would in a run.
From there on the steps are a run's: each row drafts k times and verifies, in rotating phases, and
every window starts over from the same state.

`step_ms` is wall time with two steps in flight, `dispatch_ms` the host's time in one dispatch. The
floors are those of the `tokens_per_step` that are not padding (`rows_per_step` with it):
`kv_floor_ms` to read the keys and values that attention needs, `matmul_floor_ms` for the matmuls'
operations or weights, whichever takes longer. With `--tp` they are those of one device's share.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.floors import floors
from benchmarks.models import SHAPES, model_of, random_params
from benchmarks.profiling import kernel_times
from benchmarks.report import environment, peak_memory_gib, write
from sparsespec_jax.config import EngineConfig, SpeculationConfig
from sparsespec_jax.engine.buckets import Buckets, Features
from sparsespec_jax.engine.executor import Executor
from sparsespec_jax.engine.plan import Bucket, PlanLayout
from sparsespec_jax.engine.state import DecodeState
from sparsespec_jax.kv.pool import Pools
from sparsespec_jax.models.config import ModelConfig
from sparsespec_jax.parallel.sharding import placement_of

IN_FLIGHT = 2
WARMUP = 8  # steps before a window: the first ones also build the command buffers


def measure(args: argparse.Namespace) -> dict:
    speculation = SpeculationConfig(method=args.method, k=args.k, score_rule=args.score_rule)
    k = 0 if args.method == "none" else args.k
    steps = WARMUP + args.steps
    width = args.context + steps + 2 * k + 2  # a row grows by k + 1 tokens in k + 1 steps at most
    width = max(width, args.width)
    model, dtype = model_of(args.shape, width), jnp.dtype(args.dtype)
    config = EngineConfig(
        tensor_parallel_size=args.tp,
        max_batch=args.batch,
        max_context=width,
        implementation=args.implementation,
    )
    buckets = Buckets(
        max_batch=args.batch,
        max_context=width,
        k=k,
        chunk=1,
        prefill_rows=1,
        batch_buckets=(args.batch,),
        context_buckets=(width,),
    )
    bucket = step_bucket(buckets, args)
    plans = cycle_of_plans(buckets.layout(bucket), args.batch, k)
    placement = placement_of(config)
    if args.psum:
        object.__setattr__(placement, "connect", lambda rows, hidden: None)
    executor = Executor(
        model,
        random_params(model, dtype, placement),
        config,
        speculation,
        buckets,
        args.slots,
        placement,
    )
    executor.transform(lambda pools, state: (randomize(pools), state))
    start = time.perf_counter()
    executor.compile(bucket)
    compile_seconds = time.perf_counter() - start

    def start_over() -> None:
        executor.transform(lambda pools, state: (pools, mid_run(state, model, speculation, args)))

    cycle = [(bucket, packed) for packed in plans]
    windows, kernels = [], None
    for _ in range(args.windows):
        start_over()
        seconds, dispatch = timed_steps(executor, cycle, args.steps)
        windows.append((statistics.fmean(seconds), dispatch))
    if args.profile:
        start_over()
        with jax.profiler.trace(str(args.profile)):
            timed_steps(executor, cycle, args.steps)
        kernels = kernel_times(args.profile, steps)
    memory = peak_memory_gib()
    executor.release()
    return {
        "benchmark": "step_time",
        **{key: value for key, value in vars(args).items() if key not in ("json", "profile")},
        "bucket": str(bucket),
        "step_ms": 1e3 * statistics.median(step for step, _ in windows),
        "dispatch_ms": 1e3 * statistics.median(dispatch for _, dispatch in windows),
        "step_ms_windows": [round(1e3 * step, 3) for step, _ in windows],
        **floors(args, model, dtype, speculation, plans, buckets.layout(bucket)),
        **({"kernels_us": kernels} if kernels else {}),
        "compile_seconds": compile_seconds,
        "peak_memory_gib": memory,
        **environment(),
    }


def step_bucket(buckets: Buckets, args: argparse.Namespace) -> Bucket:
    """What the engine runs `--batch` decoding rows with, unless the arguments say otherwise."""
    verifies = buckets.most_verifies(args.batch)
    bucket = buckets.smallest(
        args.batch - verifies, verifies, chunks=0, context=buckets.width, features=Features()
    )
    given = {"drafts": args.drafts, "verifies": args.verifies}
    return bucket._replace(**{name: rows for name, rows in given.items() if rows is not None})


def cycle_of_plans(layout: PlanLayout, batch: int, k: int) -> list[np.ndarray]:
    """The plans of k + 1 steps: row r is in phase (r + step) mod (k + 1), verifying in phase k."""
    return [pack_plan(layout, phase, k) for phase in phases_of_cycle(batch, k)]


def phases_of_cycle(batch: int, k: int) -> list[np.ndarray]:
    """Each row's phase in k + 1 steps: all phases have about as many rows."""
    return [(np.arange(batch) + step) % (k + 1) for step in range(k + 1)]


def pack_plan(layout: PlanLayout, phase: np.ndarray, k: int) -> np.ndarray:
    """The plan of a step of rows in these phases.

    Rows for which the bucket has no room sit the step out.
    """
    packed, plan = layout.empty()
    drafting = np.flatnonzero(phase < k)[: layout.bucket.drafts]
    plan.drafts[: len(drafting)] = np.stack([drafting, phase[drafting]], axis=1)
    verifying = np.flatnonzero(phase == k)[: layout.bucket.verifies]
    plan.verifies[: len(verifying), 0] = verifying
    plan.verifies[: len(verifying), 1] = k
    return packed


def randomize(pools: Pools) -> Pools:
    """Keys and values between -1 and 1, in place."""

    def fill(pool: jax.Array, seed: jax.Array) -> jax.Array:
        return pool + jax.random.uniform(jax.random.key(seed), pool.shape, pool.dtype, -1, 1)

    fill = jax.jit(fill, donate_argnums=0, out_shardings=pools[0][0].sharding)
    return tuple((fill(k, 2 * i), fill(v, 2 * i + 1)) for i, (k, v) in enumerate(pools))


def mid_run(
    state: DecodeState, model: ModelConfig, speculation: SpeculationConfig, args: argparse.Namespace
) -> DecodeState:
    """Every row with `--context` tokens, half of its last cycle's drafts accepted."""
    leaves, tree = jax.tree.flatten(jax.tree.map(lambda leaf: leaf.sharding, state))
    make = _mid_run(tree, *leaves)
    budget = speculation.budget(args.context)
    recent = 1 + speculation.ks[0] // 2
    numbers = args.batch, args.context, recent, budget, args.slots, model.vocab_size
    return make(state, np.array(numbers, np.int32), np.float32(args.temperature))


@functools.lru_cache(maxsize=1)
def _mid_run(tree: jax.tree_util.PyTreeDef, *shardings: jax.sharding.Sharding) -> Callable:
    """Compiled once for all batches and contexts of an executor."""

    @functools.partial(jax.jit, out_shardings=tree.unflatten(shardings))
    def make(state: DecodeState, numbers: jax.Array, temperature: jax.Array) -> DecodeState:
        batch, context, recent, budget, slots, vocabulary = numbers
        rows, width = state.tokens.shape
        live = jnp.arange(rows) < batch
        keys = jax.random.split(jax.random.key(0), 4)
        sampling = state.sampling._replace(
            temperature=jnp.full(rows, temperature),
            seed=jax.random.bits(keys[0], (rows, 2), jnp.uint32),
        )
        drafter = state.drafter
        if drafter is not None:
            start, count = context - recent, budget - recent
            # One position, at random, in each of `count` equal spans: ascending and distinct.
            place = jnp.arange(drafter.selected.shape[-1])
            place = place + jax.random.uniform(keys[1], drafter.selected.shape)
            drafter = drafter._replace(
                selected=jnp.minimum(place * (start / count), start - 1).astype(jnp.int32),
                count=jnp.where(live, count, 0),
                recent_start=jnp.where(live, start, 0),
            )
        return state._replace(
            tokens=jax.random.randint(keys[3], (rows, width), 0, vocabulary),
            page_table=jnp.where(
                live[:, None], jax.random.randint(keys[2], (rows, width), 1, slots), 0
            ),
            length=jnp.where(live, context, 1),
            max_length=jnp.where(live, width, 1),
            done=~live,
            sampling=sampling,
            drafter=drafter,
        )

    return make


def timed_steps(
    executor: Executor, cycle: list[tuple[Bucket, np.ndarray]], steps: int
) -> tuple[list[float], float]:
    """Seconds from each step's result to the next one's, and to dispatch one (median).

    Of `steps` steps behind some to warm up, which go through `cycle` again and again.
    """
    in_flight, dispatches, arrivals = deque(), [], []

    def read() -> None:
        np.asarray(in_flight.popleft())
        arrivals.append(time.perf_counter())

    for step in range(WARMUP + steps):
        start = time.perf_counter()
        in_flight.append(executor.dispatch(*cycle[step % len(cycle)]))
        dispatches.append(time.perf_counter() - start)
        if len(in_flight) == IN_FLIGHT:
            read()
    while in_flight:
        read()
    seconds = np.diff(arrivals[WARMUP - 1 :]).tolist()
    return seconds, statistics.median(dispatches[WARMUP:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-8b")
    parser.add_argument("--method", default="pillar")
    parser.add_argument("--score-rule", default="shifted")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--k", type=int, default=8)
    parser.add_argument("--width", type=int, default=0, help="of the bucket; default: as needed")
    parser.add_argument("--drafts", type=int, help="draft rows; default: as the engine would")
    parser.add_argument("--verifies", type=int, help="verify rows; default: as the engine would")
    parser.add_argument("--slots", type=int, default=400_000, help="of the KV pool")
    parser.add_argument("--temperature", type=float, default=0.65)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--tp", type=int, default=1, help="devices that share the model")
    parser.add_argument(
        "--psum", action="store_true", help="sum by XLA, not by all_reduce's kernel"
    )
    parser.add_argument("--implementation", default="auto")
    parser.add_argument("--steps", type=int, default=50, help="in a window")
    parser.add_argument("--windows", type=int, default=3)
    parser.add_argument("--bandwidth", type=float, help="TB/s; default: measured")
    parser.add_argument("--flops", type=float, help="TFLOP/s; default: measured")
    parser.add_argument("--profile", type=Path, help="also trace a window, into this directory")
    parser.add_argument("--json", type=Path, help="append the result to this file")
    args = parser.parse_args()
    write(measure(args), args.json)


if __name__ == "__main__":
    main()
