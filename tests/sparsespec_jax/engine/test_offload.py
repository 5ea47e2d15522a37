"""KV that leaves the device: the text is that of a pool with room for everybody."""

import threading
from collections import Counter

import jax
import numpy as np
import pytest

from sparsespec_jax.config import EngineConfig, SpeculationConfig
from sparsespec_jax.engine.engine import Engine
from sparsespec_jax.kv import manager as manager_module
from sparsespec_jax.kv import offload as offload_module
from sparsespec_jax.kv.manager import KvManager
from sparsespec_jax.sampling.params import SamplingParams, sample_seed
from tests.engine_runs import assert_same, run, sharp_params
from tests.sparsespec_jax.test_lossless import PLAIN, QWEN3, VOCAB

TOKEN_BYTES = 2 * 2 * 2 * 16 * 4
LARGEST = 210  # slots that the largest request needs
K = 4
PILLAR = SpeculationConfig(k=K, sparsity=0.05, min_budget=12)
EVERY_FEATURE = dict(top_p=0.8, frequency_penalty=0.5, logprobs=2)
COMMON = dict(temperature=0.65, ignore_eos=True, **EVERY_FEATURE)
COMPILED = {}  # steps, by all that their shapes depend on: compiling takes most of the time


@pytest.fixture(autouse=True)
def small_steps(monkeypatch):
    """Chunks of 16 tokens, and rows that come and go as often as they can."""
    monkeypatch.setattr(offload_module, "CHUNK_BYTES", 16 * TOKEN_BYTES)
    monkeypatch.setattr(manager_module, "LOW_WATERMARK", 0)
    monkeypatch.setattr(manager_module, "HIGH_WATERMARK", 1)


def requests() -> list[tuple[np.ndarray, SamplingParams]]:
    """Short and long prompts, two that several share, greedy and sampled.

    The first needs all that a step can have, so that there is one kind of step.
    """
    rng = np.random.default_rng(3)
    shared = [rng.integers(6, VOCAB, length) for length in (40, 21)]
    common = dict(temperature=0.65, max_tokens=90, ignore_eos=True)
    return [
        (rng.integers(6, VOCAB, 9), SamplingParams(**common, seed=3, **EVERY_FEATURE)),
        *((shared[i % 2], SamplingParams(**common, seed=sample_seed(5, i))) for i in range(6)),
        (rng.integers(6, VOCAB, 120), SamplingParams(temperature=0.0, max_tokens=80)),
        (rng.integers(6, VOCAB, 3), SamplingParams(**common, seed=1, logprobs=2)),
        (rng.integers(6, VOCAB, 33), SamplingParams(**common, seed=2, presence_penalty=0.5)),
        (rng.integers(6, VOCAB, 70), SamplingParams(**common, seed=4)),
    ]


def crowd() -> list[tuple[np.ndarray, SamplingParams]]:
    """Many small requests, so that many run at once."""
    rng = np.random.default_rng(6)
    prompts = [rng.integers(6, VOCAB, length) for length in (3, 5, 40, 4, 6, 9, 60, 2)]
    return [
        (prompt, SamplingParams(**COMMON, seed=number, max_tokens=50 + 3 * number))
        for number, prompt in enumerate(2 * prompts)
    ]


def squeezed() -> list[tuple[np.ndarray, SamplingParams]]:
    """The last is admitted with little room to spare, which the others need before long."""
    rng = np.random.default_rng(7)
    return [
        (rng.integers(6, VOCAB, length), SamplingParams(**COMMON, seed=length, max_tokens=40))
        for length in (9, 9, 9, 9, 150)
    ]


def make_engine(speculation: SpeculationConfig = PILLAR, **changes) -> Engine:
    settings = dict(
        max_batch=8,
        prefill_chunk=16,
        prefill_rows=2,
        batch_buckets=(8,),
        context_buckets=(384,),
        kv_cache_memory=(LARGEST + 1) * TOKEN_BYTES,
    )
    config = EngineConfig(**settings | changes)
    engine = Engine(QWEN3, sharp_params(QWEN3), config, speculation)
    shapes = speculation, config.kv_cache_memory, config.overlap == "delayed"
    engine._executor._compiled = COMPILED.setdefault(shapes, {})
    return engine


@pytest.fixture(scope="module")
def roomy():
    """An engine with room for everybody, that decodes without drafts."""
    engine = make_engine(PLAIN, kv_cache_memory=None)
    yield engine
    assert engine.stats().kv.parked == 0
    engine.close()
    COMPILED.clear()


@pytest.fixture(scope="module")
def expected(roomy) -> list[dict]:
    return run(roomy, requests())


@pytest.fixture
def engine():
    """One with a pool for one request at a time."""
    engine = make_engine()
    yield engine
    engine.close()


def assert_clean(engine: Engine) -> None:
    stats = engine.stats()
    assert stats.slots_used == stats.tokens_offloaded == stats.parked == stats.running == 0


@pytest.mark.parametrize(
    ("speculation", "config"),
    [
        (PILLAR, {}),
        (
            PILLAR,
            {"max_host_kv_bytes": 5 * 16 * TOKEN_BYTES, "phases": "random", "overlap": "sync"},
        ),
        (PILLAR, {"max_host_kv_bytes": 0}),
        (PILLAR, {"kv_policy": "recompute"}),
        (PILLAR, {"kv_policy": "conservative"}),
        (PILLAR, {"phases": "lockstep"}),
        (PLAIN, {}),
        (PLAIN, {"kv_policy": "recompute"}),
    ],
    ids=lambda value: value.method if hasattr(value, "method") else str(value),
)
def test_a_pool_for_one_request_at_a_time_changes_no_text(speculation, config, expected):
    engine = make_engine(speculation, **config)
    assert_same(run(engine, requests()), expected)
    stats = engine.stats()
    engine.close()
    assert stats.slots_used == stats.tokens_offloaded == stats.parked == 0
    if config.get("kv_policy") == "conservative":
        assert stats.kv.parked == 0
        return
    assert stats.kv.parked >= len(requests())
    offloads = config.get("max_host_kv_bytes") != 0 and config.get("kv_policy") != "recompute"
    assert (stats.kv.evicted > 0) == offloads
    if "max_host_kv_bytes" in config or not offloads:
        assert stats.kv.dropped > 0


def test_acceptance_is_that_without_offload(expected):
    def accepted(**config) -> float:
        engine = make_engine(**config)
        found = run(engine, requests())
        engine.close()
        full = sum(entry["stats"].full_cycles for entry in found)
        return sum(entry["stats"].full_accepted for entry in found) / full

    assert abs(accepted() - accepted(kv_cache_memory=None)) < 0.35


@pytest.fixture
def parked(monkeypatch) -> Counter:
    """How many rows were parked, by phase: None is in the middle of its prompt."""
    phases = Counter()
    park = KvManager._park

    def noted(manager, holding):
        phases[manager.phase_of(holding)] += 1
        park(manager, holding)

    monkeypatch.setattr(KvManager, "_park", noted)
    return phases


def test_rows_leave_and_come_back_in_every_phase(engine, parked, roomy):
    rows = engine._scheduler._rows
    engine._scheduler._kv.phase_of = lambda holding: rows[holding.row].phase
    for batch in (crowd(), squeezed()):
        assert_same(run(engine, batch), run(roomy, batch))
    assert parked.keys() == {None, *range(K + 1)}


def test_samples_of_one_prompt_share_it_wherever_it_is(engine, roomy):
    prompt = np.random.default_rng(8).integers(6, VOCAB, 90)
    params = SamplingParams(**COMMON, max_tokens=100)
    samples = [(prompt, params.with_seed(sample_seed(9, i))) for i in range(6)]
    found = run(engine, samples)
    assert_same(found, run(roomy, samples))
    stats = engine.stats().kv
    assert stats.parked > 0
    assert stats.evicted > 0
    assert stats.dropped == 0
    assert [entry["stats"].shared_tokens for entry in found] == [0] + [89] * 5
    assert_clean(engine)


@pytest.mark.parametrize(
    ("batch", "kind"), [(crowd(), "decoding"), (squeezed(), "prompt")], ids=["decoding", "prompt"]
)
def test_cancelling_what_is_in_host_memory_leaves_nothing_and_harms_nobody(
    engine, roomy, batch, kind
):
    """Neither in the middle of its output, nor in the middle of its prompt."""
    cancelled = []
    move = engine._executor.move

    def noticing(moves):
        for row in engine._scheduler._rows.values():
            away = row.kv.own.away + row.kv.prefix.segment.away
            here = "decoding" if row.phase is not None else "prompt" if row.prefilled else None
            if here == kind and row.kv.parked and away and not cancelled:
                cancelled.append(row.request.request_id)
                engine.cancel(row.request)
        move(moves)

    engine._executor.move = noticing
    found, expected = run(engine, batch), run(roomy, batch)
    (number,) = [n for n, entry in enumerate(found) if entry["reason"] == "cancelled"]
    gone, whole = found.pop(number)["tokens"], expected.pop(number)["tokens"]
    assert gone == whole[: len(gone)]
    assert bool(gone) == (kind == "decoding")
    assert_same(found, expected)
    assert_clean(engine)
    assert not engine._executor._offload._chunks


def test_a_copy_that_fails_ends_everybody_with_its_error_and_the_engine_goes_on(
    engine, expected, monkeypatch
):
    device_put, copies = jax.device_put, []

    def failing(array, *arguments, **options):
        if threading.current_thread().name.startswith("kv-offload"):
            copies.append(array)
            if len(copies) == 6:
                raise RuntimeError("host memory is on fire")
        return device_put(array, *arguments, **options)

    monkeypatch.setattr(jax, "device_put", failing)
    ended = threading.Semaphore(0)
    events = {}

    def sink(event):
        if event.finish_reason is not None:
            events[event.request_id] = event
            ended.release()

    submitted = [engine.submit(prompt, params, sink) for prompt, params in requests()]
    for _ in submitted:
        assert ended.acquire(timeout=300)
    errors = [event for event in events.values() if event.finish_reason == "error"]
    assert errors
    assert {str(event.error) for event in errors} == {"host memory is on fire"}
    assert_clean(engine)
    assert_same(run(engine, requests()), expected)
    assert len(copies) > 6
    assert_clean(engine)
