"""Times the ops: `python -m pallas_kernels.bench [OP ...] [--json FILE] [--sweep]`.

Prints the environment, one table, and with `--json` one row per measurement. `floor_us` is the time
in which the bytes an op must touch can be read at the bandwidth measured in the same run, and
`share_of_floor` how close the op comes to it. `--sweep` tries tiles of the attention kernels.
"""

import argparse
import functools
import itertools
import json
import os
import platform
import statistics
import subprocess
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import append_kv, fused_attention, select_positions
from pallas_kernels.fused_attention import pallas_triton
from pallas_kernels.fused_attention.pallas_triton import Tile, Tiles
from pallas_kernels.sample_tokens import sample, token_logprobs
from pallas_kernels.shapes import H200, TINY, Append, Attention, Sample, Select

Case = Attention | Append | Select | Sample
OPS = ("fused_attention", "append_kv", "select_positions", "sample_tokens")


def commit() -> str:
    """The short hash of the checkout these files are in, if it is one."""
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip() or "unknown"


def environment() -> dict[str, str]:
    return {
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "python": platform.python_version(),
        "commit": commit(),
        "XLA_FLAGS": os.environ.get("XLA_FLAGS", ""),
    }


def seconds(run: Callable[..., Any], *args: Any, repeats: int) -> float:
    """Median time of a call, after two calls to compile and warm up."""
    times = []
    for _ in range(repeats + 2):
        begin = time.perf_counter()
        jax.block_until_ready(run(*args))
        times.append(time.perf_counter() - begin)
    return statistics.median(times[2:])


def read_bandwidth(size: int, repeats: int) -> float:
    """Bytes per second of large reductions by rows, which keep every multiprocessor reading."""
    arrays = tuple(jnp.full((size // 2**14, 2**12), i, jnp.float32) for i in range(4))
    total = jax.jit(lambda arrays: [a.sum(axis=1) for a in arrays])
    return len(arrays) * size / seconds(total, arrays, repeats=repeats)


def attention_time(
    inputs: tuple[dict, dict], n_calls: int, repeats: int, attend: Callable[..., Any]
) -> float:
    """Seconds per call. All calls have their own queries, so that none can be shared."""
    arrays, statics = inputs
    queries = tuple(arrays["q"] * (1 + i / 16) for i in range(n_calls))
    rest = {name: value for name, value in arrays.items() if name != "q"}

    @jax.jit
    def run(queries, rest):
        return [attend(q, **rest, **statics) for q in queries]

    return seconds(run, queries, rest, repeats=repeats) / n_calls


def append_time(case: Append, n_calls: int, repeats: int, implementation: str) -> float:
    """Seconds per call. The pools are donated and passed on from call to call."""
    k_pool, v_pool, k_new, v_new, slots = case.inputs()
    new = tuple((k_new * i, v_new * i) for i in range(n_calls))

    @functools.partial(jax.jit, donate_argnums=0)
    def run(pools, new, slots):
        for k_new, v_new in new:
            pools = append_kv(*pools, k_new, v_new, slots, implementation=implementation)
        return pools

    pools = [(k_pool, v_pool)]
    del k_pool, v_pool

    def step():
        pools.append(run(pools.pop(), new, slots))
        return pools[-1]

    return seconds(step, repeats=repeats) / n_calls


def select_time(case: Select, n_calls: int, repeats: int, implementation: str) -> float:
    """Seconds per call. All calls have their own counts, so that none can be shared."""
    scores, candidates, count = case.inputs()
    counts = tuple(jnp.maximum(count - i, 1) for i in range(n_calls))

    @jax.jit
    def run(scores, candidates, counts):
        select = functools.partial(
            select_positions, k=case.n_selected, implementation=implementation
        )
        return [select(scores, candidates, count) for count in counts]

    return seconds(run, scores, candidates, counts, repeats=repeats) / n_calls


def sample_time(case: Sample, n_calls: int, repeats: int, implementation: str) -> float:
    """Seconds per call. All calls have their own positions and temperatures: none can be shared."""
    logits, args = case.inputs()
    calls = tuple(
        args._replace(
            position=args.position + i * case.n_rows, temperature=args.temperature * (1 + i / 64)
        )
        for i in range(n_calls)
    )

    @jax.jit
    def run(logits, calls):
        if case.logprobs:
            report = functools.partial(token_logprobs, implementation=implementation)
            return [report(logits, call.position % case.vocab, call)[0] for call in calls]
        draw = functools.partial(sample, filters=case.filters, implementation=implementation)
        return [draw(logits, call) for call in calls]

    return seconds(run, logits, calls, repeats=repeats) / n_calls


def case_time(case: Case, variant: str, n_calls: int, repeats: int) -> float:
    if isinstance(case, Attention):
        attend = functools.partial(fused_attention, implementation=variant)
        return attention_time(case.inputs(), n_calls, repeats, attend)
    if isinstance(case, Append):
        return append_time(case, n_calls, repeats, variant)
    if isinstance(case, Sample):
        return sample_time(case, n_calls, repeats, variant)
    return select_time(case, n_calls, repeats, variant)


def shape_text(case: Case) -> str:
    return " ".join(
        f"{name}={value}"
        for name, value in asdict(case).items()
        if name not in ("k", "context") and value not in (None, False)
    )


def rows(ops: list[str], variants: list[str], on_gpu: bool, bandwidth: float) -> Iterator[dict]:
    cases = H200 if on_gpu else TINY
    named = [(op, name, case) for op in ops for name, case in cases[op].items()]
    for (op, name, case), variant in itertools.product(named, variants):
        n_calls = 16 if on_gpu and variant == "pallas" else 2
        time_s = case_time(case, variant, n_calls, repeats=15 if on_gpu else 3)
        floor_s = case.bytes() / bandwidth
        yield {
            "op": op,
            "case": name,
            "shape": shape_text(case),
            "k": case.k,
            "context": case.context,
            "variant": variant,
            "time_us": round(time_s * 1e6, 2),
            "bytes": case.bytes(),
            "floor_us": round(floor_s * 1e6, 2),
            "share_of_floor": round(floor_s / time_s, 3),
        }


def sweeps() -> Iterator[tuple[str, Tiles]]:
    """Tiles to try for each kernel, on the case that isolates it."""
    for block, warps, stages in itertools.product((16, 32, 64), (1, 2, 4), (2, 3, 4, 5)):
        yield "drafts", Tiles(draft=Tile(16, block, warps, stages))
    for block, warps, stages in itertools.product((32, 64), (2, 4, 8), (2, 3, 4)):
        for length in (1024, 2048):
            yield "verify", Tiles(causal=Tile(64, block, warps, stages), length=length)
    for block, warps, stages in itertools.product((32, 64, 128), (2, 4, 8), (2, 3, 4)):
        for span in (512, 1024):
            yield "verify, scores", Tiles(score=Tile(16, block, warps, stages), span=span)


def sweep_rows() -> Iterator[dict]:
    for name, group in itertools.groupby(sweeps(), lambda sweep: sweep[0]):
        inputs = H200["fused_attention"][name].inputs()
        for _, tiles in group:

            def attend(q, *args, layer, tiles=tiles, **kwargs):
                layer = jnp.int32(layer)
                kernel = pallas_triton.fused_attention
                return kernel(q, *args, layer=layer, interpret=False, tiles=tiles, **kwargs)

            try:
                time_s = attention_time(inputs, n_calls=4, repeats=7, attend=attend)
            except jax.errors.JaxRuntimeError as error:  # too much shared memory
                print(f"{name}: {tiles}: {str(error).splitlines()[0]}", flush=True)
                continue
            yield {"case": name, "tiles": str(tiles), "time_us": round(time_s * 1e6, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m pallas_kernels.bench", description=__doc__)
    parser.add_argument("ops", nargs="*", metavar="OP", help=f"of {', '.join(OPS)}; default: all")
    parser.add_argument("--json", type=Path, help="append one JSON object per measurement here")
    parser.add_argument(
        "--variants", default="pallas,xla", help="implementations to time (default: %(default)s)"
    )
    parser.add_argument("--sweep", action="store_true", help="try attention tiles; GPU only")
    args = parser.parse_args()
    unknown = set(args.ops) - set(OPS)
    if unknown:
        parser.error(f"unknown op {sorted(unknown)[0]!r}; choose from {', '.join(OPS)}")
    on_gpu = jax.default_backend() == "gpu"
    if args.sweep and not on_gpu:
        parser.error("--sweep needs a GPU")
    warnings.filterwarnings("ignore", "The Pallas Triton backend is deprecated")

    env = environment()
    print("  ".join(f"{name}={value}" for name, value in env.items()))
    bandwidth = read_bandwidth(1 << 30 if on_gpu else 1 << 24, repeats=15)
    print(f"read bandwidth {bandwidth / 1e12:.3f} TB/s", flush=True)
    keep = {name: env[name] for name in ("device", "jax", "commit")}

    def emit(row: dict) -> None:
        if args.json:
            with args.json.open("a") as file:
                file.write(json.dumps(row | keep) + "\n")

    if args.sweep:
        for row in sweep_rows():
            print(f"{row['case']:16} {row['time_us']:9.2f} us  {row['tiles']}", flush=True)
            emit(row)
        return
    print(f"{'op':17} {'case':20} {'variant':8} {'us':>10} {'floor us':>10} {'of floor':>9}")
    for row in rows(args.ops or list(OPS), args.variants.split(","), on_gpu, bandwidth):
        print(
            f"{row['op']:17} {row['case']:20} {row['variant']:8} {row['time_us']:10.2f} "
            f"{row['floor_us']:10.2f} {row['share_of_floor']:9.1%}",
            flush=True,
        )
        emit(row)


if __name__ == "__main__":
    main()
