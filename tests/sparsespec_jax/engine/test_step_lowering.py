"""A whole step lowers for an NVIDIA GPU, with its kernels, on a machine without one."""

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.lowering import lower_for_cuda
from sparsespec_jax.config import SpeculationConfig
from sparsespec_jax.drafters import make_drafter
from sparsespec_jax.engine.buckets import Buckets
from sparsespec_jax.engine.plan import Bucket
from sparsespec_jax.engine.state import initial_state
from sparsespec_jax.engine.step import Step
from sparsespec_jax.models.config import ModelConfig
from sparsespec_jax.models.parameters import describe, map_specs
from tests.gpu_compiler import compile_for_h200

QWEN3_8B = ModelConfig(  # but for the number of layers
    architecture="Qwen3ForCausalLM",
    vocab_size=151936,
    hidden_size=4096,
    intermediate_size=12288,
    num_layers=2,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    max_position_embeddings=8192,
    qk_norm=True,
)
SLOTS = 200_000
TRITON_CALL = "__gpu$xla.gpu.triton"


def step_and_arguments(
    bucket: Bucket, speculation: SpeculationConfig, *, delayed: bool = False
) -> tuple[Step, tuple]:
    """The step of a bucket and the shapes of its arguments; pools and state are to be donated."""
    plain = speculation.method == "none"
    buckets = Buckets(
        max_batch=128,
        max_context=8192,
        k=0 if plain else speculation.k,
        chunk=256,
        prefill_rows=8,
        delayed=delayed,
    )
    drafter = make_drafter(QWEN3_8B, speculation, buckets.width, "auto")
    layout = buckets.layout(bucket)
    step = Step(QWEN3_8B, drafter, layout, speculation.verification, "auto")

    def state():
        hidden = None
        if speculation.verification == "rejection":
            hidden = jnp.zeros((129, speculation.k, QWEN3_8B.hidden_size), jnp.bfloat16)
        return initial_state(128, buckets.width, drafter.init_state(129), hidden)

    params = map_specs(lambda s: jax.ShapeDtypeStruct(s.shape, jnp.bfloat16), describe(QWEN3_8B))
    pool = jax.ShapeDtypeStruct((SLOTS, 8, 128), jnp.bfloat16)
    packed = jax.ShapeDtypeStruct((layout.size,), jnp.int32)
    return step, (params, ((pool, pool),) * 2, jax.eval_shape(state), packed)


def lower(bucket: Bucket, speculation: SpeculationConfig, *, delayed: bool = False) -> str:
    step, arguments = step_and_arguments(bucket, speculation, delayed=delayed)
    return lower_for_cuda(jax.jit(step, donate_argnums=(1, 2)), *arguments).as_text()


@pytest.mark.parametrize(
    ("bucket", "speculation", "kernels"),
    [
        (
            Bucket(128, 15, 0, 8320),
            SpeculationConfig(),
            {"draft_attention", "rank_positions", "select_positions"},
        ),
        (Bucket(128, 15, 8, 8320), SpeculationConfig(score_rule="shifted"), {"draft_attention"}),
        (
            Bucket(32, 4, 8, 2176, filters=True, penalties=True, logprobs=5),
            SpeculationConfig(k=7, verification="rejection"),
            {"draft_attention", "rank_positions"},
        ),
        (Bucket(0, 128, 0, 8320), SpeculationConfig(method="none"), {"causal_attention"}),
        (Bucket(0, 0, 8, 8320), SpeculationConfig(method="none"), {"causal_attention"}),
    ],
    ids=["mixed", "mixed with prefill", "every feature", "plain decoding", "prefill"],
)
def test_a_step_lowers_with_its_kernels(bucket, speculation, kernels, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    text = lower(bucket, speculation)
    assert TRITON_CALL in text
    for kernel in kernels | {"append_kv"}:
        assert kernel in text
    assert "stablehlo.sort" not in text, "sorts are slow and wait for the host"


def test_a_full_step_multiplies_with_kernels(monkeypatch):
    """256 queries: `qkv`, `out`, `gate_up` and `down`, a kernel each that all layers share."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    text = lower(Bucket(121, 15, 0, 8320), SpeculationConfig())
    assert text.count("mosaic_gpu_v2") == 4
    assert "tensor<2x256x8x6x128xbf16>" in text, "two parts that go to append_kv"
    assert "tensor<4x256x4096xbf16>" in text, "four parts that go to add_norm"


@pytest.mark.parametrize("verification", ["coupled", "rejection"])
def test_a_step_whose_rows_the_host_verifies_lowers_as_well(verification, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    bucket = Bucket(32, 4, 8, 2176, filters=True, penalties=True, logprobs=5)
    text = lower(bucket, SpeculationConfig(verification=verification), delayed=True)
    assert TRITON_CALL in text
    for kernel in ("append_kv", "draft_attention", "rank_positions", "select_positions"):
        assert kernel in text
    assert "stablehlo.sort" not in text


@pytest.mark.network
@pytest.mark.slow
def test_a_step_compiles_for_hopper_and_copies_no_pool():
    temp = compile_for_h200("""
import jax
from tests.sparsespec_jax.engine import test_step_lowering as steps
from sparsespec_jax.config import SpeculationConfig
from sparsespec_jax.engine.plan import Bucket

jax.default_backend = lambda: "gpu"  # "auto" means the kernels
step, arguments = steps.step_and_arguments(Bucket(22, 2, 2, 2176), SpeculationConfig())
result = {"step": temp_bytes(jax.jit(step, donate_argnums=(1, 2)), *arguments)}
""")
    pool = SLOTS * 8 * 128 * 2
    assert temp["step"] < pool / 2
