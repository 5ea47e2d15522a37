"""Every kernel compiles to machine code of an H200: what no lowering shows is whether shared memory
suffices, and whether something is copied that should be in place."""

import pytest

from tests.gpu_compiler import compile_for_h200

pytestmark = [pytest.mark.network, pytest.mark.slow]


def test_attention_of_every_head_size_and_group():
    """But for that of Qwen3-8B, which `test_step_lowering` compiles with all of a step."""
    temp = compile_for_h200("""
import functools
import jax.numpy as jnp
import numpy as np
from attention_cases import Shape, random_step
from pallas_kernels import fused_attention

result, kernel = {}, {"implementation": "pallas", "interpret": False}
for n_kv_heads, group, head_dim in [
    (2, 7, 64), (3, 5, 80), (4, 1, 96), (2, 16, 128), (2, 3, 256)
]:
    shape = Shape(
        n_kv_heads=n_kv_heads, group=group, head_dim=head_dim, context=1000, n_drafts=9,
        n_selected=50, max_recent=20, n_verify=4, n_queries=9, n_prefill=2, chunk=64,
        n_scored=2, score_queries=9,
    )
    step = random_step(shape, np.random.default_rng(0)).cast(jnp.bfloat16)
    arrays = {name: step.arguments[name] for name in step.arrays}
    pool = jax.ShapeDtypeStruct((1 << 20, n_kv_heads, head_dim), jnp.bfloat16)
    arrays |= {"k_pool": pool, "v_pool": pool}
    name = f"{n_kv_heads} x {group} x {head_dim}"
    attend = functools.partial(fused_attention, **step.statics, **kernel)
    result[name] = temp_bytes(attend, **arrays)
""")
    assert len(temp) == 5
    assert max(temp.values()) < 64 << 20, "the pool, or a part of it, was copied"


def test_the_other_ops_at_the_shapes_of_a_large_step():
    temp = compile_for_h200("""
import functools
from pallas_kernels import add_norm, append_kv, rank_positions, select_positions
from pallas_kernels.shapes import H200

kernel = {"implementation": "pallas", "interpret": False}

def abstract(op, case):
    return jax.eval_shape(H200[op][case].inputs)

append = functools.partial(append_kv, **kernel)
scores, *rows = abstract("rank_positions", "shifted")
rank = functools.partial(rank_positions, group=4, lists=1, drafts=8, context=8192, **kernel)
select = functools.partial(select_positions, k=410, **kernel)
result = {
    "append_kv": temp_bytes(
        jax.jit(append, donate_argnames=("k_pool", "v_pool")), **abstract("append_kv", "mixed")
    ),
    "rank_positions": temp_bytes(rank, scores, *rows),
    "select_positions": temp_bytes(select, *abstract("select_positions", "shared")),
}
""")
    assert temp.pop("rank_positions") < 64 << 20, "more than a few rankings: the codes are 1.3 GB"
    assert max(temp.values()) < 1 << 20


def test_chunks_of_models_with_few_and_many_layers():
    """Nothing but pointers in temporary memory: pools of 0.1 GiB each are written in place. Those
    of 126 layers take more pointers than a kernel has, so they take two."""
    temp = compile_for_h200("""
import dataclasses
import functools
from pallas_kernels import pack_kv, unpack_kv
from pallas_kernels.shapes import H200

kernel = {"implementation": "pallas", "interpret": False}
unpack = jax.jit(functools.partial(unpack_kv, **kernel), donate_argnames="pools")
result = {}
for name, case in H200["pack_kv"].items():
    for n_layers in (2, 36, 126):
        shapes = jax.eval_shape(dataclasses.replace(case, n_layers=n_layers).inputs)
        op = unpack if case.back else functools.partial(pack_kv, chunks=case.chunks, **kernel)
        result[f"{name}, {n_layers} layers"] = temp_bytes(op, **shapes)
    other = dataclasses.replace(case, n_layers=3, n_kv_heads=3, head_dim=80, dtype="float32")
    result[f"{name}, rows of 240"] = temp_bytes(op, **jax.eval_shape(other.inputs))
""")
    assert len(temp) == 5 * 4
    assert max(temp.values()) < 64 << 10


def test_matmuls_of_a_large_step():
    temp = compile_for_h200(
        """
import functools
from pallas_kernels import matmul, matmul_parts
from pallas_kernels.shapes import H200

result = {}
for name, case in H200["matmul"].items():
    op = functools.partial(
        matmul_parts if case.in_parts else matmul, implementation="pallas", interpret=False
    )
    shapes = jax.eval_shape(case.inputs)
    assert "mosaic_gpu_v2" in lower_for_cuda(op, *shapes).as_text()
    result[name] = temp_bytes(op, *shapes)
""",
        mosaic=True,
    )
    assert max(temp.values()) < 1 << 20
