"""Attention of a mixed step, in as many launches as there are kinds of work, or in fewer.

    python -m benchmarks.attention_launches --json out.json

The paper fuses both kinds of rows into one launch with a template for each, and reports 1.3x over
one launch after the other and 1.8x over a naive batch, which runs drafts by the template that suits
verification. Here, one layer of the mixed step of `pallas_kernels.shapes`, without and with scores:
- two launches: `fused_attention`. Verify rows, then drafts and the merging of the verify rows'
  parts, each launch with the warps and stages that suit it.
- three launches: drafts, verify rows, merging. "Concurrent" leaves it to the GPU to run the first
  two at once, which XLA's command buffers do only if told so.
- one launch: the kernels as branches of one, the verify rows' programs first, and a launch that
  merges. Warps, stages, and the registers and shared memory that decide how many programs a
  multiprocessor holds are of the launch: drafts get what verify rows need, and blocks of 16 to 64
  keys. With "2 per SM" the verify rows are cut in fewer shares, so that there is room for drafts
  from the start. "By heads": a draft's blocks hold keys of several KV heads, as many as have the
  queries that fill a tile, so that its warps need not share the softmax of four.
- naive: one launch, in which a draft takes a whole tile of a verify row's k + 1 queries.

`ratio` is the time over that of two launches, and `floor_us` the time to read the keys and values
once. `max_error` is the largest difference from two launches, of the outputs and of the first
layer's scores; the script fails if one is too large.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import sys
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from benchmarks.report import environment
from pallas_kernels import fused_attention, gpus
from pallas_kernels.columns import Columns, load, store
from pallas_kernels.fused_attention import CodedScores, causal_kernel, finish
from pallas_kernels.fused_attention.draft_kernel import attend_to_list, draft_kernel
from pallas_kernels.fused_attention.scores import dense
from pallas_kernels.fused_attention.tiles import Tiles, choose_tiles
from pallas_kernels.fused_attention.triton_parts import DEAD, LOG2E, dot, gather, launch
from pallas_kernels.shapes import H200, TINY, Attention
from pallas_kernels.timing import read_bandwidth, seconds

BASELINE = "two launches"
THREE = "three launches"
CONCURRENT = "three launches, concurrent"
TOLERANCE = {"out": 0.02, "scores": 0.15}  # of the largest; codes are off by 6%


def draft_heads_kernel(
    i, first, layer_ref, slots_ref, length_ref, q_ref, k_ref, v_ref, out_ref, *,
    heads, group, head_dim, tile, scale, interpret,
):  # fmt: skip
    """`draft_kernel` for KV heads `heads * first` and so on: a block has keys of all of them."""
    layer, length = layer_ref[0], length_ref[i]
    _, _, n_lists, width = slots_ref.shape
    n_keys = tile.block // heads
    columns = Columns.of(head_dim)
    query, key = jnp.arange(tile.rows), jnp.arange(tile.block)
    own = lax.div(query, group)[:, None] == lax.div(key, n_keys)[None]
    head = heads * first + lax.div(key, n_keys)
    listed = lax.div(head, k_ref.shape[1] // n_lists)
    queries = (heads * first * group + query)[:, None]
    exists = columns.mask(query < heads * group)
    q = load(q_ref, i, queries, columns.at, mask=exists)

    def keys(b, *, masked: bool):
        at = b * n_keys + lax.rem(key, n_keys)
        entry = plt.load(slots_ref.at[layer, i, listed, jnp.minimum(at, width - 1)])
        slot = jnp.where(entry < 0, ~entry, entry)
        live = (entry >= 0) & (at < length)
        products = dot(q, gather(k_ref, slot, head[:, None], columns).T)
        return jnp.where(live[None] & own, products, DEAD), slot

    attend_to_list(
        length,
        n_keys,
        keys,
        lambda slot: gather(v_ref, slot, head[:, None], columns),
        lambda out: store(out_ref, i, queries, columns.at, value=out, mask=exists),
        shape=(tile.rows, columns.at.shape[1]),
        dtype=v_ref.dtype,
        factor=scale * LOG2E,
        interpret=interpret,
    )


@functools.partial(jax.jit, static_argnames=("statics", "tiles", "launches", "heads", "interpret"))
def with_merging_apart(
    q, k_pool, v_pool, page_table, layer, drafts, verify, scores, *,
    statics, tiles, launches, heads, interpret,
):  # fmt: skip
    """`fused_attention` of draft and verify rows, in one or two launches before one that merges.

    It is made of `causal_attention` and `finish`, but for what they launch. `statics` are items of
    the static arguments of `fused_attention`, `heads` the KV heads of a draft's program.
    """
    statics = dict(statics)
    n_scored = statics["score_queries"]
    n_drafts, n_kv_heads = drafts.length.shape[0], k_pool.shape[1]
    group, head_dim = q.shape[1] // n_kv_heads, q.shape[2]
    common = {"scale": statics["scale"], "interpret": interpret}
    codes, factor = scores or (None, None)
    shapes = causal_kernel.coded_shape(
        statics["n_layers"], len(verify.row), n_kv_heads, n_scored * group, statics["context"],
        tiles.causal.block,
    ) if n_scored else CodedScores(None, None)  # fmt: skip
    ending = functools.partial(finish.finish, q, k_pool, v_pool, layer, tile=tiles.draft, **common)
    out = None

    def launch_with_drafts(causal, inputs, outputs, *, grid, **options):
        nonlocal out
        n_causal = math.prod(grid)
        draft_sizes = {"group": group, "head_dim": head_dim, "tile": tiles.draft}
        several = functools.partial(draft_heads_kernel, heads=heads)
        draft = functools.partial(draft_kernel if heads == 1 else several, **draft_sizes, **common)
        draft_inputs = layer[None], *drafts, q, k_pool, v_pool
        n_reads, n_draft_reads = len(draft_inputs) + len(inputs), len(draft_inputs)

        def kernel(i, *refs):
            reads, (out_ref, *writes) = refs[:n_reads], refs[n_reads:]

            def run_causal():
                causal(i % grid[0], i // grid[0], *reads[n_draft_reads:], *writes)

            def run_draft():
                row, head = (i - n_causal) % n_drafts, (i - n_causal) // n_drafts
                draft(row, head, *reads[:n_draft_reads], out_ref)

            lax.cond(i < n_causal, run_causal, run_draft)

        out, *rest = launch(
            kernel,
            (*draft_inputs, *inputs),
            [(jax.ShapeDtypeStruct(q.shape, q.dtype), None), *outputs],
            grid=(n_causal + n_drafts * n_kv_heads // heads,),
            **options,
        )
        return rest

    def launch_into_out(merge, inputs, outputs, **options):
        return launch(merge, inputs, [(outputs[0][0], out), *outputs[1:]], **options)

    if launches == 2:
        out, _ = ending(drafts, [], None, None)
    joint = launch_with_drafts if launches == 1 else launch
    with mock.patch.object(causal_kernel, "launch", joint):
        left, codes = causal_kernel.causal_attention(
            q, k_pool, v_pool, page_table, layer, verify, None, codes, shapes.codes,
            n=statics["n_queries"], first_query=n_drafts, score_queries=n_scored,
            tile=tiles.causal, programs=tiles.programs, **common,
        )  # fmt: skip
    with mock.patch.object(finish, "launch", launch_into_out):
        out, factor = ending(None, [left], factor, shapes.factor)
    return out, CodedScores(codes, factor) if n_scored else None


def variants(case: Attention, *, interpret: bool) -> dict[str, Callable[..., Any]]:
    """What to measure, by name; called like `fused_attention`."""
    gpu, n_packed, dtype = gpus.current(), case.n_queries * case.group, jnp.dtype(case.dtype)
    tiles = choose_tiles(n_packed, case.group, case.head_dim, dtype, gpu)
    if interpret:
        tiles = tiles._replace(programs=3 * case.n_kv_heads)
    fewer = tiles._replace(programs=min(tiles.programs, 2 * gpu.multiprocessors))
    heads = math.gcd(tiles.draft.rows // pl.next_power_of_2(case.group), case.n_kv_heads)

    def apart(tiles: Tiles, launches: int = 1, heads: int = 1, **draft: int) -> Callable[..., Any]:
        tiles = tiles._replace(draft=tiles.draft._replace(**draft))
        how = {"tiles": tiles, "launches": launches, "heads": heads, "interpret": interpret}

        def attend(*arrays, layer, drafts, verify, scores, prefill, scored, **statics):
            rows = jnp.int32(layer), drafts, verify, scores
            return with_merging_apart(*arrays, *rows, statics=tuple(statics.items()), **how)

        return attend

    return {
        BASELINE: functools.partial(fused_attention, implementation="pallas", interpret=interpret),
        THREE: apart(tiles, launches=2),
        "one launch, 16 keys": apart(tiles, block=16),
        "one launch, 32 keys": apart(tiles, block=32),
        "one launch, 64 keys": apart(tiles, block=64),
        "one launch, 32 keys, 2 per SM": apart(fewer, block=32),
        "one launch, 32 keys by heads": apart(tiles, heads=heads, block=32),
        "one launch, 64 keys by heads": apart(tiles, heads=heads, block=64),
        "one launch, 32 keys by heads, 2 per SM": apart(fewer, heads=heads, block=32),
        "naive": apart(tiles, rows=tiles.causal.rows, block=tiles.causal.block),
    }


def layers(attend: Callable[..., Any], n_layers: int, statics: dict[str, Any]) -> Any:
    """Attention in several layers: as in a model, the queries of one wait for the one before."""

    @jax.jit
    def run(q, drafts, arrays):
        pools = [arrays[name] for name in ("k_pool", "v_pool", "page_table")]
        rows = {"drafts": drafts, "verify": arrays["verify"], "prefill": None}
        outs, scores = [], None
        for layer in range(n_layers):
            of_layer = {"layer": layer, "n_layers": n_layers, "scores": scores}
            q, scores = attend(q, *pools, **rows, **of_layer, **statics)
            outs.append(q)
        return outs, scores

    return run


def errors(case: Attention, actual: Any, expected: Any) -> dict[str, tuple[float, float]]:
    """Largest difference and largest expected value, of all outputs and of the first scores."""

    @jax.jit
    def values(outs, scores):
        values = {"out": jnp.stack(outs).astype(jnp.float32)}
        if case.scores:
            end = jnp.full(case.n_verify, case.context)
            first = CodedScores(*(x[:1] for x in scores))
            values["scores"] = dense(first, end, case.group).probabilities
        return values

    actual, expected = values(*actual), values(*expected)
    return {
        name: (float(jnp.abs(actual[name] - value).max()), float(jnp.abs(value).max()))
        for name, value in expected.items()
    }


def measure(case: Attention, *, on_gpu: bool, n_layers: int) -> dict[str, dict[str, Any]]:
    """Seconds a layer and errors of each variant."""
    arrays, statics = case.inputs()
    q, drafts = arrays.pop("q"), arrays.pop("drafts")
    drafts = drafts._replace(slots=jnp.tile(drafts.slots, (n_layers, 1, 1, 1)))
    attends = variants(case, interpret=not on_gpu)
    attends[CONCURRENT] = attends[THREE]
    lowered = {
        name: layers(attend, n_layers, statics).lower(q, drafts, arrays)
        for name, attend in attends.items()
    }

    def compile_one(name: str) -> Callable[[], Any]:
        concurrent = {"xla_gpu_command_buffer_scheduling_mode": "CONCURRENT"}
        options = concurrent if name == CONCURRENT else None
        return functools.partial(lowered[name].compile(options), q, drafts, arrays)

    with ThreadPoolExecutor() as pool:
        runs = dict(zip(lowered, pool.map(compile_one, lowered), strict=True))
    expected = runs[BASELINE]()
    found = {name: {"error": errors(case, run(), expected)} for name, run in runs.items()}
    rounds = [  # all of them twice, whatever the clocks do meanwhile
        {name: seconds(run, repeats=15 if on_gpu else 2) for name, run in runs.items()}
        for _ in range(2)
    ]
    for name, result in found.items():
        result["seconds"] = min(times[name] for times in rounds) / n_layers
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="append the rows to this file")
    args = parser.parse_args()
    warnings.filterwarnings("ignore", "The Pallas Triton backend is deprecated")
    on_gpu = jax.default_backend() == "gpu"
    cases = (H200 if on_gpu else TINY)["fused_attention"]
    bandwidth = read_bandwidth(1 << 30 if on_gpu else 1 << 22, repeats=15)
    command = f"python -m benchmarks.attention_launches {' '.join(sys.argv[1:])}".rstrip()
    measured_on = environment()

    rows, wrong = [], []
    for case_name in ("mixed", "mixed, scores"):
        case = cases[case_name]
        found = measure(case, on_gpu=on_gpu, n_layers=16 if on_gpu else 2)
        for name, result in found.items():
            row = {
                "command": command,
                "benchmark": "attention_launches",
                "case": case_name,
                "variant": name,
                "time_us": round(1e6 * result["seconds"], 2),
                "floor_us": round(1e6 * case.bytes() / bandwidth, 2),
                "ratio": round(result["seconds"] / found[BASELINE]["seconds"], 3),
                "max_error": {of: error for of, (error, _) in result["error"].items()},
                **measured_on,
            }
            rows.append(row)
            for of, (error, largest) in result["error"].items():
                if not error <= TOLERANCE[of] * largest:
                    wrong.append(f"{case_name}, {name}: {of} off by {error}, largest {largest}")
    if args.json:
        with args.json.open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    print(f"read bandwidth {bandwidth / 1e12:.3f} TB/s")
    print(f"{'case':14} {'variant':38} {'us':>8} {'floor':>7} {'ratio':>6}  max error")
    for row in rows:
        shown = ", ".join(f"{of} {error:.2g}" for of, error in row["max_error"].items())
        print(
            f"{row['case']:14} {row['variant']:38} {row['time_us']:8.1f} {row['floor_us']:7.1f} "
            f"{row['ratio']:6.3f}  {shown}"
        )
    if wrong:
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    main()
