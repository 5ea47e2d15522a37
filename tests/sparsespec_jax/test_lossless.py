"""Losslessness: with the same seeds, every way of drafting emits the tokens of plain decoding.

Float32 on a CPU, compared token by token. The weights are random, scaled up so that drafts are
partly right: both acceptance and rejection happen all the time.
"""

import dataclasses
from collections import Counter

import numpy as np
import pytest

from sparsespec_jax import LLM
from sparsespec_jax.config import EngineConfig, SpeculationConfig
from sparsespec_jax.countdown import held_out
from sparsespec_jax.engine.engine import Engine
from sparsespec_jax.kv import manager as manager_module
from sparsespec_jax.models.config import ModelConfig, RopeConfig
from sparsespec_jax.models.decoder import forward
from sparsespec_jax.sampling.params import SamplingParams, sample_seed
from tests.engine_runs import SMALL, assert_same, run, sharp_params

VOCAB, EOS, CONTEXT = 96, (3, 5), 256
QWEN3 = ModelConfig(
    architecture="Qwen3ForCausalLM",
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_position_embeddings=CONTEXT,
    qk_norm=True,
    tie_word_embeddings=True,
    eos_token_ids=EOS,
)
MODELS = {
    "qwen3": QWEN3,
    "qwen2": dataclasses.replace(
        QWEN3, architecture="Qwen2ForCausalLM", qk_norm=False, qkv_bias=True, num_heads=6
    ),
    "llama": dataclasses.replace(
        QWEN3,
        architecture="LlamaForCausalLM",
        qk_norm=False,
        tie_word_embeddings=False,
        rope=RopeConfig(kind="llama3", factor=4.0, original_max_position_embeddings=64),
    ),
    "yarn": dataclasses.replace(
        QWEN3, rope=RopeConfig(kind="yarn", factor=4.0, original_max_position_embeddings=64)
    ),
}
PILLAR = SpeculationConfig(k=4, sparsity=0.05, min_budget=12)
PLAIN = SpeculationConfig(method="none")
COMPILED = {}  # steps, by all that they depend on: compiling takes most of the time


def prompts_and_params() -> list[tuple[np.ndarray, SamplingParams]]:
    """A mixed batch: greedy and sampled, n > 1, filters, penalties, bias, stops, all lengths."""
    rng = np.random.default_rng(7)

    def prompt(length: int) -> np.ndarray:
        return rng.integers(6, VOCAB, length)

    common = dict(seed=11, temperature=0.65, max_tokens=45)
    shared = prompt(37)
    return [
        (prompt(1), SamplingParams(temperature=0.0, max_tokens=60)),
        (prompt(90), SamplingParams(**common)),
        *((shared, SamplingParams(**common | {"seed": sample_seed(5, i)})) for i in range(3)),
        (prompt(20), SamplingParams(**common, top_k=12, top_p=0.8, min_p=0.02)),
        (prompt(17), SamplingParams(**common, presence_penalty=0.7, frequency_penalty=0.4)),
        (prompt(33), SamplingParams(**common, repetition_penalty=1.3, ignore_eos=True)),
        (prompt(16), SamplingParams(**common, logit_bias={9: 4.0, 10: -100.0}, logprobs=3)),
        (prompt(8), SamplingParams(**common, min_tokens=25, logit_bias={3: 6.0})),
        (prompt(12), SamplingParams(**common, stop_token_ids=tuple(range(20, 30)))),
        (prompt(50), SamplingParams(temperature=1.0, seed=1, max_tokens=1)),
        (prompt(64), SamplingParams(temperature=1.0, seed=2, logprobs=0, logprobs_mode="raw")),
    ]


def make_engine(model: ModelConfig, speculation: SpeculationConfig, **config) -> Engine:
    config = EngineConfig(**SMALL | config)
    engine = Engine(model, sharp_params(model), config, speculation)
    engine._executor._compiled = COMPILED.setdefault((model, config, speculation), {})
    return engine


@pytest.fixture(scope="module")
def plain_outputs():
    """What plain decoding emits, by model; computed when first asked for."""
    outputs = {}

    def of(name: str) -> list[dict]:
        if name not in outputs:
            engine = make_engine(MODELS[name], PLAIN)
            outputs[name] = run(engine, prompts_and_params())
            engine.close()
        return outputs[name]

    return of


@pytest.mark.parametrize("name", MODELS)
def test_pillar_emits_what_plain_decoding_emits(name, plain_outputs):
    engine = make_engine(MODELS[name], PILLAR)
    found = run(engine, prompts_and_params())
    engine.close()
    assert_same(found, plain_outputs(name))
    accepted = sum(entry["stats"].full_accepted for entry in found)
    drafted = 4 * sum(entry["stats"].full_cycles for entry in found)
    assert 0.2 < accepted / drafted < 0.95, "the test must see acceptance and rejection"


@pytest.mark.parametrize(
    ("speculation", "config"),
    [
        (
            SpeculationConfig(k=1, min_budget=1000),
            {"prefill_chunk": 5, "prefill_rows": 3, "max_batch": 2},
        ),
        (SpeculationConfig(k=15, sparsity=0.02, min_budget=4), {"overlap": "sync"}),
        (
            SpeculationConfig(k=3, sparsity=0.3, min_budget=1),
            {"overlap": "delayed", "max_batch": 3},
        ),
    ],
    ids=["k=1, everything selected, small chunks", "k=15, sync", "k=3, delayed"],
)
def test_no_setting_changes_the_output(speculation, config, plain_outputs):
    engine = make_engine(MODELS["qwen3"], speculation, **config)
    found = run(engine, prompts_and_params())
    engine.close()
    assert_same(found, plain_outputs("qwen3"))


def test_nor_do_a_small_pool_and_many_buckets(monkeypatch):
    """With requests whose steps have the same features: each bucket is a step to compile."""
    monkeypatch.setattr(manager_module, "LOW_WATERMARK", 0)  # rows come and go
    monkeypatch.setattr(manager_module, "HIGH_WATERMARK", 1)
    pool = dict(kv_cache_memory=170 * 512, batch_buckets=None, context_buckets=None)
    engine = make_engine(MODELS["qwen3"], PILLAR, **pool)
    requests = [
        (prompt, dataclasses.replace(params, ignore_eos=True))
        for prompt, params in prompts_and_params()[:5]
    ]
    found = run(engine, requests)
    assert engine.stats().kv.parked
    assert len({bucket.drafts for bucket in engine._executor._compiled}) > 2
    engine.close()
    plain = make_engine(MODELS["qwen3"], PLAIN)
    assert_same(found, run(plain, requests))
    plain.close()


def test_a_request_alone_emits_what_it_emits_in_a_batch(plain_outputs):
    engine = make_engine(MODELS["qwen3"], PILLAR)
    requests = prompts_and_params()
    for number in (1, 2, 5, 6, 9):
        assert_same(run(engine, [requests[number]]), [plain_outputs("qwen3")[number]])
    engine.close()


def test_rejection_verification_is_exact_for_greedy_requests_and_valid_for_sampled_ones(
    plain_outputs,
):
    rejection = dataclasses.replace(PILLAR, verification="rejection")
    engine = make_engine(MODELS["qwen3"], rejection)
    requests = prompts_and_params()
    found = run(engine, [requests[0], requests[5], requests[10]])
    engine.close()
    assert_same(found[:1], plain_outputs("qwen3")[:1])
    assert all(entry["tokens"] for entry in found)
    assert set(found[2]["tokens"][:-1]).isdisjoint(range(20, 30)), "a stop id ends the request"


def test_rejection_verification_samples_the_target_distribution_with_filters_on():
    """Chi-square of all continuations of three tokens against their exact probabilities."""
    model, top_k, temperature, samples = MODELS["qwen3"], 3, 1.3, 1500
    speculation = SpeculationConfig(k=2, sparsity=0.01, min_budget=24, verification="rejection")
    batch = dict(max_batch=64, batch_buckets=(64,), prefill_rows=16)
    engine = make_engine(model, speculation, **batch)
    prompt = np.random.default_rng(3).integers(6, VOCAB, 40)
    params = SamplingParams(temperature=temperature, top_k=top_k, max_tokens=3, ignore_eos=True)
    found = run(engine, [(prompt, params.with_seed(seed)) for seed in range(samples)])
    weights = engine._executor._params
    drafted = sum(entry["stats"].drafted_at.sum() for entry in found)
    accepted = sum(entry["stats"].accepted_at.sum() for entry in found)
    assert 0.2 < accepted / drafted < 0.95, "the test must see acceptance and rejection"

    expected = {(): 1.0}
    for _ in range(3):
        tokens = np.array([[*prompt, *continuation] for continuation in expected])
        logits = np.asarray(forward(weights, tokens, model)[:, -1], np.float64) / temperature
        longer = {}
        for (continuation, share), row in zip(expected.items(), logits, strict=True):
            best = np.argsort(-row)[:top_k]
            odds = np.exp(row[best] - row[best].max())
            for token, odd in zip(best.tolist(), odds / odds.sum(), strict=True):
                longer[*continuation, token] = share * odd
        expected = longer
    engine.close()

    counts = Counter(tuple(entry["tokens"]) for entry in found)
    assert counts.keys() <= expected.keys(), "only tokens that the filter keeps"
    shares = np.array(list(expected.values()))
    observed = np.array([counts[continuation] for continuation in expected])
    often = samples * shares >= 5
    observed = np.append(observed[often], observed[~often].sum())
    wanted = samples * np.append(shares[often], shares[~often].sum())
    statistic = ((observed - wanted) ** 2 / np.maximum(wanted, 1e-9)).sum()
    degrees = len(wanted) - 1
    # Wilson & Hilferty, 1931: the cube root of a chi-square variable is almost normal.
    z = ((statistic / degrees) ** (1 / 3) - (1 - 2 / (9 * degrees))) / (2 / (9 * degrees)) ** 0.5
    assert z < 3.3, f"chi-square {statistic:.1f} of {degrees} degrees of freedom"


def test_the_bundled_model_thinks_the_same_with_and_without_drafts():
    problems = held_out(3, seed=4)
    params = [
        SamplingParams(temperature=0.0 if number == 2 else 0.65, seed=number, max_tokens=100)
        for number in range(3)
    ]
    texts = {}
    for speculation in (PLAIN, SpeculationConfig(min_budget=32)):
        config = EngineConfig(max_batch=3, batch_buckets=(3,), max_context=512)
        with LLM(engine=config, speculation=speculation) as llm:
            prompts = [llm.chat_prompt(problem.prompt()) for problem in problems]
            outputs = llm.generate(prompts, params)
            texts[speculation] = [output.outputs[0].token_ids for output in outputs]
    plain, drafted = texts.values()
    assert drafted == plain
    assert all(len(tokens) > 50 for tokens in plain)
