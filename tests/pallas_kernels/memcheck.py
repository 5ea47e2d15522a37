"""Runs every kernel once, compiled, for NVIDIA's memory checker:

    PYTHONPATH=. XLA_FLAGS="--xla_gpu_enable_command_buffer= --xla_gpu_autotune_level=0" \
    XLA_PYTHON_CLIENT_ALLOCATOR=platform XLA_PYTHON_CLIENT_PREALLOCATE=false \
    compute-sanitizer --tool memcheck --padding 4096 --error-exitcode 9 --print-limit 20 \
    python tests/pallas_kernels/memcheck.py [OP ...]

Every array that a kernel reads or writes is an allocation of its own, so that the checker sees an
access past its end: what passes between the kernels of an op would lie in one allocation, so it is
made a result. Shapes are odd, sizes a few blocks. Results are compared with float64, and the memory
freed just before held 0xFF (NaN), so that what is not written is noticed where it is reused. Inputs
and what is expected are made on the CPU: next to no kernels run that are not ours.

Without a GPU the same runs in Pallas' interpreter, which only tests this script.
"""

import contextlib
import functools
import os
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from attention_cases import Shape
from jax.experimental import pallas as pl
from test_accuracy import (
    check,
    make_step,
    ranking64,
    sample_case,
    selected64,
    verify_append,
    verify_attention,
    verify_logprobs,
    verify_sample,
)
from test_append_kv import EPS, make_inputs
from test_matmul import check as check_product
from test_matmul import operands
from test_pack_kv import assert_packed, assert_unpacked, unpacked_by_numpy
from test_pack_kv import make_inputs as make_chunks
from test_rank_positions import make_coded, make_rows
from test_rank_positions import probabilities as coded_probabilities

from pallas_kernels import (
    add_norm,
    append_kv,
    fused_attention,
    pack_kv,
    rank_positions,
    sample,
    select_positions,
    token_logprobs,
    unpack_kv,
)
from pallas_kernels.add_norm import pallas_triton as norm_kernel
from pallas_kernels.append_kv import pallas_triton as append_kernel
from pallas_kernels.fused_attention import pallas_triton as attention_kernel
from pallas_kernels.matmul import mosaic_gpu
from pallas_kernels.matmul.tiles import Tile
from pallas_kernels.pack_kv import pallas_triton as pack_kernel
from pallas_kernels.rank_positions import pallas_triton as rank_kernel
from pallas_kernels.sample_tokens import pallas_triton as sample_kernel
from pallas_kernels.select_positions import pallas_triton as select_kernel
from pallas_kernels.shapes import Append, Pack

DEVICE = jax.devices()[0]
JITTED = [
    (norm_kernel, "add_norm"),
    (append_kernel, "append_kv"),
    (attention_kernel, "fused_attention"),
    (pack_kernel, "pack_kv"),
    (pack_kernel, "unpack_kv"),
    (rank_kernel, "rank_positions"),
    (sample_kernel, "best_tokens"),
    (sample_kernel, "log_normalisers"),
    (select_kernel, "select_positions"),
]
n_kernels = 0


def compiled(op: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[..., Any]:
    """The op for arguments like these; it returns its result as numpy arrays.

    Everything that its kernels read or write is a result of the program, too.
    """
    global n_kernels
    pallas_call, seen = pl.pallas_call, []

    def recording(*how, **options):
        call = pallas_call(*how, **options)

        def run(*inputs):
            outputs = call(*inputs)
            seen.append((inputs, outputs))
            return outputs

        return run

    def program(args, kwargs):
        seen.clear()
        interpret = DEVICE.platform == "cpu"
        result = op(*args, **kwargs, implementation="pallas", interpret=interpret)
        return result, list(seen)

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(pl, "pallas_call", recording))
        for module, name in JITTED:  # or what is seen inside could not leave
            bare = getattr(module, name).__wrapped__
            stack.enter_context(mock.patch.object(module, name, bare))
        stack.enter_context(jax.default_device(DEVICE))  # Pallas asks what it is
        lowered = jax.jit(program).lower(*jax.device_put((args, kwargs), DEVICE))
    run = lowered.compile()
    n_kernels += len(seen)

    def call(*args, **kwargs):
        inputs = jax.device_put((args, kwargs), DEVICE)
        poison = [
            jax.device_put(np.full(x.size * x.dtype.itemsize, 0xFF, np.uint8), DEVICE)
            for x in jax.tree.leaves(lowered.out_info)
        ]
        jax.block_until_ready(poison)
        del poison
        return jax.device_get(run(*inputs)[0])

    return call


def launch(op: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return compiled(op, *args, **kwargs)(*args, **kwargs)


ATTENTION = {
    "a head of 80 in 128 lanes": Shape(
        n_kv_heads=3, group=5, head_dim=80, context=701, n_drafts=5, n_selected=70, max_recent=9,
        n_verify=3, n_queries=5, n_prefill=2, chunk=33, n_scored=2, score_queries=5,
    ),
    "as in Qwen3": Shape(
        n_kv_heads=2, group=4, head_dim=128, context=603, n_drafts=3, n_selected=61, max_recent=17,
        n_verify=3, n_queries=9, n_prefill=0, score_queries=9,
    ),
}  # fmt: skip


def attention():
    for name, shape in ATTENTION.items():
        program = None
        for kind in ("mixed", "padding"):
            step = make_step(shape, kind, "bfloat16")
            arguments = step.arguments
            arrays = {name: arguments[name] for name in step.arrays}
            call = functools.partial(fused_attention, **step.statics)
            shapes = jax.eval_shape(functools.partial(call, implementation="pallas"), **arrays)[1]
            before = jax.tree.map(lambda x: np.full(x.shape, 77, x.dtype), shapes)
            program = program or compiled(call, **arrays, scores=before)
            out, scores = program(**arrays, scores=before)
            verify_attention(f"fused_attention, {name}, {kind}", step, out, scores)
            for new, old in zip(scores, before, strict=True):  # the other layer's
                np.testing.assert_array_equal(new[: shape.layer], old[: shape.layer])


def product():
    """A kernel of Mosaic GPU, for Hopper."""
    global n_kernels
    if getattr(DEVICE, "compute_capability", None) != "9.0":
        return
    x, weight = operands(200, 512, 768, "bfloat16")
    for tile in (
        Tile(128, 192, stages=3),
        Tile(64, 192, stages=4, parts=2),
        Tile(128, 64, stages=6, beside=True, parts=2),
        Tile(128, 128, stages=4, pairs=True, parts=4),
    ):
        run = functools.partial(mosaic_gpu.matmul_parts, tile=tile, multiprocessors=132)
        with jax.default_device(DEVICE):
            parts = jax.jit(run)(*jax.device_put((x, weight), DEVICE))
        check_product(jax.device_get(parts), x, weight)
        n_kernels += 1


def norm():
    rng = np.random.default_rng(0)
    x, delta, scale = (rng.normal(size=s).astype(np.float32) for s in ((37, 999), (37, 999), 999))
    total, normed = launch(functools.partial(add_norm, eps=EPS), x, delta, scale)
    check("add_norm, sum", total, x + delta, 0)
    wide = np.float64(total)
    wide = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + EPS) * scale
    check("add_norm, norm", normed, wide, 3e-7)


def append():
    case = Append(37, n_slots=101, n_kv_heads=3, group=5, head_dim=80, bias=True, dtype="bfloat16")
    inputs = make_inputs(case)
    results = launch(functools.partial(append_kv, eps=EPS), **inputs)
    verify_append(inputs, *results)
    unused = np.setdiff1d(np.arange(1, case.n_slots), inputs["slots"])
    for name, pool in zip(("k_pool", "v_pool"), results[1:], strict=True):
        np.testing.assert_array_equal(pool[unused], np.asarray(inputs[name])[unused])


def rank():
    rng, context = np.random.default_rng(0), 1001
    end, here, ahead, committed, live = make_rows(rng, n_rows=4, n_queries=7, context=context)
    scores = make_coded(rng, live, n_layers=2, n_heads=3, group=5, context=context)
    for lists, shifted in ((1, True), (3, False)):
        statics = {"lists": lists, "drafts": 6, "context": context}
        rows = end, here, ahead if shifted else None, committed
        call = functools.partial(rank_positions, group=5, **statics, ages=4)
        actual = launch(call, scores, *rows)
        expected = ranking64(coded_probabilities(scores, 5), *rows, **statics)
        check("rank_positions", actual, expected, 1e-3)


def select():
    rng = np.random.default_rng(0)
    for size, k in ((1001, 50), (9001, 451)):  # in registers, and not
        scores = (rng.integers(0, 99, (2, 5, 3, size)) / 99).astype(np.float16)
        candidates = np.array([size, 0, 1, k, size - 1], np.int32)
        count = np.minimum(candidates, k)
        actual = launch(functools.partial(select_positions, k=k), scores, candidates, count)
        np.testing.assert_array_equal(actual, selected64(scores, candidates, count, k))
        print(f"select_positions, {size}: exact")


def sampling():
    rng = np.random.default_rng(0)
    vocab = 5003
    logits, args = sample_case(rng, 7, vocab)
    for filters in (False, True):
        result = launch(functools.partial(sample, filters=filters), logits, args)
        verify_sample(logits, args, filters, *result)
    rows, tokens = (jnp.asarray(rng.integers(0, n, 7), jnp.int32) for n in (7, vocab))
    actual, *_ = launch(token_logprobs, logits, tokens, args, rows=rows)
    verify_logprobs(logits, args, rows, tokens, actual)


def chunks():
    """Rows that do not fill a block, and rows that do; all slots of the pools."""
    for heads, head_dim in ((3, 80), (8, 128)):
        case = Pack(5, 12, n_slots=37, n_kv_heads=heads, head_dim=head_dim, chunks=3)
        pools, packed, slots = make_chunks(case, padding=0)
        slots[5:8] = 0
        pack = functools.partial(pack_kv, chunks=case.chunks)
        assert_packed(launch(pack, pools, slots), pools, slots)
        results = launch(unpack_kv, pools, packed, slots)
        assert_unpacked(results, unpacked_by_numpy(pools, packed, slots))
        print(f"pack_kv, unpack_kv, {heads} heads of {head_dim}: exact")


OPS = {
    "fused_attention": attention,
    "matmul": product,
    "add_norm": norm,
    "append_kv": append,
    "rank_positions": rank,
    "select_positions": select,
    "sample_tokens": sampling,
    "pack_kv": chunks,
}


def main() -> None:
    warnings.filterwarnings("ignore", "The Pallas Triton backend is deprecated")
    if DEVICE.platform == "gpu" and os.environ.get("XLA_PYTHON_CLIENT_ALLOCATOR") != "platform":
        sys.exit("arrays share allocations: set XLA_PYTHON_CLIENT_ALLOCATOR=platform")
    names = sys.argv[1:] or list(OPS)
    with jax.default_device(jax.devices("cpu")[0]):
        for name in names:
            start = time.perf_counter()
            OPS[name]()
            print(f"{name}: {time.perf_counter() - start:.0f} s", flush=True)
    print(f"all results are right; {n_kernels} launches on {DEVICE.device_kind}")


if __name__ == "__main__":
    main()
