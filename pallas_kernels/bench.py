"""Times the ops: `python -m pallas_kernels.bench [OP ...] [--json FILE] [--sweep]`.

Prints the environment, one table, and with `--json` one row per measurement. `floor_us` is the time
in which the bytes an op must touch can be read at the bandwidth measured in the same run, and
`share_of_floor` how close the op comes to it. `--sweep` tries tiles of the attention kernels.
"""

import argparse
import itertools
import json
import os
import platform
import subprocess
import warnings
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import jax
import jax.numpy as jnp

from pallas_kernels import gpus
from pallas_kernels.fused_attention import pallas_triton
from pallas_kernels.fused_attention.tiles import Tile, Tiles, choose_tiles
from pallas_kernels.shapes import H200, TINY
from pallas_kernels.timing import Case, attention_time, case_time, read_bandwidth

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
