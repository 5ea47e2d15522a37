"""Long runs with a pool for a tenth of the demand: all ends, nothing changes, nothing grows."""

from __future__ import annotations

import dataclasses
import gc
import os
import random
import threading

import jax
import numpy as np
import pytest

from sparsespec_jax import LLM
from sparsespec_jax.config import EngineConfig, SpeculationConfig
from sparsespec_jax.countdown import held_out
from sparsespec_jax.engine.engine import Engine
from sparsespec_jax.kv import manager as manager_module
from sparsespec_jax.kv import offload as offload_module
from sparsespec_jax.sampling.params import SamplingParams, sample_seed
from tests.engine_runs import sharp_params
from tests.sparsespec_jax.test_lossless import PILLAR, QWEN3, VOCAB

TIMEOUT = 600
SOAK = 2000  # requests


@dataclasses.dataclass(frozen=True)
class Job:
    """A request to be. cancelled: after how many of its tokens, None for never."""

    prompt: tuple[int, ...]
    params: SamplingParams
    cancelled: int | None = None


def make_jobs(prompts: list[list[int]], count: int, most_tokens: int) -> list[Job]:
    """Random lengths; one prompt in four is sampled three times, one job in eight cancelled."""
    rng, jobs = random.Random(1), []
    while len(jobs) < count:
        prompt, n = tuple(rng.choice(prompts)), rng.choice([1, 1, 1, 3])
        for _ in range(n):
            length = rng.randint(1, most_tokens)
            greedy = rng.random() < 0.2
            params = SamplingParams(
                temperature=0.0 if greedy else 0.8,
                max_tokens=length,
                seed=sample_seed(3, len(jobs)),
                ignore_eos=rng.random() < 0.5,
            )
            cancelled = rng.randint(0, length) if rng.random() < 0.125 else None
            jobs.append(Job(prompt, params, cancelled))
    return jobs[:count]


class Outcome:
    """Tokens and the reason they ended, of one job; cancels it when it is due."""

    def __init__(self, engine: Engine, job: Job):
        self.tokens, self.reason, self.job = [], None, job
        self._engine, self._ended = engine, threading.Event()
        self._request = None
        self._request = engine.submit(list(job.prompt), job.params, self._note)
        if job.cancelled == 0:
            engine.cancel(self._request)

    def _note(self, event) -> None:
        assert event.error is None, event.error
        self.tokens += event.tokens
        if event.finish_reason is not None:
            self.reason = event.finish_reason
            self._ended.set()
        elif self.job.cancelled is not None and len(self.tokens) >= self.job.cancelled:
            self._engine.cancel(self._request or self._submitted())

    def _submitted(self):
        while self._request is None:  # `submit` is about to return
            pass
        return self._request

    def ended(self) -> Outcome:
        assert self._ended.wait(TIMEOUT), "a request never ends"
        return self


def run_jobs(engine: Engine, jobs: list[Job], waiting: int) -> list[Outcome]:
    """All of them, no more than `waiting` at once beside those before."""
    outcomes = []
    for number, job in enumerate(jobs):
        if number >= waiting:
            outcomes[number - waiting].ended()
        outcomes.append(Outcome(engine, job))
    return [outcome.ended() for outcome in outcomes]


def assert_same(found: list[Outcome], expected: list[Outcome]) -> None:
    """What is cancelled ends sooner or later, but says the same until then."""
    for number, (a, b) in enumerate(zip(found, expected, strict=True)):
        common = min(len(a.tokens), len(b.tokens))
        assert a.tokens[:common] == b.tokens[:common], f"request {number}"
        if a.job.cancelled is None:
            assert len(a.tokens) == len(b.tokens), f"request {number}"
            assert a.reason == b.reason != "cancelled", f"request {number}"


def device_bytes() -> int:
    gc.collect()
    return sum(array.nbytes for array in jax.live_arrays())


def resident_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def assert_empty(engine: Engine) -> None:
    """Nothing is left of any request, on the device or the host."""
    stats = engine.stats()
    assert stats.running == stats.waiting == stats.parked == 0
    assert stats.slots_used == stats.tokens_offloaded == 0
    assert not engine._live
    if engine._executor._offload is not None:
        assert not engine._executor._offload._chunks


def soak(make_engine, jobs: list[Job], waiting: int, slots: int, token_bytes: int) -> None:
    roomy = make_engine(None)
    expected = run_jobs(roomy, jobs, waiting)
    assert roomy.stats().kv.parked == 0
    roomy.close()

    engine = make_engine((slots + 1) * token_bytes)
    assert engine.stats().slots == slots
    half = len(jobs) // 2
    found = run_jobs(engine, jobs[:half], waiting)
    before, resident = device_bytes(), resident_bytes()
    found += run_jobs(engine, jobs[half:], waiting)
    assert device_bytes() <= before * 1.01
    assert resident_bytes() - resident < 64 * 2**20
    assert_same(found, expected)
    kv = engine.stats().kv
    assert kv.parked > len(jobs) / 20
    assert kv.evicted > 0
    assert_empty(engine)
    engine.close()


@pytest.fixture(autouse=True)
def small_steps(monkeypatch):
    """Chunks of 16 tokens, and rows that come and go as often as they can."""
    monkeypatch.setattr(manager_module, "LOW_WATERMARK", 0)
    monkeypatch.setattr(manager_module, "HIGH_WATERMARK", 1)
    monkeypatch.setattr(offload_module, "CHUNK_BYTES", 1)


def test_sixty_requests_in_a_tenth_of_the_memory():
    token_bytes = QWEN3.kv_bytes_per_token(np.dtype("float32"))
    params = sharp_params(QWEN3)
    rng = np.random.default_rng(5)
    prompts = [rng.integers(6, VOCAB, n).tolist() for n in (1, 7, 20, 33, 48, 60)]
    batch, most = 16, 50

    def make_engine(memory):
        config = EngineConfig(
            max_batch=batch,
            prefill_chunk=16,
            prefill_rows=2,
            batch_buckets=(batch,),
            context_buckets=(384,),
            kv_cache_memory=memory,
        )
        return Engine(QWEN3, params, config, PILLAR)

    jobs = make_jobs(prompts, 60, most)
    slots = batch * (60 + most + PILLAR.k) // 10
    soak(make_engine, jobs, 3 * batch, slots, token_bytes)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_two_thousand_requests_in_a_tenth_of_the_memory():
    problems = held_out(60, seed=7)
    speculation = SpeculationConfig(min_budget=32)
    batch, most = 32, 120

    def make_engine(memory):
        config = EngineConfig(
            max_batch=batch,
            max_context=512,
            batch_buckets=(8, batch),
            context_buckets=(384,),
            kv_cache_memory=memory,
        )
        return LLM(engine=config, speculation=speculation).engine

    with LLM() as llm:
        prompts = [llm.chat_prompt(problem.prompt()) for problem in problems]
        token_bytes = llm.engine.model.kv_bytes_per_token(llm.engine._executor.dtype)
    jobs = make_jobs(prompts, SOAK, most)
    longest = max(map(len, prompts)) + most + speculation.k
    soak(make_engine, jobs, 3 * batch, batch * longest // 10, token_bytes)
