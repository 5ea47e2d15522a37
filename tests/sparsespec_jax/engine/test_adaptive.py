"""Adaptive drafting: about as fast as the best fixed number of drafts, whichever that is."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from sparsespec_jax.config import AUTO_KS, SpeculationConfig
from sparsespec_jax.engine import engine as engine_module
from sparsespec_jax.engine.adaptive import AdaptiveDrafting
from sparsespec_jax.kv import manager as manager_module
from tests.engine_runs import assert_same, run
from tests.sparsespec_jax.test_lossless import (
    PLAIN,
    QWEN3,
    make_engine,
    prompts_and_params,
)

AUTO = SpeculationConfig(k="auto", sparsity=0.05, min_budget=12)


def shares_of(agreement: float) -> list[float]:
    """How often the i-th draft is accepted, if each is with this probability after the others."""
    return [agreement ** (place + 1) for place in range(max(AUTO_KS))]


def rate(k: int, shares: list[float], seconds: dict[int, float]) -> float:
    return (1 + sum(shares[:k])) / (k + 1) / seconds[k]


class Run:
    """A batch whose steps take `seconds[k]`, give or take a little."""

    def __init__(self, *, seed: int = 0):
        self.adaptive = AdaptiveDrafting(AUTO_KS)
        self.tokens = self.seconds = 0.0
        self._random = random.Random(seed)

    def steps(
        self, count: int, agreement: float, seconds: dict[int, float], batch: int = 36
    ) -> Run:
        shares = shares_of(agreement)
        for _ in range(count):
            k = self.adaptive.k
            for _ in range(batch // (k + 1)):
                accepted = 0
                while accepted < k and self._random.random() < agreement:
                    accepted += 1
                self.adaptive.note_cycle(k, accepted)
            taken = seconds[k] * self._random.uniform(0.95, 1.05)
            self.adaptive.note_step(batch, taken)
            self.tokens += batch * (1 + sum(shares[:k])) / (k + 1)
            self.seconds += taken
        return self


@settings(max_examples=15, deadline=None, derandomize=True, phases=[Phase.explicit, Phase.generate])
@example(0.5, [1.0, 3.0, 1.0, 1.0], 0)
@given(
    st.floats(0.05, 0.98),
    st.lists(st.floats(1.0, 4.0), min_size=4, max_size=4),
    st.integers(0, 1000),
)
def test_it_is_never_slower_than_the_best_fixed_number_by_over_3_percent(agreement, times, seed):
    seconds = dict(zip(AUTO_KS, times, strict=True))
    done = Run(seed=seed).steps(20_000, agreement, seconds)
    best = max(36 * rate(k, shares_of(agreement), seconds) for k in AUTO_KS)
    assert done.tokens / done.seconds > 0.97 * best


def test_speculation_that_does_not_pay_is_off():
    """As for a small model and few rows: a step of drafts takes as long as one that decodes."""
    same = dict.fromkeys(AUTO_KS, 1.0)
    assert Run().steps(400, 0.8, same).adaptive.k == 0


def test_speculation_that_pays_is_on():
    long_contexts = {8: 1.0, 4: 1.2, 2: 1.6, 0: 4.0}
    assert Run().steps(400, 0.95, long_contexts).adaptive.k == 8
    assert Run().steps(400, 0.3, long_contexts).adaptive.k < 8


def test_it_notices_that_contexts_have_grown():
    run = Run().steps(400, 0.9, dict.fromkeys(AUTO_KS, 1.0))
    assert run.adaptive.k == 0
    chosen = Counter()
    for _ in range(5_000):
        run.steps(1, 0.9, {8: 1.0, 4: 1.4, 2: 2.2, 0: 5.0})
        chosen[run.adaptive.k] += 1
    assert chosen[8] > 4_000, "within a few trials"


def test_another_batch_size_begins_with_what_the_nearest_one_knows():
    run = Run().steps(400, 0.95, {8: 1.0, 4: 1.2, 2: 1.6, 0: 4.0}, batch=64)
    run.adaptive.note_step(48, None)
    assert run.adaptive.k == 8
    assert not run.adaptive._trying


def test_steps_that_did_something_else_do_not_count():
    adaptive = AdaptiveDrafting((4, 0))
    for _ in range(5000):
        adaptive.note_step(8, None)
        assert adaptive.k in (4, 0)
    assert not any(candidate.seconds for candidate in adaptive._by_batch[8].values())


class Restless(AdaptiveDrafting):
    """Another number of drafts every few steps."""

    def __init__(self, ks):
        super().__init__(ks)
        self._random, self._left = random.Random(1), 0

    def note_step(self, batch, seconds):
        self._left -= 1
        if self._left < 0:
            self.k, self._left = self._random.choice(self._ks), self._random.randrange(1, 25)


@pytest.fixture(scope="module")
def expected() -> list[dict]:
    engine = make_engine(QWEN3, PLAIN)
    found = run(engine, prompts_and_params()[:5])
    engine.close()
    return found


COMPILED = {}  # engines of the same shapes share their steps


def adaptive_engine(**config):
    engine = make_engine(QWEN3, AUTO, **config)
    engine._executor._compiled = COMPILED.setdefault(str(config), {})
    return engine


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [{}, {"overlap": "delayed", "kv_cache_memory": 200 * 512}],
    ids=["resident", "delayed, small pool"],
)
def test_however_often_it_changes_the_text_stays_the_same(config, expected, monkeypatch):
    monkeypatch.setattr(engine_module, "AdaptiveDrafting", Restless)
    monkeypatch.setattr(manager_module, "LOW_WATERMARK", 0)
    monkeypatch.setattr(manager_module, "HIGH_WATERMARK", 1)
    engine = adaptive_engine(**config)
    found = run(engine, prompts_and_params()[:5])
    engine.close()
    assert_same(found, expected)
    drafted = sum(entry["stats"].drafted_at for entry in found)
    accepted = sum(entry["stats"].accepted_at for entry in found)
    assert drafted[0] > drafted[-1] > 0, "long cycles and short ones"
    assert 0.2 < accepted.sum() / drafted.sum() < 0.98


def test_an_engine_that_measures_for_itself_emits_the_same(expected):
    engine = adaptive_engine()
    found = run(engine, prompts_and_params()[:5])
    assert isinstance(engine._adaptive, AdaptiveDrafting)
    assert np.sum(engine._adaptive._drafted) > 0
    engine.close()
    assert_same(found, expected)


def test_a_fixed_number_is_not_adapted():
    engine = make_engine(QWEN3, SpeculationConfig(k=4))
    assert engine._adaptive is None
    assert engine._buckets.ks == (4,)
    engine.close()
