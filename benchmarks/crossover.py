"""Where speculation pays: tokens a second by batch and context, for each number of drafts.

    python -m benchmarks.crossover --shape qwen3-1.7b --json out.json
    python -m benchmarks.crossover --shape qwen3-8b --json out.json

Each cell's steps are those of `benchmarks.step_time`: the engine's own, out of the middle of a
made-up run. A cycle of k drafts emits 1 + a_1 + .. + a_k tokens in k + 1 steps, where a_i is the
share of cycles whose i-th draft is accepted (`--accepted`); 0 drafts are plain decoding. Cells
whose KV cache does not fit beside the weights are left out.

`auto` is the number of drafts that `engine/adaptive.py` settles on when it sees the cell's step
times and such acceptance, and the tokens a second of its first `--auto-steps` steps, trials
included.
"""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.models import SHAPES, model_of, random_params
from benchmarks.report import environment, write
from benchmarks.step_time import mid_run, pack_plan, phases_of_cycle, randomize, timed_steps
from benchmarks.workload import ACCEPTED
from sparsespec_jax.config import EngineConfig, SpeculationConfig
from sparsespec_jax.engine.adaptive import AdaptiveDrafting
from sparsespec_jax.engine.buckets import Buckets, Features
from sparsespec_jax.engine.executor import Executor
from sparsespec_jax.engine.plan import Bucket
from sparsespec_jax.parallel.sharding import Placement

Step = tuple[Bucket, np.ndarray]


def cycle(buckets: Buckets, batch: int, k: int) -> list[Step]:
    """k + 1 steps of `batch` rows, each in the bucket that the engine would use."""
    steps = []
    for phase in phases_of_cycle(batch, k):
        drafts, verifies = int((phase < k).sum()), int((phase == k).sum())
        bucket = buckets.smallest(drafts, verifies, 0, buckets.width, Features(), k=k)
        steps.append((bucket, pack_plan(buckets.layout(bucket), phase, k)))
    return steps


def tokens_a_step(batch: int, k: int, accepted: tuple[float, ...]) -> float:
    return batch * (1 + sum(accepted[:k])) / (k + 1)


def adapt(
    batch: int, step_seconds: dict[int, list[float]], accepted: tuple[float, ...], steps: int
) -> tuple[int, float]:
    """The number of drafts that adaptive drafting settles on, and tokens a second until then."""
    adaptive, rng = AdaptiveDrafting(tuple(step_seconds)), np.random.default_rng(0)
    again = {k: itertools.cycle(found) for k, found in step_seconds.items()}
    chosen, tokens, seconds = [], 0.0, 0.0
    for _ in range(steps):
        k = adaptive.choice.k
        took = next(again[k])
        tokens, seconds = tokens + tokens_a_step(batch, k, accepted), seconds + took
        chosen.append(k)
        if k:
            for _ in range(max(1, batch // (k + 1))):
                adaptive.note_cycle(k, int((rng.random() < np.array(accepted[:k])).sum()))
        adaptive.note_step(batch, took)
    return max(set(chosen), key=chosen.count), tokens / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-8b")
    parser.add_argument("--batches", type=int, nargs="+", default=(1, 4, 16, 64, 256))
    parser.add_argument("--contexts", type=int, nargs="+", default=(512, 2048, 8192, 32768))
    parser.add_argument("--memory-gib", type=float, default=125, help="for weights and KV")
    parser.add_argument("--slots", type=int, default=300_000, help="of the pool, shared by rows")
    parser.add_argument("--accepted", type=float, nargs="+", default=ACCEPTED)
    parser.add_argument(
        "--steps", type=int, default=45, help="in a window: whole cycles of 9, 5, 3"
    )
    parser.add_argument("--auto-steps", type=int, default=2000)
    parser.add_argument("--temperature", type=float, default=0.65)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--json", type=Path, help="append the results to this file")
    args = parser.parse_args()

    speculation = SpeculationConfig(k="auto")
    widest = max(args.contexts) + args.steps + 64
    model, dtype = model_of(args.shape, widest), jnp.dtype(args.dtype)
    buckets = Buckets(
        max_batch=max(args.batches),
        max_context=widest,
        k=speculation.ks[0],
        chunk=1,
        prefill_rows=1,
        batch_buckets=tuple(args.batches),
        context_buckets=(widest,),
        ks=speculation.ks,
    )
    params = random_params(model, dtype)
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    room = (args.memory_gib * 2**30 - weights) / model.kv_bytes_per_token(dtype)
    config = EngineConfig(max_batch=max(args.batches), max_context=widest)
    executor = Executor(
        model, params, config, speculation, buckets, args.slots, Placement.single_device()
    )
    executor.transform(lambda pools, state: (randomize(pools), state))
    cycles = {
        (batch, k): cycle(buckets, batch, k)
        for batch, k in itertools.product(args.batches, speculation.ks)
    }
    executor.warmup(list({bucket for steps in cycles.values() for bucket, _ in steps}))

    for batch, context in itertools.product(args.batches, args.contexts):
        if batch * context > room:
            continue
        args.batch, args.context = batch, context
        seconds = {}
        for k in speculation.ks:
            executor.transform(
                lambda pools, state: (pools, mid_run(state, model, speculation, args))
            )
            seconds[k], _ = timed_steps(executor, cycles[batch, k], args.steps)
        means = {k: float(np.mean(found)) for k, found in seconds.items()}
        auto_k, auto_rate = adapt(batch, seconds, tuple(args.accepted), args.auto_steps)
        row = {
            "benchmark": "crossover",
            "shape": args.shape,
            "batch": batch,
            "context": context,
            "accepted": args.accepted,
            "step_ms": {k: round(1e3 * mean, 3) for k, mean in means.items()},
            "steps_ms": {k: [round(1e3 * s, 3) for s in seconds[k]] for k in seconds},
            "tokens_per_second": {
                k: round(tokens_a_step(batch, k, args.accepted) / mean, 1)
                for k, mean in means.items()
            },
            "auto": {"k": auto_k, "tokens_per_second": round(auto_rate, 1)},
            **environment(),
        }
        write(row, args.json)


if __name__ == "__main__":
    main()
