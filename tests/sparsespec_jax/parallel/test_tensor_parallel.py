"""A model split over devices emits what it emits on one.

Float32 on a CPU, token by token. Sums over shards round differently, so a near-tie could fall the
other way: with a vocabulary of 97 and random weights the two best scores of a token are closer than
1e-5 about once in 1e5 tokens, and the seeds here have none. Drafts may differ (near-ties among
positions are common), which coupled verification does not let through.
"""

import dataclasses

import jax
import numpy as np
import pytest

from sparsespec_jax import LLM
from sparsespec_jax.config import EngineConfig, SpeculationConfig
from sparsespec_jax.engine.engine import Engine
from sparsespec_jax.engine.plan import Bucket
from sparsespec_jax.kv import offload as offload_module
from sparsespec_jax.parallel.sharding import Placement
from sparsespec_jax.sampling.params import SamplingParams
from tests.engine_runs import SMALL, assert_same, run, sharp_params
from tests.sparsespec_jax.test_lossless import PILLAR, PLAIN, QWEN3, prompts_and_params

# Two KV heads, which four and eight devices have copies of; a vocabulary that divides by none.
MODEL = dataclasses.replace(QWEN3, num_heads=8, vocab_size=97)
TOKEN_BYTES = MODEL.kv_bytes_per_token(np.float32)
COMPILED = {}  # steps, by all that they depend on
COLLECTIVES = ("all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter")


def make_engine(
    devices: int,
    speculation: SpeculationConfig = PILLAR,
    placement: Placement | None = None,
    **config,
) -> Engine:
    config = EngineConfig(tensor_parallel_size=devices, **SMALL | config)
    engine = Engine(MODEL, sharp_params(MODEL), config, speculation, placement)
    if placement is None:
        engine._executor._compiled = COMPILED.setdefault((config, speculation), {})
    return engine


def outputs(engine: Engine) -> list[dict]:
    found = run(engine, prompts_and_params())
    engine.close()
    return found


def test_plain_decoding_over_an_axis_of_a_larger_mesh(expected):
    """The other axis holds replicas; the axes' types are the caller's."""
    placement = Placement(jax.make_mesh((2, 2), ("data", "model")), axis="model")
    assert_same(outputs(make_engine(1, PLAIN, placement)), expected)


@pytest.mark.parametrize(
    ("devices", "config"), [(2, {}), (4, {"overlap": "delayed"}), (8, {"overlap": "sync"})]
)
def test_drafts_and_verification(devices, config, expected):
    """Every sampling parameter, several completions of one prompt, prompts of many chunks."""
    found = outputs(make_engine(devices, **config))
    assert_same(found, expected)
    accepted = sum(entry["stats"].full_accepted for entry in found)
    drafted = PILLAR.k * sum(entry["stats"].full_cycles for entry in found)
    assert 0.2 < accepted / drafted < 0.95, "the test must see acceptance and rejection"
    assert sum(entry["stats"].shared_tokens for entry in found)


def test_kv_that_moves_to_host_memory_and_back(expected, monkeypatch):
    monkeypatch.setattr(offload_module, "CHUNK_BYTES", 16 * TOKEN_BYTES // 2)
    engine = make_engine(2, kv_cache_memory=210 * TOKEN_BYTES // 2)
    assert engine.stats().slots == 209, "a device holds half of each token"
    found = run(engine, prompts_and_params())
    stats = engine.stats()
    engine.close()
    assert_same(found, expected)
    assert stats.kv.parked
    assert stats.kv.evicted
    assert stats.slots_used == stats.tokens_offloaded == 0


def test_rejection_verification_samples_what_one_device_samples():
    """With everything selected, so that near-ties among positions change no draft."""
    speculation = SpeculationConfig(k=3, min_budget=1000, verification="rejection")
    requests = [prompts_and_params()[number] for number in (0, 1, 5)]
    found = []
    for devices in (1, 4):
        engine = make_engine(devices, speculation, max_batch=3, batch_buckets=(3,))
        found.append(run(engine, requests))
        engine.close()
    assert_same(*found)


def collectives(compiled: jax.stages.Compiled) -> list[tuple[str, str]]:
    """Operation and result type of every collective of a program."""
    found = []
    for line in compiled.as_text().splitlines():
        for name in COLLECTIVES:
            if f" {name}(" in line or f" {name}-start(" in line:
                found.append((name, line.split(" = ")[1].split(f" {name}")[0]))
    return found


def test_a_step_reduces_twice_a_layer_and_gathers_a_few_words_a_row():
    engine = make_engine(2)
    samples, emitting = 4 + 5 * 2 + 2, (2 + 2) * 5
    found = collectives(engine._executor.lower(Bucket(4, 2, 2, 384, logprobs=0)).compile())
    reduced = [kind for name, kind in found if name == "all-reduce"]
    assert len(reduced) == 1 + 2 * MODEL.num_layers, "the embedding's, and two a layer"
    assert set(reduced) == {f"f32[{4 + 5 * 2 + 16 * 2},{MODEL.hidden_size}]{{1,0}}"}
    others = [(name, kind.split("{")[0]) for name, kind in found if name != "all-reduce"]
    assert sorted(others) == sorted(
        [("all-gather", f"{dtype}[2,{samples}]") for dtype in ("s32", "f32", "f32")]
        + [("all-gather", f"f32[2,{emitting}]")] * 2
    ), "the best token of each row with its score and peak; scores and normalisers for logprobs"

    found = collectives(engine._executor.lower(Bucket(4, 2, 2, 384, filters=True)).compile())
    exchanged = [kind for name, kind in found if name == "all-to-all"]
    assert len(exchanged) == 1, "filters see whole rows, but each device only its share of them"
    assert all("384" not in kind for _, kind in found), "no page table, no history"
    engine.close()


def test_one_device_runs_the_program_without_shards():
    engine = make_engine(1)
    text = engine._executor.lower(Bucket(4, 2, 2, 384, filters=True, logprobs=0)).as_text()
    engine.close()
    for word in ("manual_computation", "all_reduce", "all_gather", "all_to_all", "partition_id"):
        assert word not in text


def test_the_bundled_model_on_two_devices():
    """From files to text: each device reads its part."""
    prompt = "Use each of the numbers 5, 7, 9 exactly once to make 26. Answer with the steps."
    params = SamplingParams(temperature=0.65, seed=3, max_tokens=24, n=2)
    found = []
    for devices in (1, 2):
        config = EngineConfig(
            tensor_parallel_size=devices, max_batch=2, batch_buckets=(2,), max_context=256
        )
        with LLM(engine=config, speculation=PLAIN) as llm:
            [output] = llm.generate([llm.chat_prompt(prompt)], params)
            found.append([completion.token_ids for completion in output.outputs])
            shards = llm.engine._executor._params["layers"][0]["down"].addressable_shards
            assert len(shards) == devices
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("changes", "devices", "message"),
    [
        ({"num_heads": 6}, 4, r"num_heads=6 does not divide among tensor_parallel_size=4 .*multi"),
        (
            {"intermediate_size": 50},
            4,
            r"intermediate_size=50 does not divide among tensor_par.*=4",
        ),
        ({"num_heads": 12, "num_kv_heads": 6}, 4, r"num_kv_heads=6 .*=4 .*multiple of the other"),
        ({"vocab_size": 9}, 8, r"vocab_size=9 leaves .*=8 devices nothing: .* more than 14"),
        ({}, 16, r"tensor_parallel_size=16 is more than the devices that there are: 8"),
    ],
)
def test_what_does_not_divide_is_named_before_anything_is_allocated(changes, devices, message):
    model = dataclasses.replace(MODEL, **changes)
    with pytest.raises(ValueError, match=message):
        Engine(model, {"embedding": None}, EngineConfig(tensor_parallel_size=devices))


def test_a_mesh_and_a_size_that_disagree():
    placement = Placement(jax.make_mesh((2,), ("x",)), axis="x")
    with pytest.raises(ValueError, match=r"tensor_parallel_size=4 is not the size of .*'x', 2"):
        make_engine(4, placement=placement)
    with pytest.raises(ValueError, match=r"axis='tp' is not an axis of the mesh.*'x'"):
        Placement(placement.mesh)
