"""Time of summing a layer's output over devices, by every formulation.

    python -m benchmarks.all_reduce --rows 16 64 136 248 512 --hidden 4096 5120 --json out.json
    python -m benchmarks.all_reduce --cases psum psum/nccl words --rows 248 --hidden 4096

A case is a formulation, and options of XLA's compiler after a slash (`OPTIONS`). What is timed is
one jitted call of `--calls` all-reduces in a row, each followed by an elementwise operation that
needs it: `us` is the time of one of both, `us_alone` without what the elementwise operation takes
where nothing is reduced (`none`; for `*_add_norm`, without that of `add_norm`). Environment
variables that NCCL reads are part of a row. A case that fails says why, and the next one runs.
"""

from __future__ import annotations

import argparse
import functools
import os
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks.report import environment, write
from pallas_kernels import add_norm
from pallas_kernels.all_reduce import Peers, connect, mosaic_gpu
from pallas_kernels.timing import seconds

AXIS = "tp"
EPS = 1e-6
KERNELS = "xla_gpu_experimental_use_collective_kernels"
GRAPHS = "CONDITIONAL,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,DYNAMIC_SLICE_FUSION,FUSION"
OPTIONS: dict[str, dict[str, str | bool]] = {
    "": {},
    "nccl": {KERNELS: ""},  # from 0.11.2 on, XLA has a Triton kernel for up to 2 MB
    "graph": {KERNELS: "", "xla_gpu_enable_command_buffer": f"{GRAPHS},COLLECTIVES"},
    "no-graph": {"xla_gpu_enable_command_buffer": ""},
    "gather": {KERNELS: "COLLECTIVE_KERNEL_ALL_REDUCE,COLLECTIVE_KERNEL_ALL_GATHER"},
    "peer": {
        KERNELS: "",
        "xla_gpu_all_gather_mode": "COLLECTIVES_PEER_MEMORY",
        "xla_gpu_collective_permute_mode": "COLLECTIVES_PEER_MEMORY",
    },
    "memcpy": {KERNELS: "", "xla_gpu_use_memcpy_local_p2p": True},
}
CASES = ("words", "psum", "psum/nccl", "psum/graph", "permute/nccl", "gather/nccl")
FUSED_CASES = ("psum_add_norm", "psum_add_norm/nccl", "words_then_add_norm", "words_add_norm")


def permute(x: Array) -> Array:
    """Two devices swap their arrays."""
    return x + lax.ppermute(x, AXIS, [(0, 1), (1, 0)])


def gather(x: Array) -> Array:
    return jnp.sum(lax.all_gather(x, AXIS), axis=0, dtype=jnp.float32).astype(x.dtype)


def scatter(x: Array) -> Array:
    part = lax.psum_scatter(x, AXIS, scatter_dimension=1, tiled=True)
    return lax.all_gather(part, AXIS, axis=1, tiled=True)


def remote(x: Array) -> Array:
    """XLA's way to a peer's memory: it exchanges addresses before every call of the program, and
    starts a barrier of the devices before every kernel."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    devices = lax.axis_size(AXIS)
    layout = plgpu.Layout.WG_STRIDED((x.shape[1],), vec_size=8)

    def kernel(x_ref, out_ref, read):
        row, device = lax.axis_index("row"), lax.axis_index(AXIS)
        total = plgpu.load(x_ref.at[row], layout=layout, optimized=False).astype(jnp.float32)
        others = [lax.rem(device + i, jnp.int32(devices)) for i in range(1, devices)]
        for other in others:
            theirs = plgpu.remote_ref(x_ref, other).at[row]
            part = plgpu.load(theirs, layout=layout, optimized=False)
            total = total + part.astype(jnp.float32)
        out_ref[row] = total.astype(out_ref.dtype)
        for other in others:
            pl.semaphore_signal(read, device_id=other)
        pl.semaphore_wait(read, devices - 1, decrement=False)

    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(len(x),),
        grid_names=("row",),
        scratch_types=[plgpu.SemaphoreType.REGULAR],
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )(x)


def formulation(name: str) -> Callable[[Peers | None, Array], Array]:
    """The sum of the devices' x, [T, hidden], inside `shard_map`."""
    if name == "words":
        return lambda peers, x: mosaic_gpu.all_reduce(x, peers)
    simple = {
        "none": lax.optimization_barrier,
        "psum": functools.partial(lax.psum, axis_name=AXIS),
        "permute": permute,
        "gather": gather,
        "scatter": scatter,
        "remote": remote,
    }[name]
    return lambda _, x: simple(x)


def add_norm_formulation(name: str) -> Callable[..., tuple[Array, Array]]:
    """The residual stream and its norm, of x, a delta and a scale."""
    kind = name.removesuffix("_add_norm")
    if kind == "words":

        def fused(peers: Peers, x: Array, delta: Array, scale: Array) -> tuple[Array, Array]:
            return mosaic_gpu.all_reduce_add_norm(x, delta[None], scale, peers, eps=EPS)

        return fused
    reduce = formulation(kind.removesuffix("_then"))
    return lambda peers, x, delta, scale: add_norm(x, reduce(peers, delta), scale, eps=EPS)


def start(x: Array) -> Array:
    """`x`, after a small sum of XLA's, which programs with `peers` need (see `connect`)."""
    return x + 0 * lax.psum(x[:1, :1].astype(jnp.float32), AXIS).astype(x.dtype)


def chain(name: str, calls: int) -> Callable[[Peers | None, Array], Array]:
    """`calls` all-reduces that need each other."""

    def plain(peers: Peers | None, own: Array) -> Array:
        x = start(own)
        for _ in range(calls):
            x = formulation(name)(peers, x) * (0.5 / lax.axis_size(AXIS)) + own
        return x

    def with_norm(peers: Peers | None, own: Array) -> Array:
        x, delta, scale = start(jnp.zeros_like(own)), own, jnp.ones(own.shape[1:], own.dtype)
        for _ in range(calls):
            x, normed = add_norm_formulation(name)(peers, x, delta, scale)
            delta = normed * 0.5 + own
        return x

    return with_norm if name.endswith("_add_norm") else plain


def expected(name: str, values: np.ndarray, calls: int) -> np.ndarray:
    """What a chain returns, in float64, of [devices, T, hidden]."""
    own = values.astype(np.float64)
    if not name.endswith("_add_norm"):
        x = own
        for _ in range(calls):
            x = (x if name == "none" else x.sum(0)) * (0.5 / len(own)) + own
        return x
    x, delta = np.zeros_like(own), own
    for _ in range(calls):
        x = x + (delta if name == "none_add_norm" else delta.sum(0))
        delta = x / np.sqrt(np.square(x).mean(-1, keepdims=True) + EPS) * 0.5 + own
    return x


class Bench:
    """Runs cases on the arrays of one shape."""

    def __init__(self, mesh: Mesh, rows: int, hidden: int, peers: Peers | None):
        self.mesh, self.rows, self.hidden, self.peers = mesh, rows, hidden, peers
        shape = (mesh.size, rows, hidden)
        values = np.random.default_rng(0).normal(size=shape).astype(jnp.bfloat16)
        self.values = np.asarray(values, np.float32)
        self.x = jax.device_put(
            values.reshape(-1, hidden), NamedSharding(mesh, PartitionSpec(AXIS))
        )

    def compiled(self, f: Callable, options: str) -> Callable[..., Array]:
        split = PartitionSpec(AXIS)
        sharded = jax.shard_map(f, mesh=self.mesh, in_specs=split, out_specs=split, check_vma=False)
        lowered = jax.jit(sharded).lower(self.peers, self.x)
        return lowered.compile(compiler_options=OPTIONS[options])

    def error(self, actual: Array, expected: np.ndarray) -> float:
        actual = np.asarray(actual.astype(jnp.float32)).reshape(self.values.shape)
        return float(np.linalg.norm(actual - expected) / np.linalg.norm(expected))

    def accuracy(self, name: str, options: str) -> dict[str, float | bool]:
        """Of a single sum: its error, and whether all devices have the same bits."""
        if name == "none" or name.endswith("_add_norm"):
            return {}
        once = self.compiled(lambda peers, x: formulation(name)(peers, start(x)), options)
        total = once(self.peers, self.x)
        bits = np.asarray(total.view(jnp.uint16)).reshape(self.values.shape)
        return {
            "error": self.error(total, self.values.astype(np.float64).sum(0)[None]),
            "same_bits": bool((bits == bits[0]).all()),
        }

    def run(self, name: str, options: str, calls: int, repeats: int) -> dict:
        begin = time.perf_counter()
        accuracy = self.accuracy(name, options)
        run = self.compiled(chain(name, calls), options)
        compile_seconds = time.perf_counter() - begin
        first = run(self.peers, self.x)
        error = self.error(first, expected(name, self.values, calls))
        per_call = seconds(run, self.peers, self.x, repeats=repeats) / calls
        begin = time.perf_counter()
        last = run(self.peers, self.x)
        dispatch = time.perf_counter() - begin
        return {
            "us": 1e6 * per_call,
            "dispatch_us": 1e6 * dispatch,
            **accuracy,
            "chain_error": error,
            "repeatable": bool(jnp.array_equal(first, last)),
            "compile_seconds": compile_seconds,
        }


def measure(args: argparse.Namespace) -> Iterator[dict]:
    mesh = Mesh(np.array(jax.devices()), (AXIS,))
    about = {
        "benchmark": "all_reduce",
        "devices": mesh.size,
        "calls": args.calls,
        "nccl": {key: value for key, value in os.environ.items() if key.startswith("NCCL_")},
        **environment(),
    }
    for hidden in args.hidden:
        peers = connect(mesh, AXIS, rows=max(args.rows), hidden=hidden)
        if peers is not None and not args.quiet:
            print("addresses", [hex(p) for p in pointers(peers)], flush=True)
        for rows in args.rows:
            bench, alone = Bench(mesh, rows, hidden, peers), {}
            for case in args.cases:
                name, _, options = case.partition("/")
                row = {"case": case, "rows": rows, "hidden": hidden}
                try:
                    row |= bench.run(name, options, args.calls, args.repeats)
                except Exception as error:
                    if not args.quiet:
                        traceback.print_exc()
                    row["failed"] = f"{type(error).__name__}: {error}"[: args.error_length]
                else:
                    fused = name.endswith("_add_norm")
                    if name.startswith("none"):
                        alone[fused] = row["us"]
                    if fused in alone:
                        row["us_alone"] = row["us"] - alone[fused]
                yield row | about


def pointers(peers: Peers) -> list[int]:
    """The addresses in the first device's table."""
    table = np.asarray(peers.table)[0, 1:]
    return [int(pointer) for pointer in np.ascontiguousarray(table).view(np.uint64)]


def line(row: dict) -> str:
    start = f"{row['case']:24} {row['rows']:5} x {row['hidden']:5}"
    if "failed" in row:
        return f"{start}  {row['failed']}"
    numbers = [f"{row['us']:7.1f} us", f"alone {row.get('us_alone', float('nan')):6.1f}"]
    numbers += [f"dispatch {row['dispatch_us']:6.0f}", f"chain error {row['chain_error']:.1e}"]
    if "error" in row:
        numbers += [f"error {row['error']:.1e}", "same bits" if row["same_bits"] else "BITS DIFFER"]
    if not row["repeatable"]:
        numbers.append("NOT REPEATABLE")
    return f"{start}  {'  '.join(numbers)}  compile {row['compile_seconds']:.1f} s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[16, 64, 136, 248, 512])
    parser.add_argument("--hidden", type=int, nargs="+", default=[4096, 5120])
    parser.add_argument(
        "--cases", nargs="+", default=["none", *CASES, "none_add_norm", *FUSED_CASES]
    )
    parser.add_argument("--calls", type=int, default=72)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--error-length", type=int, default=2000)
    parser.add_argument("--quiet", action="store_true", help="no tracebacks, no addresses")
    parser.add_argument("--json", type=Path, help="append rows to this file")
    args = parser.parse_args()
    for row in measure(args):
        print(line(row), flush=True)
        if args.json:
            write(row, args.json, show=False)


if __name__ == "__main__":
    main()
