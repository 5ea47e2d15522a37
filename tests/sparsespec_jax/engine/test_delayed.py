"""Delayed verification: the host verifies a step later, and nothing that is emitted changes."""

from __future__ import annotations

import dataclasses
import queue

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsespec_jax.config import EngineConfig, SpeculationConfig
from sparsespec_jax.engine import host_verification
from sparsespec_jax.engine.engine import Engine
from sparsespec_jax.engine.plan import NON_FINITE
from sparsespec_jax.sampling import accept_coupled, truncate
from sparsespec_jax.sampling.params import SamplingParams
from sparsespec_jax.sampling.verification import LENGTH, RUNNING, STOPPED
from tests.engine_runs import SMALL, assert_same, run, sharp_params
from tests.sparsespec_jax.test_lossless import QWEN3, VOCAB, prompts_and_params

MODEL = dataclasses.replace(QWEN3, num_layers=1, tie_word_embeddings=False)
CONFIG = EngineConfig(**SMALL)
PLAIN = SpeculationConfig(method="none")
POISON = 13


def pillar(k: int, **changes) -> SpeculationConfig:
    return SpeculationConfig(k=k, sparsity=0.05, min_budget=12, **changes)


def plain_requests(count: int, **changes) -> list[tuple[np.ndarray, SamplingParams]]:
    rng = np.random.default_rng(1)
    params = dict(temperature=0.65, max_tokens=40, ignore_eos=True) | changes
    lengths = rng.integers(1, 50, count)
    return [
        (rng.integers(POISON + 1, VOCAB, length), SamplingParams(**params, seed=seed))
        for seed, length in enumerate(lengths)
    ]


@pytest.fixture(scope="module")
def params():
    return sharp_params(MODEL)


@pytest.fixture(scope="module")
def make_engine(params):
    """Engines that share their compiled steps where the steps are the same."""
    compiled, made = {}, []

    def make(speculation: SpeculationConfig, overlap: str, weights=params) -> Engine:
        engine = Engine(MODEL, weights, dataclasses.replace(CONFIG, overlap=overlap), speculation)
        engine._executor._compiled = compiled.setdefault((speculation, overlap == "delayed"), {})
        made.append(engine)
        return engine

    yield make
    for engine in made:
        engine.close()


@pytest.fixture(scope="module")
def expected(make_engine) -> list[dict]:
    """What plain decoding emits, verified on the device."""
    engine = make_engine(PLAIN, "resident")
    found = run(engine, prompts_and_params())
    engine.close()
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "speculation", [PLAIN, pillar(1), pillar(8)], ids=lambda value: f"{value.method} {value.k}"
)
def test_what_the_host_verifies_is_what_the_device_would(speculation, make_engine, expected):
    """Tokens, logprobs and finish reasons; of all kinds of sampling parameters at once."""
    engine = make_engine(speculation, "delayed")
    found = run(engine, prompts_and_params())
    stats = engine.stats()
    engine.close()
    assert_same(found, expected)
    assert stats.hidden_seconds > 0
    if speculation != PLAIN:
        accepted = sum(entry["stats"].full_accepted for entry in found)
        drafted = speculation.k * sum(entry["stats"].full_cycles for entry in found)
        assert 0.05 < accepted / drafted < 0.95, "the test must see acceptance and rejection"


@pytest.mark.slow
def test_what_rejection_sampling_emits_is_what_the_device_would(make_engine):
    """Requests alone: with others about, cycles start elsewhere, and other drafts are drawn."""
    speculation = pillar(4, verification="rejection")
    shared = dict(top_k=12, presence_penalty=0.7, logprobs=2)  # or each had steps of its own
    requests = [
        *plain_requests(2, **shared),
        *plain_requests(1, **shared, temperature=0.0),
        *plain_requests(1, **shared, min_tokens=9, ignore_eos=False, logit_bias={3: 6.0}),
        *plain_requests(1, **shared, stop_token_ids=tuple(range(20, 30))),
    ]
    found = {}
    for overlap in ("resident", "delayed"):
        engine = make_engine(speculation, overlap)
        found[overlap] = [run(engine, [request])[0] for request in requests]
        engine.close()
    assert_same(found["delayed"], found["resident"])
    for delayed, resident in zip(found["delayed"], found["resident"], strict=True):
        np.testing.assert_array_equal(delayed["stats"].accepted_at, resident["stats"].accepted_at)
    assert sum(entry["stats"].full_accepted for entry in found["delayed"]) > 0


# Without the features that make compiling slow.


@pytest.fixture(scope="module")
def engine(make_engine) -> Engine:
    return make_engine(pillar(4), "delayed")


def submit(engine: Engine, requests) -> tuple[list, list[queue.SimpleQueue]]:
    queues = [queue.SimpleQueue() for _ in requests]
    submitted = [
        engine.submit(prompt, params, events.put)
        for (prompt, params), events in zip(requests, queues, strict=True)
    ]
    return submitted, queues


def drain(events: queue.SimpleQueue) -> tuple[list[int], str, Exception | None]:
    """All tokens of a request, its finish reason and its error."""
    tokens = []
    while True:
        event = events.get(timeout=120)
        tokens += event.tokens
        if event.finish_reason is not None:
            return tokens, event.finish_reason, event.error


def test_a_request_is_cancelled_while_the_host_verifies_and_the_others_go_on(engine):
    requests = plain_requests(8)
    whole = [drain(events)[:2] for events in submit(engine, requests)[1]]
    for after in (1, 2, 3):
        submitted, queues = submit(engine, requests)
        events = [queues[2].get(timeout=120) for _ in range(after)]
        engine.cancel(submitted[2])
        found = [drain(events)[:2] for events in queues]
        first = [token for event in events for token in event.tokens]
        cancelled = first + found[2][0]
        assert found[2][1] == "cancelled"
        assert cancelled == whole[2][0][: len(cancelled)]
        assert found[:2] + found[3:] == whole[:2] + whole[3:]
    stats = engine.stats()
    assert stats.running == stats.waiting == stats.slots_used == 0


@pytest.mark.parametrize("max_tokens", range(1, 8))
def test_a_request_ends_at_its_maximum_length_and_not_beyond(engine, max_tokens):
    [(prompt, params)] = plain_requests(1, max_tokens=max_tokens)
    [entry] = run(engine, [(prompt, params)])
    assert len(entry["tokens"]) == max_tokens
    assert entry["reason"] == "length"


def test_logits_that_are_no_numbers_end_their_request_where_they_would(make_engine, params):
    """Not in a draft that is rejected, and with all tokens before it."""
    weights = {**params, "embedding": params["embedding"].at[POISON].set(np.nan)}
    likely = [dict(logit_bias={POISON: float(bias)}) for bias in (1, 2, 2, 3)]
    requests = [
        request for seed in (1, 2) for change in likely for request in plain_requests(1, **change)
    ] + plain_requests(3, logit_bias={POISON: -100.0})
    found = {}
    for overlap in ("resident", "delayed"):
        engine = make_engine(pillar(4), overlap, weights)
        found[overlap] = [drain(events) for events in submit(engine, requests)[1]]
        engine.close()
    assert [entry[:2] for entry in found["delayed"]] == [entry[:2] for entry in found["resident"]]
    errors = [error for _, reason, error in found["delayed"] if reason == "error"]
    assert errors
    assert {type(error) for error in errors} == {FloatingPointError}
    assert [reason for _, reason, _ in found["delayed"][-3:]] == ["length"] * 3


def test_a_verification_that_fails_ends_every_request_with_its_error_and_the_next_call_works(
    make_engine, monkeypatch
):
    engine = make_engine(pillar(4), "delayed")
    requests = plain_requests(8)
    expected = run(engine, requests[:1])
    verify_rows, calls = host_verification.verify_rows, []

    def fail_once(*args, **kwargs):
        calls.append(args)
        if len(calls) == 8:
            raise RuntimeError("the host is on fire")
        return verify_rows(*args, **kwargs)

    monkeypatch.setattr(host_verification, "verify_rows", fail_once)
    for events in submit(engine, requests)[1]:
        _, reason, error = drain(events)
        assert reason == "error"
        assert str(error) == "the host is on fire"
    assert engine.stats().slots_used == 0
    assert_same(run(engine, requests[:1]), expected)
    assert len(calls) > 8
    engine.close()


def test_closing_cancels_what_runs_and_joins_the_verifier(make_engine):
    engine = make_engine(pillar(4), "delayed")
    _, queues = submit(engine, plain_requests(8, max_tokens=200))
    queues[0].get(timeout=120)
    verifier = engine._verifier._thread
    engine.close()
    assert not verifier.is_alive()
    assert [drain(events)[1] for events in queues] == ["cancelled"] * 8
    engine.close()


@pytest.mark.parametrize("overlap", ["resident", "sync"])
def test_other_modes_start_no_verifier(make_engine, overlap):
    engine = make_engine(pillar(4), overlap)
    run(engine, plain_requests(1, max_tokens=2))
    assert engine._verifier._thread is None
    engine.close()


# The host's rules are the device's.

device_accept, device_truncate = jax.jit(accept_coupled), jax.jit(truncate)


@st.composite
def verifications(draw) -> dict[str, np.ndarray]:
    rows, k = draw(st.sampled_from([1, 4])), draw(st.sampled_from([0, 1, 4]))

    def integers(low: int, high: int, *shape: int) -> np.ndarray:
        size = int(np.prod(shape))
        values = draw(st.lists(st.integers(low, high), min_size=size, max_size=size))
        return np.array(values, np.int32).reshape(shape)

    length = integers(1, 20, rows)
    return dict(
        tokens=integers(0, 3, rows, k + 1),
        drafts=integers(0, 3, rows, k),
        n_drafts=integers(0, k, rows),
        finite=integers(0, k + 1, rows),
        stop_ids=integers(-1, 3, rows, 3) if draw(st.booleans()) else np.full((rows, 3), -1),
        length=length,
        max_length=length + integers(1, 8, rows),
        min_length=length + integers(-2, 4, rows),
    )


@settings(max_examples=300)
@given(verifications())
def test_the_host_accepts_and_truncates_as_the_device_does(case):
    accepted, tokens = device_accept(case["drafts"], case["n_drafts"], case["tokens"])
    np.testing.assert_array_equal(
        host_verification.accept_coupled(case["drafts"], case["n_drafts"], case["tokens"]), accepted
    )
    limits = [case[name] for name in ("stop_ids", "length", "max_length", "min_length")]
    emitted, _, reason = device_truncate(tokens, accepted + 1, *limits)
    found = host_verification.truncate(case["tokens"], np.asarray(accepted) + 1, *limits)
    np.testing.assert_array_equal(found[0], emitted)
    np.testing.assert_array_equal(found[1], reason)


@settings(max_examples=300)
@given(verifications(), st.booleans())
def test_what_is_emitted_ends_where_plain_decoding_would_end(case, coupled):
    """One token after the other, by the rules in words."""
    accepted = host_verification.accept_coupled(case["drafts"], case["n_drafts"], case["tokens"])
    facts = case if coupled else case | {"drafts": 9 + case["drafts"]}
    emitted, kept, finish = host_verification.verify(
        **facts, accepted=None if coupled else accepted
    )
    for row in range(len(accepted)):
        length, reason, count = int(case["length"][row]), RUNNING, 0
        while reason == RUNNING and count <= accepted[row]:
            if count >= case["finite"][row]:
                reason = NON_FINITE
                break
            token = case["tokens"][row, count]
            count += 1
            if token in case["stop_ids"][row] and length + count > case["min_length"][row]:
                reason = STOPPED
            elif length + count == case["max_length"][row]:
                reason = LENGTH
        assert (emitted[row], finish[row]) == (count, reason)
        assert kept[row] == min(accepted[row], count)
