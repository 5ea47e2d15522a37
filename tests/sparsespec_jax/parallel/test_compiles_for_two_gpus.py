"""The step of two GPUs as machine code: what crosses between them, and what memory it takes."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.all_reduce import Peers
from pallas_kernels.all_reduce.peers import Mailboxes
from sparsespec_jax.config import SpeculationConfig
from sparsespec_jax.drafters import make_drafter
from sparsespec_jax.engine.buckets import Buckets
from sparsespec_jax.engine.plan import Bucket
from sparsespec_jax.engine.state import initial_state, state_shardings
from sparsespec_jax.engine.step import Step
from sparsespec_jax.models.parameters import describe, map_specs
from sparsespec_jax.parallel.collectives import Shards
from sparsespec_jax.parallel.model_shards import divisible, shard_of
from sparsespec_jax.parallel.sharding import Placement
from tests.gpu_compiler import compile_for_h200
from tests.sparsespec_jax.engine.test_step_lowering import QWEN3_8B, SLOTS

BUCKET = Bucket(121, 15, 0, 8320)
KERNELS = "append_kv", "draft_attention", "causal_attention", "mosaic_gpu_v2", "sample_scan"
TOKENS = 121 + 15 * 9


def make_peers(placement: Placement) -> Peers:
    boxes = Mailboxes(placement.shards, 512, QWEN3_8B.hidden_size)
    return Peers(
        *(
            jax.ShapeDtypeStruct(
                (placement.shards, words), jnp.int32, sharding=placement.of("lists", None)
            )
            for words in (1 + 2 * placement.shards, boxes.size // 4)
        ),
        boxes,
    )


def lower_step(
    placement: Placement, bucket: Bucket, peers: Peers | None = None
) -> jax.stages.Lowered:
    """The step of QWEN3_8B, lowered for the devices of a mesh that need not exist."""
    model, speculation = divisible(QWEN3_8B, placement.shards), SpeculationConfig()
    own = dataclasses.replace(shard_of(model, placement.shards), vocab_size=QWEN3_8B.vocab_size)
    buckets = Buckets(max_batch=128, max_context=8192, k=8, chunk=256, prefill_rows=8)
    drafter = make_drafter(own, speculation, buckets.width, "auto")
    layout = buckets.layout(bucket)
    shards = Shards(placement.shards, placement.axis)
    step = Step(own, drafter, layout, "coupled", "auto", shards)

    def place(array, sharding):
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)

    def state():
        return initial_state(128, buckets.width, drafter.init_state(129), None)

    shardings = state_shardings(placement, drafter)
    states = jax.eval_shape(placement.jit(state, (), shardings))
    params = map_specs(
        lambda spec: jax.ShapeDtypeStruct(
            spec.shape, jnp.bfloat16, sharding=placement.of_param(spec)
        ),
        describe(model),
    )
    pool = jax.ShapeDtypeStruct(
        (SLOTS, 8, 128), jnp.bfloat16, sharding=placement.of(None, "kv_heads", None)
    )
    packed = jax.ShapeDtypeStruct((layout.size,), jnp.int32, sharding=placement.replicated)
    states = jax.tree.map(place, states, jax.tree.broadcast(shardings, states))
    arguments = params, ((pool, pool),) * 2, states, packed, peers
    shardings = jax.tree.map(lambda argument: argument.sharding, arguments)
    jitted = placement.jit(step, shardings, shardings[1:4], donate_argnums=(1, 2))
    return jitted.trace(*arguments).lower(lowering_platforms=("cuda",))


@pytest.mark.network
@pytest.mark.slow
@pytest.mark.parametrize("connected", [False, True])
def test_the_step_of_two_gpus(connected):
    if connected and jax.__version_info__ < (0, 11):
        pytest.skip("this jax cannot compile all_reduce's kernel")
    found = compile_for_h200(
        f"""
import re
from sparsespec_jax.parallel.sharding import Placement
from tests.sparsespec_jax.parallel import test_compiles_for_two_gpus as steps

jax.default_backend = lambda: "gpu"  # "auto" means the kernels
placement = Placement(Mesh(topology.devices, ("tp",)))
peers = steps.make_peers(placement) if {connected} else None
with gpus.target(gpus.GPUS["NVIDIA H200"]):
    compiled = steps.lower_step(placement, steps.BUCKET, peers).compile()
text = compiled.as_text()
names = "all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter"
result = {{
    "temp": compiled.memory_analysis().temp_size_in_bytes,
    "collectives": re.findall(rf"= (.*?) ({{names}})(?:-start)?\\(", text),
    "kernels": [kernel for kernel in steps.KERNELS if kernel in text],
}}
""",
        mosaic=True,
        devices=2,
    )
    assert found["kernels"] == list(KERNELS)
    assert {name for _, name in found["collectives"]} == {"all-reduce", "all-gather"}
    reduced = [kind for kind, name in found["collectives"] if name == "all-reduce"]
    gathered = [kind for kind, name in found["collectives"] if name == "all-gather"]
    states = f"bf16[{TOKENS},{QWEN3_8B.hidden_size}]"
    if connected:
        assert len(reduced) == 1, "the embedding's; a kernel makes the others"
    else:
        assert len(reduced) == 1 + 2 * QWEN3_8B.num_layers, "the embedding's, and two a layer"
    assert {re.search(r"\w+\[[\d,]*\]", kind)[0] for kind in reduced} == {states}
    arrays = sorted(re.findall(rf"\w+\[2,{TOKENS}\]", " ".join(gathered)))
    words = f"[2,{TOKENS}]"
    assert arrays == [f"f32{words}", f"f32{words}", f"s32{words}"], "each row's best token"
    logits, pool = TOKENS * QWEN3_8B.vocab_size // 2 * 4, SLOTS * 4 * 128 * 2
    assert found["temp"] < 2 * logits < pool, "half of the logits, and no pool"
