"""Every kernel lowers for a GPU without one, and the package imports quietly."""

import functools
import itertools
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import Shape, random_step

from pallas_kernels import (
    append_kv,
    fused_attention,
    matmul_parts,
    pack_kv,
    select_positions,
    unpack_kv,
)
from pallas_kernels.fused_attention.tiles import choose_tiles
from pallas_kernels.gpus import GPUS
from pallas_kernels.lowering import lower_for_cuda
from pallas_kernels.shapes import Append, Pack

TRITON_CALL = "__gpu$xla.gpu.triton"
MOSAIC_CALL = "mosaic_gpu_v2"
as_kernel = {"implementation": "pallas", "interpret": False}


def shape_of(x):
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def arrays_of(step):
    return jax.tree.map(shape_of, {name: step.arguments[name] for name in step.arrays})


@pytest.mark.parametrize("device_kind", GPUS)
def test_fused_attention_for_other_gpus(device_kind):
    """sm_80, 89, 90 and 100: what a multiprocessor cannot hold is not asked of it."""
    shape = Shape(n_kv_heads=8, group=4, head_dim=128, context=600, n_queries=9, score_queries=9)
    step = random_step(shape, np.random.default_rng(0)).cast(jnp.bfloat16)
    run = functools.partial(fused_attention, **step.statics, **as_kernel)
    text = lower_for_cuda(run, **arrays_of(step), device_kind=device_kind).as_text()
    assert text.count(TRITON_CALL) == 3
    gpu = GPUS[device_kind]
    for n_packed, head_dim in itertools.product((1, 20, 36, 256), (64, 128, 256)):
        tiles = choose_tiles(n_packed, 4, head_dim, jnp.dtype(jnp.bfloat16), gpu)
        for tile in tiles[:2]:
            held = tile.rows + 2 * tile.block * (tile.stages + 1) // 2
            assert held * head_dim * 2 <= gpu.shared_memory


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(
    ("n_kv_heads", "group", "head_dim"),
    [(2, 4, 128), (2, 7, 64), (3, 5, 80), (1, 1, 96), (1, 16, 128), (1, 3, 256)],
)
def test_fused_attention(n_kv_heads, group, head_dim, dtype):
    shape = Shape(
        n_kv_heads=n_kv_heads, group=group, head_dim=head_dim, context=600, n_scored=1,
        score_queries=4, chunk=40,
    )  # fmt: skip
    step = random_step(shape, np.random.default_rng(0)).cast(dtype)
    run = functools.partial(fused_attention, **step.statics, **as_kernel)
    text = lower_for_cuda(run, **arrays_of(step)).as_text()
    assert text.count(TRITON_CALL) == 3  # verify; prefill; drafts and what is to be merged


def test_layers_share_their_kernels():
    step = random_step(Shape(n_verify=0, n_prefill=0), np.random.default_rng(0))

    def run(**arrays):
        statics = step.statics | as_kernel
        return [fused_attention(**arrays, **(statics | {"layer": layer})) for layer in range(2)]

    text = lower_for_cuda(run, **arrays_of(step)).as_text()
    assert text.count(TRITON_CALL) == 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(
    ("n_kv_heads", "group", "head_dim"),
    [(8, 4, 128), (8, 8, 64), (3, 5, 80), (2, 2, 96), (1, 16, 256), (5, 1, 20)],
)
@pytest.mark.parametrize("norms", [True, False])
def test_append_kv(n_kv_heads, group, head_dim, norms, dtype):
    case = Append(
        248, n_slots=512, n_kv_heads=n_kv_heads, group=group, head_dim=head_dim, bias=not norms,
        norms=norms, parts=1 + norms, dtype=dtype,
    )  # fmt: skip
    run = functools.partial(append_kv, **as_kernel)
    text = lower_for_cuda(run, **jax.eval_shape(case.inputs)).as_text()
    assert text.count(TRITON_CALL) == 1


@pytest.mark.parametrize("device_kind", GPUS)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_matmul(dtype, device_kind):
    """A kernel for Hopper, which layers share; XLA everywhere else, and in float32."""
    x = jax.ShapeDtypeStruct((248, 4096), dtype)
    weights = [jax.ShapeDtypeStruct((4096, 4096), dtype)] * 3

    def run(x, weights):
        return [matmul_parts(x, weight, **as_kernel) for weight in weights]

    text = lower_for_cuda(run, x, weights, device_kind=device_kind).as_text()
    hopper = GPUS[device_kind].capability == (9, 0) and dtype == jnp.bfloat16
    assert text.count(MOSAIC_CALL) == (1 if hopper else 0)
    assert text.count("stablehlo.dot_general") == (0 if hopper else 3)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("size", [100, 20000])
def test_select_positions(size, dtype):
    scores = jax.ShapeDtypeStruct((2, 3, 2, size), dtype)
    rows = jax.ShapeDtypeStruct((3,), jnp.int32)
    run = functools.partial(select_positions, k=50, **as_kernel)
    assert TRITON_CALL in lower_for_cuda(run, scores, rows, rows).as_text()


@pytest.mark.parametrize("device_kind", GPUS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(("n_kv_heads", "head_dim"), [(8, 128), (3, 64), (1, 80), (1, 5)])
def test_pack_kv(n_kv_heads, head_dim, dtype, device_kind):
    """One launch for all layers, each way; what comes back is written in place."""
    case = Pack(
        3, 48, 512, n_kv_heads=n_kv_heads, head_dim=head_dim, chunks=2, back=True, dtype=dtype
    )
    arrays = jax.eval_shape(case.inputs)
    run = functools.partial(unpack_kv, **as_kernel)
    text = lower_for_cuda(run, **arrays, device_kind=device_kind).as_text()
    assert text.count(TRITON_CALL) == 1
    assert text.count("output_operand_alias<") == 6
    del arrays["packed"]
    run = functools.partial(pack_kv, chunks=2, **as_kernel)
    text = lower_for_cuda(run, **arrays, device_kind=device_kind).as_text()
    assert text.count(TRITON_CALL) == 1


def test_donations_of_a_jitted_function_are_kept():
    run = jax.jit(lambda x, n: x * n, static_argnums=1, donate_argnums=0)
    text = lower_for_cuda(run, jnp.zeros((4,)), 3).as_text()
    assert "tf.aliasing_output" in text or "jax.buffer_donor" in text


def test_import_is_quiet():
    program = "import pallas_kernels, pallas_kernels.lowering\n" + "".join(
        f"import pallas_kernels.{op}.pallas_triton\n"
        for op in ("append_kv", "fused_attention", "pack_kv", "select_positions")
    )
    program += "import pallas_kernels.matmul.mosaic_gpu\n"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
