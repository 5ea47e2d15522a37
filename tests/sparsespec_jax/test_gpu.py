"""The engine on an NVIDIA GPU: compiled kernels against XLA, and speculation against none."""

import dataclasses

import jax
import numpy as np
import pytest

from sparsespec_jax.config import EngineConfig, SpeculationConfig
from sparsespec_jax.engine.engine import Engine
from sparsespec_jax.engine.plan import Bucket
from sparsespec_jax.models.config import ModelConfig
from sparsespec_jax.models.parameters import init_params
from sparsespec_jax.sampling.params import SamplingParams
from tests.engine_runs import assert_same, run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs an NVIDIA GPU"),
]

MODEL = ModelConfig(
    architecture="Qwen3ForCausalLM",
    vocab_size=997,
    hidden_size=256,
    intermediate_size=512,
    num_layers=3,
    num_heads=6,
    num_kv_heads=2,
    head_dim=64,
    max_position_embeddings=1024,
    qk_norm=True,
    eos_token_ids=(3,),
)
WIDTH = 1152


def make_engine(
    dtype: str, method: str, implementation: str = "auto", model: ModelConfig = MODEL, **config
) -> Engine:
    params = init_params(model, jax.random.key(0), np.dtype(dtype))
    settings = dict(
        max_batch=8,
        prefill_chunk=64,
        prefill_rows=2,
        batch_buckets=(8,),
        context_buckets=(WIDTH,),
        implementation=implementation,
        kv_cache_memory=0.1,
        seed=0,
    )
    speculation = SpeculationConfig(method=method, k=4, min_budget=16)
    return Engine(model, params, EngineConfig(**settings | config), speculation)


def requests() -> list[tuple[np.ndarray, SamplingParams]]:
    rng = np.random.default_rng(0)
    return [
        (
            rng.integers(4, MODEL.vocab_size, int(rng.integers(1, 500))),
            SamplingParams(
                temperature=0.65 if number % 3 else 0.0,
                top_p=0.9 if number % 4 == 0 else 1.0,
                seed=number,
                max_tokens=200,
                logprobs=2,
            ),
        )
        for number in range(12)
    ]


def outputs(engine: Engine) -> list[dict]:
    found = run(engine, requests())
    engine.close()
    return found


def test_float32_output_is_that_of_plain_decoding_in_plain_xla():
    expected = outputs(make_engine("float32", "none", "xla"))
    for method in ("none", "pillar"):
        assert_same(outputs(make_engine("float32", method, "pallas")), expected)


def test_bfloat16_output_differs_from_plain_decoding_only_after_a_near_tie():
    expected = outputs(make_engine("bfloat16", "none"))
    assert_near(outputs(make_engine("bfloat16", "pillar")), expected)


def assert_near(found: list[dict], expected: list[dict]) -> None:
    """Until a request first differs its logprobs agree to bfloat16's precision."""
    for a, b in zip(found, expected, strict=True):
        pairs = zip(a["tokens"], b["tokens"], strict=False)
        same = next((i for i, (x, y) in enumerate(pairs) if x != y), len(a["tokens"]))
        difference = np.subtract(a["logprobs"][:same], b["logprobs"][:same])
        assert np.abs(difference).max(initial=0) < 0.15


@pytest.mark.parametrize(
    "bucket", [Bucket(8, 2, 0, WIDTH), Bucket(8, 2, 2, WIDTH), Bucket(0, 0, 2, WIDTH)]
)
def test_a_step_writes_the_pool_in_place(bucket):
    engine = make_engine("bfloat16", "pillar", max_batch=2048, kv_cache_memory=2**30)
    temporary = engine._executor.compile(bucket).memory_analysis().temp_size_in_bytes
    engine.close()
    assert temporary < 2**29, "less than half of the pool"


def test_results_do_not_lie_where_temporaries_begin(monkeypatch):
    """Those would move, and with them what XLA has written down of a step's launches."""
    engine = make_engine("bfloat16", "pillar")
    executor, places = engine._executor, []
    dispatch = executor.dispatch

    def noted(bucket, packed):
        result = dispatch(bucket, packed)
        places.append(result.unsafe_buffer_pointer())
        return result

    monkeypatch.setattr(executor, "dispatch", noted)
    pools = [array.unsafe_buffer_pointer() for array in jax.tree.leaves(executor._pools)]
    outputs(engine)
    assert len(places) > 200
    assert not any(0 < place - max(pools) < 2**32 for place in places)


@pytest.mark.skipif(len(jax.devices()) < 2, reason="needs two GPUs")
@pytest.mark.parametrize("overlap", ["resident", "delayed"])
def test_two_gpus_emit_what_one_emits(overlap):
    expected = outputs(make_engine("float32", "none"))
    found = outputs(make_engine("float32", "pillar", tensor_parallel_size=2, overlap=overlap))
    assert_same(found, expected)


@pytest.mark.skipif(len(jax.devices()) < 2, reason="needs two GPUs")
def test_two_gpus_that_write_to_each_others_memory_emit_what_one_emits_up_to_near_ties():
    """Wide enough for `all_reduce`'s kernel, which makes the sums of layers in bfloat16."""
    model = dataclasses.replace(MODEL, hidden_size=1024)
    expected = outputs(make_engine("bfloat16", "none", model=model))
    engine = make_engine("bfloat16", "pillar", model=model, tensor_parallel_size=2)
    if engine._executor._peers is None:
        pytest.skip("a kernel for Hopper GPUs of one process")
    assert_near(outputs(engine), expected)
