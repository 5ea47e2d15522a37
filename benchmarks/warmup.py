"""How long an engine takes until it is ready: all steps of ordinary traffic, moves of KV, memory.

    python -m benchmarks.warmup --shape qwen3-8b --json out.json

With the engine's defaults, a context of 40,960 tokens and random weights; nothing of it comes from
a compilation cache.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import jax
import jax.numpy as jnp

from benchmarks.models import SHAPES, model_of, random_params
from benchmarks.report import environment, write
from sparsespec_jax.config import EngineConfig, SpeculationConfig
from sparsespec_jax.engine.engine import Engine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-8b")
    parser.add_argument("--batch", type=int, default=EngineConfig.max_batch)
    parser.add_argument("--context", type=int, default=40_960)
    parser.add_argument("--auto", action="store_true", help="k and sparsity, too")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--json", type=Path, help="append the result to this file")
    args = parser.parse_args()
    model = model_of(args.shape, args.context)
    params = random_params(model, jnp.dtype(args.dtype))
    jax.block_until_ready(params)
    chosen = {"k": "auto", "sparsity": "auto"} if args.auto else {}
    config = EngineConfig(max_batch=args.batch, dtype=args.dtype)
    engine = Engine(model, params, config, SpeculationConfig(**chosen))
    start = time.perf_counter()
    engine.warmup()
    seconds = time.perf_counter() - start
    row = {
        "benchmark": "warmup",
        **{name: value for name, value in vars(args).items() if name != "json"},
        "seconds": round(seconds, 1),
        "steps": len(engine._executor._compiled),
        "cpus": os.cpu_count(),
    }
    engine.close()
    write(row | environment(), args.json)


if __name__ == "__main__":
    main()
