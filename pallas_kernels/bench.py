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
import subprocess
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import (
    add_norm,
    append_kv,
    fused_attention,
    gpus,
    matmul,
    matmul_parts,
    pack_kv,
    rank_positions,
    select_positions,
    unpack_kv,
)
from pallas_kernels.fused_attention import pallas_triton
from pallas_kernels.fused_attention.tiles import Tile, Tiles, choose_tiles
from pallas_kernels.sample_tokens import sample, token_logprobs
from pallas_kernels.shapes import (
    H200,
    TINY,
    AddNorm,
    Append,
    Attention,
    Matmul,
    Pack,
    Rank,
    Sample,
    Select,
)

Case = Attention | Append | AddNorm | Matmul | Rank | Select | Sample | Pack
OPS = (
    "fused_attention",
    "append_kv",
    "add_norm",
    "matmul",
    "rank_positions",
    "select_positions",
    "sample_tokens",
    "pack_kv",
)


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
    """Time of a call: the best of three rounds of `repeats` calls in flight at once, so that the
    host's work hides behind the device's."""
    jax.block_until_ready(run(*args))
    rounds = []
    for _ in range(3):
        begin = time.perf_counter()
        for _ in range(repeats):
            done = run(*args)
        jax.block_until_ready(done)
        rounds.append((time.perf_counter() - begin) / repeats)
    return min(rounds)


def read_bandwidth(size: int, repeats: int) -> float:
    """Bytes per second of large reductions by rows, which keep every multiprocessor reading."""
    arrays = tuple(jnp.full((size // 2**14, 2**12), i, jnp.float32) for i in range(4))
    total = jax.jit(lambda arrays: [a.sum(axis=1) for a in arrays])
    return len(arrays) * size / seconds(total, arrays, repeats=repeats)


def attention_time(
    inputs: tuple[dict, dict], n_calls: int, repeats: int, attend: Callable[..., Any]
) -> float:
    """Seconds per call. Calls are layers: they have their own queries, and pass the scores on."""
    arrays, statics = inputs
    queries = tuple(arrays["q"] * (1 + i / 16) for i in range(n_calls))
    rest = {name: value for name, value in arrays.items() if name not in ("q", "drafts")}
    drafts = arrays["drafts"]
    if drafts is not None:
        drafts = drafts._replace(slots=jnp.tile(drafts.slots, (n_calls, 1, 1, 1)))

    @jax.jit
    def run(queries, drafts, rest):
        outs, scores = [], None
        for layer, q in enumerate(queries):
            out, scores = attend(
                q, **rest, **statics, drafts=drafts, scores=scores, layer=layer, n_layers=n_calls
            )
            outs.append(out)
        return outs, scores

    return seconds(run, queries, drafts, rest, repeats=repeats) / n_calls


def append_time(case: Append, n_calls: int, repeats: int, implementation: str) -> float:
    """Seconds per call. The pools are donated and passed on from call to call."""
    arrays = case.inputs()
    pools = [(arrays.pop("k_pool"), arrays.pop("v_pool"))]
    qkv = arrays.pop("qkv")
    projections = tuple(qkv * (1 + i / 16) for i in range(n_calls))

    @functools.partial(jax.jit, donate_argnums=0)
    def run(pools, projections, arrays):
        queries = []
        for qkv in projections:
            q, *pools = append_kv(*pools, qkv=qkv, **arrays, implementation=implementation)
            queries.append(q)
        return pools, queries

    def step():
        new_pools, queries = run(pools.pop(), projections, arrays)
        pools.append(new_pools)
        return new_pools, queries

    return seconds(step, repeats=repeats) / n_calls


def add_norm_time(case: AddNorm, n_calls: int, repeats: int, implementation: str) -> float:
    """Seconds per call. The sum is passed on from call to call, like a residual stream."""
    x, delta, scale = case.inputs()
    deltas = tuple(delta * (1 + i / 16) for i in range(n_calls))

    @jax.jit
    def run(x, deltas, scale):
        outs = []
        for delta in deltas:
            x, normed = add_norm(x, delta, scale, implementation=implementation)
            outs.append(normed)
        return x, outs

    return seconds(run, x, deltas, scale, repeats=repeats) / n_calls


def matmul_time(case: Matmul, n_calls: int, repeats: int, implementation: str) -> float:
    """Seconds per call, without adding parts. All calls have their own operands, like layers."""
    x, weight = case.inputs()
    calls = tuple((x * (1 + i / 16), weight * (1 + i / 16)) for i in range(n_calls))
    multiply = matmul_parts if case.in_parts else matmul

    @jax.jit
    def run(calls):
        return [multiply(*call, implementation=implementation) for call in calls]

    return seconds(run, calls, repeats=repeats) / n_calls


def rank_time(case: Rank, n_calls: int, repeats: int, implementation: str) -> float:
    """Seconds per call. All calls have their own weights, so that none can be shared."""
    scores, end, here, ahead, committed = case.inputs()
    calls = tuple(here * (1 + i / 16) for i in range(n_calls))

    @jax.jit
    def run(scores, end, calls, ahead, committed):
        rank = functools.partial(
            rank_positions,
            group=case.group,
            lists=case.lists,
            drafts=case.k,
            context=case.context,
            implementation=implementation,
        )
        return [rank(scores, end, here, ahead, committed) for here in calls]

    return seconds(run, scores, end, calls, ahead, committed, repeats=repeats) / n_calls


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


def pack_time(case: Pack, n_calls: int, repeats: int, implementation: str) -> float:
    """Seconds per call. All calls have their own slots and chunks, so that no cache has them.

    Pools that chunks come back to are donated and passed on from call to call.
    """
    arrays = case.inputs()
    pools, slots = [arrays["pools"]], arrays["slots"]
    calls = [1 + (slots - 1 + i * len(slots)) % (case.n_slots - 1) for i in range(n_calls)]
    if case.back is None:

        @jax.jit
        def run(pools, calls):
            return [pack_kv(pools, slots, implementation=implementation) for slots in calls]

        return seconds(run, *pools, calls, repeats=repeats) / n_calls
    chunks = [tuple(x * (1 + i / 16) for x in arrays["packed"]) for i in range(n_calls)]

    @functools.partial(jax.jit, donate_argnums=0)
    def run_back(pools, chunks, calls):
        for packed, slots in zip(chunks, calls, strict=True):
            pools = unpack_kv(pools, packed, slots, implementation=implementation)
        return pools

    def step():
        new_pools = run_back(pools.pop(), chunks, calls)
        pools.append(new_pools)
        return new_pools

    return seconds(step, repeats=repeats) / n_calls


def case_time(case: Case, variant: str, n_calls: int, repeats: int) -> float:
    if isinstance(case, Attention):
        attend = functools.partial(fused_attention, implementation=variant)
        return attention_time(case.inputs(), n_calls, repeats, attend)
    if isinstance(case, Append):
        return append_time(case, n_calls, repeats, variant)
    if isinstance(case, AddNorm):
        return add_norm_time(case, n_calls, repeats, variant)
    if isinstance(case, Matmul):
        return matmul_time(case, n_calls, repeats, variant)
    if isinstance(case, Rank):
        return rank_time(case, n_calls, repeats, variant)
    if isinstance(case, Pack):
        return pack_time(case, n_calls, repeats, variant)
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
        n_calls = 16 if on_gpu and (variant == "pallas" or op == "matmul") else 2
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
    """Tiles to try for each kernel, on the cases that isolate it."""
    shape, gpu = H200["fused_attention"]["verify"], gpus.current()
    usual = choose_tiles(
        shape.n_queries * shape.group, shape.group, shape.head_dim, jnp.dtype(shape.dtype), gpu
    )
    for block, warps, stages in itertools.product((16, 32), (1, 2, 4), (3, 5, 7)):
        yield "drafts", usual._replace(draft=Tile(16, block, warps, stages))
    causal = {
        "verify": itertools.product((64,), (32, 64), (4, 8), (3, 5, 7), (1, 2, 3)),
        "verify, k=7": itertools.product((32, 64), (32, 64), (2, 4), (3, 5, 7), (2, 3)),
        "decode": itertools.product((16,), (32, 64), (2, 4), (3, 5), (4, 6)),
        "prefill": itertools.product((64, 128), (32, 64), (4, 8), (3, 5), (1, 2, 3)),
        "mixed, group 8": itertools.product((128,), (32, 64), (8,), (5, 7, 9, 13), (1,)),
    }
    for name, tiles in causal.items():
        cases = [name, f"{name}, scores"] if name.startswith(("verify", "mixed")) else [name]
        for *tile, resident in tiles:
            chosen = Tiles(usual.draft, Tile(*tile), gpu.multiprocessors * resident)
            yield from ((case, chosen) for case in cases)


def sweep_rows() -> Iterator[dict]:
    by_case = sorted(sweeps(), key=lambda sweep: sweep[0])
    for name, group in itertools.groupby(by_case, lambda sweep: sweep[0]):
        inputs = H200["fused_attention"][name].inputs()
        for _, tiles in group:

            def attend(*args, layer, tiles=tiles, **kwargs):
                return pallas_triton.fused_attention(
                    *args,
                    layer=jnp.int32(layer),
                    gpu=gpus.current(),
                    interpret=False,
                    tiles=tiles,
                    **kwargs,
                )

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
