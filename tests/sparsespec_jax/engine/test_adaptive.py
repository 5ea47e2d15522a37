"""Adaptive drafting: about as fast as the best fixed choice, whichever that is."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from sparsespec_jax.config import AUTO_KS, AUTO_SPARSITIES, SpeculationConfig
from sparsespec_jax.engine import drafting as drafting_module
from sparsespec_jax.engine.acceptance import Acceptance
from sparsespec_jax.engine.adaptive import AdaptiveDrafting, Choice
from sparsespec_jax.engine.row_drafting import RowDrafting
from sparsespec_jax.kv import manager as manager_module
from tests.engine_runs import assert_same, run
from tests.sparsespec_jax.engine.simulated_mix import Workload
from tests.sparsespec_jax.test_lossless import (
    PLAIN,
    QWEN3,
    make_engine,
    prompts_and_params,
)

AUTO = SpeculationConfig(k="auto", sparsity="auto", min_budget=4)
CHOICES = [Choice(k, s) for k in AUTO_KS for s in range(len(AUTO_SPARSITIES)) if k or not s]

Times = dict[Choice, float]


def times_by_k(*seconds: float) -> Times:
    """Of steps with 8, 4, 2 and 0 drafts."""
    return dict(zip(map(Choice, AUTO_KS), seconds, strict=True))


def modelled_times(batch: int, context: int) -> Times:
    """Milliseconds, about those of an 8B model on an H200: launches, matmuls, and KV to read."""
    found = {}
    for k, sparsity in CHOICES:
        queries = batch * (2 * k + 1) / (k + 1)
        budget = max(128, AUTO_SPARSITIES[sparsity] * context)
        reads = batch * (k * budget + context) / (k + 1)
        found[k, sparsity] = 1 + max(4, 0.022 * queries) + 3.7e-5 * reads
    return {Choice(*choice): time for choice, time in found.items()}


def expected_tokens(k: int, agreement: float) -> float:
    """Of a cycle whose drafts are each accepted with this probability, after the others."""
    return sum(agreement**place for place in range(k + 1))


class Run:
    """A batch whose steps take about `times[choice]`, and whose drafts agree so often.

    agreement: by sparsity, or the same with any.
    """

    def __init__(self, ks: tuple[int, ...] = AUTO_KS, sparsities: int = 1, *, seed: int = 0):
        self.adaptive = AdaptiveDrafting(ks, sparsities)
        self.chosen = Counter()
        self.share_of_best = 0.0
        self._random = random.Random(seed)
        self._due = 0.0

    def steps(
        self, count: int, agreement: float | list[float], times: Times, batch: int = 36
    ) -> Run:
        agreements = agreement if isinstance(agreement, list) else [agreement]
        rates = {
            choice: expected_tokens(choice.k, agreements[choice.sparsity]) / (choice.k + 1)
            for choice in times
        }
        tokens = seconds = 0.0
        for _ in range(count):
            choice = self.adaptive.choice
            self.chosen[choice] += 1
            self._verify(batch / (choice.k + 1), choice, agreements[choice.sparsity])
            taken = times[choice] * self._random.uniform(0.95, 1.05)
            self.adaptive.note_step(batch, taken)
            tokens, seconds = tokens + rates[choice], seconds + taken
        best = max(rates[choice] / times[choice] for choice in times)
        self.share_of_best = tokens / seconds / best
        return self

    def _verify(self, rows: float, choice: Choice, agreement: float) -> None:
        self._due += rows
        while self._due >= 1:
            self._due -= 1
            accepted = 0
            while accepted < choice.k and self._random.random() < agreement:
                accepted += 1
            self.adaptive.note_cycle(choice.k, accepted, choice.sparsity)


def examples(count: int) -> Callable:
    phases = [Phase.explicit, Phase.generate]
    return settings(max_examples=count, deadline=None, derandomize=True, phases=phases)


@examples(8)
@example(0.5, (0.0, 1.0, 0.0), 0)
@example(0.9, (0.5, 0.1, 4.0), 0)
@given(
    st.floats(0.05, 0.98),
    st.tuples(st.floats(0.0, 1.0), st.floats(0.1, 2.0), st.floats(0.0, 4.0)),
    st.integers(0, 1000),
)
def test_it_is_never_slower_than_the_best_fixed_number_by_over_3_percent(agreement, costs, seed):
    """costs: of launches, of a query and of reading the context, where weights take 1 to read."""
    launches, query, reading = costs
    times = [
        launches + max(1.0, query * (2 * k + 1) / (k + 1)) + reading * (0.05 * k + 1) / (k + 1)
        for k in AUTO_KS
    ]
    run = Run(seed=seed).steps(20_000, agreement, times_by_k(*times))
    assert run.share_of_best > 0.97


def test_one_slow_number_in_between_does_no_harm():
    assert Run().steps(20_000, 0.5, times_by_k(1.0, 3.0, 1.0, 1.0)).share_of_best > 0.97


def test_what_nobody_expects_to_pay_is_tried_in_the_end():
    """Two drafts, whose steps are three times as fast as those of none and of many."""
    run = Run().steps(20_000, 0.7, times_by_k(3.6, 3.2, 1.1, 3.5))
    assert run.chosen.most_common(1)[0][0].k == 2


@examples(6)
@example(128, 32768, 0.93, 0.08, 0)
@example(64, 1024, 0.8, 0.0, 0)
@example(32, 8192, 0.8, 0.03, 1)
@example(4, 32768, 0.95, 0.08, 1)  # few cycles: a trial must not wait for another's shares
@example(128, 32768, 0.95, 0.0, 0)  # a step without drafts takes five times as long
@given(
    st.sampled_from([4, 16, 64, 128]),
    st.sampled_from([512, 2048, 8192, 32768]),
    st.floats(0.3, 0.98),
    st.floats(0.0, 0.1),
    st.integers(0, 1000),
)
def test_nor_than_the_best_fixed_number_and_sparsity(batch, context, agreement, slope, seed):
    """slope: how much agreement depends on what drafts read."""
    agreements = [
        min(0.99, agreement - slope * ((0.05 / sparsity) ** 0.5 - 1))
        for sparsity in AUTO_SPARSITIES
    ]
    run = Run(sparsities=3, seed=seed)
    run.steps(20_000, agreements, modelled_times(batch, context), batch)
    assert run.share_of_best > 0.97


@pytest.mark.parametrize("agreement", [0.95, 0.7])
def test_nor_in_a_workload_from_its_first_step_to_its_last(agreement):
    """Prompts come in between, contexts grow, and at the end few rows are left. Steps take as long
    as each other to 10%, so that it matters what is learned of their times."""
    outputs = np.random.default_rng(0).gamma(3, 650 / 3, 96).clip(8).astype(int).tolist()

    def rate(k: int | str, seed: int = 0) -> float:
        sizes = {"context": 160, "max_batch": 32, "batch_buckets": (32,)}
        run = Workload({agreement: 1.0}, outputs, k=k, noise=0.06, seed=seed, **sizes)
        return run.tokens_a_second()

    best = max(rate(k) for k in (4, 2, 0))
    assert (rate("auto", 0) + rate("auto", 1)) / 2 > 0.97 * best


def test_speculation_that_does_not_pay_is_off():
    """As for a small model and few rows: a step of drafts takes as long as one that decodes."""
    assert Run().steps(400, 0.8, times_by_k(1, 1, 1, 1)).adaptive.choice.k == 0


@pytest.mark.parametrize(("sits_out", "best"), [(0, 0), (1, 4)])
def test_steps_that_rows_sit_out_after_a_cycle_count(sits_out, best):
    """As with delayed verification: twice as many for a cycle of one step."""
    adaptive = AdaptiveDrafting((4, 0), sits_out=sits_out)
    for _ in range(500):
        k = adaptive.choice.k
        adaptive.note_cycle(k, min(2, k))
        adaptive.note_step(16, 1.0 if k else 1.5)
    assert adaptive.choice.k == best


LONG_CONTEXTS = times_by_k(1.0, 1.2, 1.6, 4.0)


def test_speculation_that_pays_is_on():
    assert Run().steps(400, 0.95, LONG_CONTEXTS).adaptive.choice.k == 8
    assert Run().steps(400, 0.3, LONG_CONTEXTS).adaptive.choice.k < 8


def test_with_a_fixed_number_only_the_sparsity_is_sought():
    times = {Choice(4, 0): 1.0, Choice(4, 1): 0.8, Choice(4, 2): 1.4}
    run = Run((4,), 3).steps(2000, [0.9, 0.88, 0.91], times)
    assert run.adaptive.choice == Choice(4, 1)


def test_not_every_number_is_tried_with_every_sparsity():
    """Once the best number is known, what is far from it is not."""
    times = {choice: (1, 1.2, 1.4)[choice.sparsity] for choice in CHOICES}
    for choice in times:
        times[choice] *= {8: 1, 4: 1.4, 2: 1.8, 0: 4}[choice.k]
    run = Run(sparsities=3).steps(3000, [0.95] * 3, times)
    assert run.chosen[Choice(8)] > 2400
    assert run.chosen.keys() == {*map(Choice, AUTO_KS), Choice(8, 1), Choice(8, 2)}


def test_drafts_that_read_too_little_are_given_up():
    """Their steps are faster, but each emits less; a tenth of the steps at most goes into it."""
    times = {choice: (1, 0.93, 1.13)[choice.sparsity] for choice in CHOICES if choice.k == 8}
    run = Run((8,), 3).steps(4000, [0.95, 0.85, 0.96], times)
    assert run.adaptive.choice == Choice(8, 0)
    assert run.chosen[Choice(8, 0)] > 3600


def test_steps_that_verify_count_as_much_as_those_that_draft():
    """Few rows do one or the other, and a cycle has many of one kind and few of the other."""
    adaptive = AdaptiveDrafting((2, 0))
    for step in range(1000):
        k = adaptive.choice.k
        if k and step % 3 == 2:
            adaptive.note_cycle(2, 2)
        adaptive.note_step(1, 1.1 if k == 0 else 1.6 if step % 3 == 2 else 1.0)
    assert adaptive.choice.k == 0, "3 tokens in 3.6, where that emits 3.27"


def test_a_hiccup_of_the_host_does_not():
    adaptive = AdaptiveDrafting((2, 0))
    for step in range(1000):
        k = adaptive.choice.k
        adaptive.note_cycle(k, k)
        adaptive.note_step(8, 100.0 if step % 50 == 0 else 1.0 if k else 1.5)
    assert adaptive.choice.k == 2


def test_it_notices_that_contexts_have_grown():
    run = Run().steps(400, 0.9, times_by_k(1, 1, 1, 1))
    assert run.adaptive.choice.k == 0
    run.chosen.clear()
    run.steps(5_000, 0.9, times_by_k(1.0, 1.4, 2.2, 5.0))
    assert run.chosen[Choice(8)] > 4_000, "within a few trials"


@pytest.mark.parametrize("lengths", [(500, 8000), (8000, 500)], ids=["longer", "shorter"])
def test_times_of_long_ago_are_told_for_what_the_rows_read_now(lengths):
    """Contexts grow, and at the end of a workload few rows are left: that is no news."""
    adaptive, noise = AdaptiveDrafting(AUTO_KS), random.Random(0)
    steps, rows, a_position = 2000, 64, 3.4e-8
    emitted = possible = 0.0

    def reads(context: float) -> dict[Choice, float]:
        return {
            choice: rows * AUTO.cycle_reads(int(context), *choice) / (choice.k + 1)
            for choice in adaptive.candidates
        }

    for context in np.linspace(*lengths, steps):
        now, choice = reads(context), adaptive.choice
        seconds = {choice: 0.005 + a_position * read for choice, read in now.items()}
        rates = {c: expected_tokens(c.k, 0.8) / (c.k + 1) / seconds[c] for c in now}
        emitted += rates[choice] * seconds[choice]
        possible += max(rates.values()) * seconds[choice]
        for _ in range(rows // 8):
            kept = next((place for place in range(choice.k) if noise.random() > 0.8), choice.k)
            adaptive.note_cycle(choice.k, kept)
        adaptive.note_step(rows, seconds[choice] * noise.uniform(0.95, 1.05), now)
    assert emitted > 0.98 * possible
    for choice in now:
        assert adaptive.seconds(choice) == pytest.approx(seconds[choice], rel=0.1)


def test_until_contexts_change_reading_takes_what_its_bytes_do():
    """Those of as many positions as the weights take half of a step's time."""
    adaptive = AdaptiveDrafting((2, 0), weights=30_000)
    for _ in range(30):
        adaptive.note_cycle(adaptive.choice.k, adaptive.choice.k)
        adaptive.note_step(64, 0.006, {Choice(2): 30_000.0, Choice(0): 30_000.0})
    adaptive.note_step(64, None, {Choice(2): 60_000.0, Choice(0): 60_000.0})
    assert adaptive.seconds(Choice(2)) == pytest.approx(0.009, rel=0.02)


@pytest.mark.parametrize("unlucky", [0, 2, 4])
def test_one_that_was_tried_at_a_bad_moment_gets_another_chance(unlucky):
    """All steps of its first trial took a fifth longer, as when the host is busy."""
    times = times_by_k(*(expected_tokens(k, 0.9) / (k + 1) for k in AUTO_KS))
    times[Choice(unlucky)] /= 1.1  # it is that much better than any other
    run, tried, slow = Run(), [], set()
    for _ in range(2000):
        choice = run.adaptive.choice
        if not tried or tried[-1] != choice:
            tried.append(choice)
        first = tried.count(choice) == 1 and choice == Choice(unlucky)
        slow.add(first)
        run.steps(1, 0.9, {c: t * (1.2 if first else 1) for c, t in times.items()})
    assert slow == {True, False}
    run.chosen.clear()
    run.steps(1000, 0.9, times)
    assert run.chosen.most_common(1)[0][0] == Choice(unlucky)


def test_steps_that_differ_at_random_teach_nothing_about_reading():
    """While contexts stay as they are, no cost is made up of noise."""
    adaptive, noise = AdaptiveDrafting((2, 0)), random.Random(0)
    for _ in range(200):
        read = 30_000 * noise.uniform(0.99, 1.01)
        adaptive.note_cycle(2, 2)
        adaptive.note_step(64, noise.uniform(0.005, 0.007), {Choice(2): read, Choice(0): read})
    known = adaptive.seconds(adaptive.choice)
    adaptive.note_step(64, None, {Choice(2): 33_000.0, Choice(0): 33_000.0})
    assert adaptive.seconds(adaptive.choice) == pytest.approx(known, rel=0.03)


@pytest.mark.parametrize("batch", [1, 36])
@pytest.mark.parametrize(("before", "after"), [(0.97, 0.1), (0.1, 0.97)])
def test_it_notices_that_the_text_has_changed(batch, before, after):
    """From drafts that pay to drafts that do not and back, also where few cycles tell."""
    run, times = Run(), times_by_k(1.0, 1.0, 1.0, 2.0)
    run.steps(6_000, before, times, batch)
    run.steps(20_000, after, times, batch)
    run.steps(5_000, after, times, batch)
    assert run.share_of_best > 0.95


def test_it_notices_that_the_text_needs_more_of_the_context():
    times = {choice: (1, 0.93, 1.13)[choice.sparsity] for choice in CHOICES if choice.k == 8}
    run = Run((8,), 3).steps(3000, [0.95, 0.95, 0.95], times)
    assert run.adaptive.choice == Choice(8, 1)
    run.chosen.clear()
    run.steps(4000, [0.95, 0.8, 0.95], times)
    assert run.chosen[Choice(8, 0)] > 3000


def test_another_batch_size_begins_with_what_the_nearest_one_knows():
    run = Run().steps(400, 0.95, LONG_CONTEXTS, batch=64)
    run.adaptive.note_step(48, None)
    assert run.adaptive.choice.k == 8
    assert not run.adaptive._trying


def test_another_batch_size_does_not_try_everything_again():
    run = Run().steps(6_000, 0.95, LONG_CONTEXTS, batch=64)
    run.chosen.clear()
    run.steps(1_500, 0.95, LONG_CONTEXTS, batch=48)
    assert run.chosen[Choice(0)] == 0, "four times as slow at 64 rows, not long ago"


def test_steps_that_did_something_else_do_not_count():
    adaptive = AdaptiveDrafting((4, 0))
    for _ in range(5000):
        adaptive.note_step(8, None)
        assert adaptive.choice.k in (4, 0)
    assert not any(steps.seconds for steps in adaptive._by_batch[8].values())


def test_the_error_of_what_is_accepted_is_that_of_the_mean():
    """Against a thousand samples of 50 cycles each."""
    rng = random.Random(0)
    means, errors = [], []
    for _ in range(1000):
        acceptance = Acceptance(8)
        for _ in range(50):
            kept = next((n for n in range(8) if rng.random() > 0.8), 8)
            acceptance.note([place < kept for place in range(8)])
        means.append(acceptance.tokens(8))
        errors.append(acceptance.relative_error(8))
    assert np.mean(errors) == pytest.approx(np.std(means) / np.mean(means), rel=0.1)
    assert Acceptance(8).relative_error(8) == np.inf
    assert Acceptance(8).relative_error(0) == 0


class RestlessRows(RowDrafting):
    """Any of those that the others' cycles have room for."""

    def __init__(self, speculation, workload):
        super().__init__(speculation, workload)
        self._random = random.Random(2)

    def drafts(self, row):
        return self._random.choice([k for k in AUTO_KS if k <= self._choice.k])


class Restless(AdaptiveDrafting):
    """Something else every few steps."""

    def __init__(self, ks, sparsities, **options):
        super().__init__(ks, sparsities, **options)
        self._random, self._left = random.Random(1), 0

    def note_step(self, batch, seconds, reads):
        self._left -= 1
        if self._left < 0:
            self.choice, self._left = self._random.choice(CHOICES), self._random.randrange(1, 25)


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
    monkeypatch.setattr(drafting_module, "AdaptiveDrafting", Restless)
    monkeypatch.setattr(drafting_module, "RowDrafting", RestlessRows)
    monkeypatch.setattr(manager_module, "LOW_WATERMARK", 0)
    monkeypatch.setattr(manager_module, "HIGH_WATERMARK", 1)
    engine = adaptive_engine(**config)
    found = run(engine, prompts_and_params()[:5])
    engine.close()
    assert_same(found, expected)
    drafted = sum(entry["stats"].drafted_at for entry in found)
    accepted = sum(entry["stats"].accepted_at for entry in found)
    assert drafted[0] > drafted[-1] > 0, "long cycles and short ones"
    assert all(acceptance.cycles > 0 for acceptance in engine._drafting.workload._acceptance)
    assert 0.2 < accepted.sum() / drafted.sum() < 0.98


def test_an_engine_that_measures_for_itself_emits_the_same(expected):
    engine = adaptive_engine()
    found = run(engine, prompts_and_params()[:5])
    assert isinstance(engine._drafting.workload, AdaptiveDrafting)
    assert sum(acceptance.cycles for acceptance in engine._drafting.workload._acceptance) > 0
    engine.close()
    assert_same(found, expected)


def test_what_is_fixed_is_not_adapted():
    engine = make_engine(QWEN3, SpeculationConfig(k=4))
    assert engine._drafting.choice is None
    assert engine._buckets.ks == (4,)
    assert engine._executor._drafter._budgets.shape[0] == 1
    engine.close()
