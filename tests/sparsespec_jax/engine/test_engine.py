"""The engine on a tiny random model: tokens in, tokens out, whatever goes wrong on the way."""

from __future__ import annotations

import dataclasses
import itertools
import threading
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparsespec_jax.config import EngineConfig, SpeculationConfig
from sparsespec_jax.engine.engine import Engine
from sparsespec_jax.engine.events import TokenEvent
from sparsespec_jax.engine.plan import Bucket
from sparsespec_jax.models.decoder import forward
from sparsespec_jax.sampling.params import SamplingParams

K = 4
TIMEOUT = 120
# Few buckets: rows that decode, chunks of prompts, and both. A pool many times larger than what a
# step computes.
CONFIG = EngineConfig(
    max_batch=4,
    max_context=4000,
    prefill_chunk=8,
    prefill_rows=2,
    batch_buckets=(4,),
    context_buckets=(128,),
    seed=0,
)
# Short contexts are drafted with full attention, longer ones are not.
SPECULATION = SpeculationConfig(k=K, min_budget=20)
BUCKETS = {
    "decode": Bucket(drafts=4, verifies=1, chunks=0, context=128),
    "prefill": Bucket(drafts=0, verifies=0, chunks=2, context=128),
    "both": Bucket(drafts=4, verifies=1, chunks=2, context=128),
}
EOS, OTHER_EOS = 95, 96
POISON = 13


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 90, length).tolist()


class Run:
    """A request and what became of it."""

    def __init__(self, engine: Engine, prompt, *, seed=None, **params):
        self.events: list[TokenEvent] = []
        self._started, self._ended = threading.Event(), threading.Event()
        self.request = engine.submit(prompt, SamplingParams(**params), self._note, seed=seed)

    def _note(self, event: TokenEvent) -> None:
        assert not self._ended.is_set(), "an event after the last one"
        self.events.append(event)
        self._started.set()
        if event.finish_reason is not None:
            self._ended.set()

    def started(self) -> Run:
        assert self._started.wait(TIMEOUT)
        return self

    def ended(self) -> Run:
        assert self._ended.wait(TIMEOUT)
        return self

    @property
    def tokens(self) -> list[int]:
        return [token for event in self.events for token in event.tokens]

    @property
    def finish_reason(self) -> str | None:
        return self.events[-1].finish_reason

    @property
    def error(self) -> Exception | None:
        return self.events[-1].error

    @property
    def stats(self):
        return self.request.stats


@pytest.fixture(scope="module")
def make_engine(tiny_model, tiny_params):
    """Engines that share their compiled steps, as compiling takes most of the time."""
    compiled, made = {}, []

    def make(params=tiny_params, config=CONFIG, model=tiny_model) -> Engine:
        engine = Engine(model, params, config, SPECULATION)
        if dataclasses.replace(config, overlap=CONFIG.overlap, seed=CONFIG.seed) == CONFIG:
            engine._executor._compiled = compiled
        made.append(engine)
        return engine

    yield make
    for engine in made:
        engine.close()


@pytest.fixture(scope="module")
def engine(make_engine) -> Engine:
    return make_engine()


def lone(engine: Engine, prompt, **params) -> list[int]:
    return Run(engine, prompt, **params).ended().tokens


# What is generated.


def test_greedy_tokens_are_those_of_the_plain_forward_pass(engine, tiny_model, tiny_params):
    prompt, new = prompt_of(30), 14
    got = lone(engine, prompt, temperature=0, max_tokens=new, ignore_eos=True)
    run = jax.jit(forward, static_argnums=2)
    tokens = np.zeros((1, 48), np.int32)
    tokens[0, : len(prompt)] = prompt
    for end in range(len(prompt), len(prompt) + new):
        tokens[0, end] = np.argmax(run(tiny_params, tokens, tiny_model)[0, end - 1])
    assert got == tokens[0, 30:44].tolist()


def test_a_request_does_not_depend_on_its_neighbours(engine):
    """Nor on when it started, what it shares and which row it got."""
    cases = [(prompt_of(length, length), 10 + length) for length in (1, 5, 8, 9, 30, 30, 17)]
    alone = [lone(engine, prompt, seed=n, max_tokens=n) for prompt, n in cases]
    together = [Run(engine, prompt, seed=n, max_tokens=n) for prompt, n in cases]
    assert [run.ended().tokens for run in together] == alone
    assert {run.finish_reason for run in together} <= {"stop", "length"}


def test_waiting_for_every_step_changes_nothing(make_engine, engine):
    sync = make_engine(config=dataclasses.replace(CONFIG, overlap="sync"))
    prompt = prompt_of(20)
    assert lone(sync, prompt, seed=3, max_tokens=25) == lone(engine, prompt, seed=3, max_tokens=25)


def test_any_number_of_threads_may_submit(engine):
    cases = [(prompt_of(5 + number % 3, number), number) for number in range(12)]
    alone = [lone(engine, prompt, seed=seed, max_tokens=12) for prompt, seed in cases]
    results = {}

    def work(part):
        runs = [(seed, Run(engine, prompt, seed=seed, max_tokens=12)) for prompt, seed in part]
        results.update({seed: run.ended().tokens for seed, run in runs})

    threads = [threading.Thread(target=work, args=(cases[start::4],)) for start in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT)
    assert [results[number] for number in range(12)] == alone


def test_tokens_arrive_while_the_request_runs(engine):
    run = Run(engine, prompt_of(10), max_tokens=30, ignore_eos=True).ended()
    assert len(run.tokens) == 30
    assert 30 / (K + 1) <= len(run.events) <= 30
    assert [event.finish_reason for event in run.events[:-1]] == [None] * (len(run.events) - 1)
    stats = run.stats
    assert stats.submitted <= stats.admitted <= stats.first_token <= stats.finished
    assert stats.output_tokens == 30


def test_seeds_come_from_the_request_or_else_from_the_engines(make_engine):
    def run(engine_seed, **seeds):
        engine = make_engine(config=dataclasses.replace(CONFIG, seed=engine_seed))
        return [lone(engine, [1, 2, 3], max_tokens=8, **seeds) for _ in range(2)]

    first = run(1)
    assert first == run(1)
    assert first != run(2)
    assert first[0] != first[1]
    same = run(1, seed=5)
    assert same[0] == same[1] == run(2, seed=5)[0]


# Where requests end.


@pytest.mark.parametrize("eos", [EOS, OTHER_EOS])
@pytest.mark.parametrize("place", range(2 * K + 3))
def test_nothing_follows_an_end_of_sequence_wherever_in_a_cycle_it_comes(engine, eos, place):
    """As the first token, as a draft, as a verification's own token; any id of the model's list.

    The drafts are all right here, so each cycle emits K + 1 tokens until it meets the end.
    """
    run = Run(engine, [1, 2], min_tokens=place, logit_bias={eos: 100}, max_tokens=50, seed=1)
    run.ended()
    assert run.finish_reason == "stop"
    assert len(run.tokens) == place + 1
    assert run.tokens[-1] == eos
    assert not {EOS, OTHER_EOS} & set(run.tokens[:-1])
    full, rest = divmod(place, K + 1)
    stats = run.stats
    assert stats.output_tokens == place + 1
    assert stats.cycles == full + bool(rest)
    assert (0 if stats.accepted_at is None else stats.accepted_at.sum()) == K * full + rest


def test_an_end_of_sequence_that_is_ignored_ends_nothing(engine):
    run = Run(engine, [1, 2], logit_bias={EOS: 100}, max_tokens=9, ignore_eos=True).ended()
    assert run.tokens == [EOS] * 9
    assert run.finish_reason == "length"


def test_an_end_of_sequence_in_the_prompt_ends_nothing(engine):
    run = Run(engine, [1, EOS, 2, EOS], max_tokens=7, logit_bias={EOS: -100, OTHER_EOS: -100})
    assert len(run.ended().tokens) == 7


def test_a_stop_id_ends_the_request_at_its_first_occurrence(engine):
    prompt, params = prompt_of(40), {"seed": 2, "max_tokens": 40, "ignore_eos": True}
    whole = lone(engine, prompt, **params)
    for stop in whole[::7]:
        run = Run(engine, prompt, stop_token_ids=(stop,), **params).ended()
        assert run.tokens == whole[: whole.index(stop) + 1]
        assert run.finish_reason == "stop"


@pytest.mark.parametrize("max_tokens", range(1, K + 4))
def test_a_request_ends_at_its_maximum_length_and_not_beyond(engine, max_tokens):
    run = Run(engine, [1, 2, 3], max_tokens=max_tokens, ignore_eos=True, seed=1).ended()
    assert len(run.tokens) == max_tokens
    assert run.finish_reason == "length"


def test_acceptance_counts_emitted_drafts_only(engine):
    run = Run(engine, prompt_of(60), max_tokens=50, ignore_eos=True, seed=1).ended()
    stats = run.stats
    assert stats.cycles >= 50 / (K + 1)
    own = stats.output_tokens - 1 - stats.accepted_at.sum()
    assert stats.cycles - 1 <= own <= stats.cycles  # the last cycle may end within its drafts
    assert 0 < stats.mean_accepted < K
    assert (np.diff(stats.accepted_at) <= 0).all()
    # The last cycle counts as far as the text goes.
    assert set(stats.drafted_at.tolist()) <= {stats.cycles, stats.cycles - 1}


# Cancelling and closing.


def test_a_running_request_can_be_cancelled(engine):
    prompt = prompt_of(10)
    whole = lone(engine, prompt, seed=1, max_tokens=100, ignore_eos=True)
    run = Run(engine, prompt, seed=1, max_tokens=3000, ignore_eos=True).started()
    engine.cancel(run.request)
    run.ended()
    assert run.finish_reason == "cancelled"
    common = min(len(whole), len(run.tokens))
    assert run.tokens[:common] == whole[:common]


def test_a_waiting_request_can_be_cancelled_and_the_others_go_on(engine):
    running = [Run(engine, [number], max_tokens=60, ignore_eos=True) for number in range(4)]
    waiting = Run(engine, [9], max_tokens=60, ignore_eos=True)
    engine.cancel(waiting.request)
    assert waiting.ended().finish_reason == "cancelled"
    assert waiting.tokens == []
    assert waiting.stats.admitted is None
    assert [len(run.ended().tokens) for run in running] == [60] * 4


def test_cancelling_one_leaves_those_with_its_prompt_alone(engine):
    """Also while it computes the prompt for all of them."""
    prompt = prompt_of(40)
    whole = lone(engine, prompt, seed=1, max_tokens=20)
    first, *others = (Run(engine, prompt, seed=1, max_tokens=20) for _ in range(4))
    engine.cancel(first.request)
    assert [run.ended().tokens for run in others] == [whole] * 3


def test_cancelling_what_has_ended_is_nothing(engine):
    run = Run(engine, [1], max_tokens=1).ended()
    engine.cancel(run.request)
    assert len(lone(engine, [1], max_tokens=3, ignore_eos=True)) == 3
    assert len(run.events) == 1


def test_closing_cancels_what_runs_and_what_waits(make_engine):
    engine = make_engine()
    runs = [Run(engine, [number], max_tokens=2000, ignore_eos=True) for number in range(6)]
    runs[0].started()
    engine.close()
    assert [run.ended().finish_reason for run in runs] == ["cancelled"] * 6
    engine.close()
    with pytest.raises(RuntimeError, match="closed"):
        Run(engine, [1])


def test_an_engine_never_used_closes(make_engine):
    make_engine().close()


def test_a_quiet_engine_holds_nothing(engine):
    before = engine.stats().output_tokens
    runs = [Run(engine, prompt_of(9), max_tokens=10, ignore_eos=True) for _ in range(6)]
    engine.cancel(runs[-1].request)
    for run in runs:
        run.ended()
    stats = engine.stats()
    assert stats.running == stats.waiting == stats.slots_used == stats.tokens_offloaded == 0
    assert 50 <= stats.output_tokens - before <= 60
    assert stats.step_tokens > stats.output_tokens
    assert stats.dispatch.steps > 0


# What goes wrong.


@pytest.fixture(scope="module")
def poisoned(make_engine, tiny_params) -> Engine:
    """An engine whose model has no finite embedding for POISON."""
    embedding = tiny_params["embedding"].at[POISON].set(jnp.nan)
    return make_engine({**tiny_params, "embedding": embedding})


@pytest.mark.parametrize(
    "prompt",
    [[1, POISON, 2], [POISON], [*prompt_of(30), POISON], [POISON, *prompt_of(30)]],
    ids=["inside", "alone", "last", "first"],
)
def test_logits_that_are_no_numbers_end_their_request_and_no_other(poisoned, prompt):
    """Neither those that run beside it, nor those that get its slots and its row."""
    params = {"max_tokens": 40, "logit_bias": {POISON: -100}, "ignore_eos": True}
    prompts = [prompt_of(length, length) for length in (3, 20, 33)]
    prompts = [[token for token in tokens if token != POISON] for tokens in prompts]
    alone = [lone(poisoned, tokens, seed=len(tokens), **params) for tokens in prompts]

    before = [Run(poisoned, tokens, seed=len(tokens), **params) for tokens in prompts]
    for run in before:
        run.started()
    bad = Run(poisoned, prompt, **params)
    after = [Run(poisoned, tokens, seed=len(tokens), **params) for tokens in prompts]
    assert [run.ended().tokens for run in before] == alone
    assert [run.ended().tokens for run in after] == alone
    assert bad.ended().finish_reason == "error"
    assert isinstance(bad.error, FloatingPointError)
    assert str(bad.request.request_id) in str(bad.error)
    assert bad.tokens == []


def test_what_the_padding_of_a_failing_row_leaves_in_the_trash_slot_harms_nobody(poisoned):
    """Padding repeats the row's first token, and masked positions read the trash slot."""
    params = {"max_tokens": 60, "ignore_eos": True, "seed": 1}
    prompt = [token for token in prompt_of(20) if token != POISON]
    expected = lone(poisoned, prompt, logit_bias={POISON: -100}, **params)
    good = [Run(poisoned, prompt, logit_bias={POISON: -100}, **params) for _ in range(3)]
    for run in good:
        run.started()
    bad = [Run(poisoned, [POISON, *prompt_of(14, seed)], **params) for seed in range(8)]
    assert [run.ended().finish_reason for run in bad] == ["error"] * 8
    assert [run.ended().tokens for run in good] == [expected] * 3


def test_a_request_that_fails_later_keeps_what_it_emitted(poisoned):
    run = Run(poisoned, [1, 2], logit_bias={POISON: 100}, max_tokens=20, ignore_eos=True).ended()
    assert run.tokens == [POISON]
    assert run.finish_reason == "error"
    assert "after 1 tokens" in str(run.error)


def test_a_request_fails_where_it_would_without_drafts(poisoned, tiny_model):
    """Not in a draft that is rejected, and with all tokens before it."""
    params = [
        {"logit_bias": {POISON: bias}, "max_tokens": 40, "ignore_eos": True, "seed": seed}
        for seed, bias in enumerate((2, 2, 2, 3, 3, 4))
    ]
    plain = Engine(tiny_model, poisoned._executor._params, CONFIG, SpeculationConfig(method="none"))
    prompt = [token for token in prompt_of(20) if token != POISON]
    expected = [Run(plain, prompt, **p).ended() for p in params]
    found = [run.ended() for run in [Run(poisoned, prompt, **p) for p in params]]
    plain.close()
    assert [run.tokens for run in found] == [run.tokens for run in expected]
    assert [run.finish_reason for run in found] == [run.finish_reason for run in expected]
    assert {run.tokens[-1] for run in found if run.finish_reason == "error"} == {POISON}
    assert max(len(run.tokens) for run in found if run.finish_reason == "error") > K


def test_a_step_that_fails_ends_every_request_with_its_error_and_the_next_call_works(
    make_engine, monkeypatch
):
    engine = make_engine()
    expected = lone(engine, [1, 2, 3], seed=1, max_tokens=20)
    dispatch, steps = engine._executor.dispatch, []

    def fail_once(bucket, packed):
        steps.append(bucket)
        if len(steps) == 8:
            raise RuntimeError("the device is on fire")
        return dispatch(bucket, packed)

    monkeypatch.setattr(engine._executor, "dispatch", fail_once)
    runs = [Run(engine, [n], max_tokens=900, ignore_eos=True) for n in range(6)]
    for run in runs:
        assert run.ended().finish_reason == "error"
        assert str(run.error) == "the device is on fire"
    assert engine.stats().slots_used == 0
    assert lone(engine, [1, 2, 3], seed=1, max_tokens=20) == expected


def test_an_engine_that_cannot_start_over_closes(make_engine, monkeypatch):
    engine = make_engine()

    def fail(*arguments):
        raise RuntimeError("no device")

    monkeypatch.setattr(engine._executor, "dispatch", fail)
    monkeypatch.setattr(engine._executor, "reset", fail)
    run = Run(engine, [1], max_tokens=5).ended()
    assert run.finish_reason == "error"
    assert any("no device" in note for note in run.error.__notes__)
    with pytest.raises(RuntimeError, match="closed"):
        Run(engine, [1])


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], r"non-empty .* shape \(0,\)"),
        ([[1, 2], [3, 4]], r"shape \(2, 2\)"),
        ([1.5, 2.0], "integers, got float64"),
        ([True, False], "integers, got bool"),
        ([1, 97], "id 97, allowed are 0 to 96"),
        ([-1], "id -1, allowed are 0 to 96"),
        ([1] * 4000, "4000 tokens.* 4000"),
    ],
)
def test_a_prompt_that_can_never_run_is_refused_with_its_numbers(engine, prompt, message):
    with pytest.raises(ValueError, match=message):
        Run(engine, prompt)


def test_a_request_that_can_never_fit_the_pool_is_refused_with_its_numbers(make_engine):
    token = 256  # bytes of a token's KV: 2 layers, 2 arrays, 2 heads of 8 float32
    small = make_engine(config=dataclasses.replace(CONFIG, kv_cache_memory=51 * token))
    assert small.stats().slots == 50
    with pytest.raises(ValueError, match=r"10 prompt tokens.*max_tokens=37.* 50 tokens, 4 of"):
        Run(small, prompt_of(10), max_tokens=37)
    with pytest.raises(ValueError, match="46 prompt tokens and max_tokens=None"):
        Run(small, prompt_of(46))


def test_a_pool_for_not_even_two_tokens_is_refused(make_engine):
    with pytest.raises(ValueError, match=r"kv_cache_memory=500 gives 500 bytes.* 256"):
        make_engine(config=dataclasses.replace(CONFIG, kv_cache_memory=500))


def test_a_context_beyond_the_models_is_refused(make_engine):
    with pytest.raises(ValueError, match=r"max_context=9000 .*=8192"):
        make_engine(config=dataclasses.replace(CONFIG, max_context=9000))


@pytest.mark.parametrize("seed", [-1, 2**64])
def test_a_seed_out_of_range_is_refused_when_it_is_submitted(engine, seed):
    """In the step it would end the requests of everybody else."""
    with pytest.raises(ValueError, match=f"seed={seed}"):
        Run(engine, [1], seed=seed)
    assert len(lone(engine, [1], max_tokens=2, ignore_eos=True)) == 2


def test_too_many_stop_ids_for_the_models_are_refused_when_they_are_submitted(
    make_engine, tiny_model
):
    engine = make_engine(model=dataclasses.replace(tiny_model, eos_token_ids=tuple(range(80, 90))))
    with pytest.raises(ValueError, match="26 stop ids"):
        Run(engine, [1], stop_token_ids=tuple(range(16)))


@pytest.mark.parametrize("params", [{"stop_token_ids": (97,)}, {"logit_bias": {97: 1.0}}])
def test_token_ids_the_model_does_not_have_are_refused(engine, params):
    with pytest.raises(ValueError, match="97"):
        Run(engine, [1], **params)


# What a step costs.


@pytest.fixture
def dispatched(engine, monkeypatch) -> list[tuple[tuple, tuple]]:
    """Arguments and results of the steps that run from here on."""
    calls = []
    compile_step = engine._executor.compile

    def recording(bucket):
        step = compile_step(bucket)

        def call(*arguments):
            leaves = [jax.tree.leaves(argument) for argument in arguments]
            results = step(*arguments)
            calls.append((leaves, results))
            return results

        return call

    monkeypatch.setattr(engine._executor, "compile", recording)
    return calls


def test_one_packed_array_is_all_that_a_step_sends_to_the_device(engine, dispatched):
    """Twelve small ones cost thirty times as much."""
    Run(engine, prompt_of(20), max_tokens=10).ended()
    assert len(dispatched) > 5
    for (before, (pools, state, _)), (after, _) in itertools.pairwise(dispatched):
        params, old_pools, old_state, packed, peers = after
        assert [id(leaf) for leaf in params] == [id(leaf) for leaf in before[0]]
        assert [id(leaf) for leaf in old_pools] == [id(leaf) for leaf in jax.tree.leaves(pools)]
        assert [id(leaf) for leaf in old_state] == [id(leaf) for leaf in jax.tree.leaves(state)]
        assert not peers
        assert len(packed) == 1
        assert type(packed[0]) is np.ndarray
        assert packed[0].dtype == np.int32
        assert packed[0].ndim == 1


def test_a_step_returns_one_small_array_to_the_host(engine, dispatched):
    Run(engine, prompt_of(20), max_tokens=10).ended()
    for _, (_, _, result) in dispatched:
        assert result.dtype == jnp.int32
        assert result.ndim == 2
        assert result.size <= (1 + 2) * (3 + K + 1)


def test_no_placeholder_is_ever_fed(make_engine, tiny_model, monkeypatch):
    """Whatever a step may read as a token is one, with drafts, stops and cancellations about."""
    engine = make_engine()
    executor, seen = engine._executor, Counter()
    dispatch = executor.dispatch

    def checked(bucket, packed):
        result = dispatch(bucket, packed)
        tokens = np.asarray(executor._state.tokens)
        seen["steps"] += 1
        seen["bad"] += int(((tokens < 0) | (tokens >= tiny_model.vocab_size)).sum())
        return result

    monkeypatch.setattr(executor, "dispatch", checked)
    runs = [Run(engine, prompt_of(7 + n, n), seed=n, max_tokens=5 + 4 * n) for n in range(7)]
    runs[5].started()
    engine.cancel(runs[5].request)
    for run in runs:
        assert set(run.ended().tokens) <= set(range(tiny_model.vocab_size))
    assert seen["steps"] > 10
    assert seen["bad"] == 0


@pytest.mark.parametrize("rows", BUCKETS)
def test_a_step_updates_the_pool_in_place(engine, rows):
    """A copy of even one layer's keys would take more than all its temporary memory."""
    pools = engine._executor._pools
    layer_keys = pools[0][0].nbytes
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(pools)) == 4 * layer_keys
    memory = engine._executor.compile(BUCKETS[rows]).memory_analysis()
    assert memory.temp_size_in_bytes < layer_keys
    assert memory.alias_size_in_bytes >= 4 * layer_keys


def test_warming_up_compiles_what_ordinary_traffic_uses_and_runs_it_once(engine, monkeypatch):
    compiled, ran, shown = set(), [], []

    def compile_step(bucket):
        compiled.add(bucket)

        def step(params, pools, state, *_):
            ran.append(bucket)
            return pools, state, jnp.zeros(())

        return step

    monkeypatch.setattr(engine._executor, "compile", compile_step)
    engine.warmup(progress=lambda steps: shown.extend(steps) or steps)
    assert len(compiled) == len(ran) == len(shown)
    assert set(BUCKETS.values()) < set(ran) == compiled


def test_warming_up_leaves_all_but_the_trash_row_and_slot(engine, monkeypatch):
    executor = engine._executor
    lone(engine, prompt_of(30), max_tokens=20)
    executor.transform(lambda pools, state: (jax.tree.map(lambda x: x + 1, pools), state))
    before = jax.device_get((executor._pools, executor._state))
    monkeypatch.setattr(engine._buckets, "main", lambda: list(BUCKETS.values()))
    engine.warmup()
    pools, state = jax.device_get((executor._pools, executor._state))
    jax.tree.map(lambda old, new: np.testing.assert_array_equal(old[1:], new[1:]), before[0], pools)
    rows = CONFIG.max_batch
    for old, new in zip(*map(jax.tree.leaves, (before[1], state)), strict=True):
        axis = old.shape.index(rows + 1)
        np.testing.assert_array_equal(*(leaf.take(range(rows), axis) for leaf in (old, new)))
    assert state.done[rows]
    assert state.length[rows] == 1
    assert not state.page_table[rows].any()


def test_a_step_that_does_not_compile_fails_the_warmup(engine, monkeypatch):
    def fail(bucket):
        raise RuntimeError("out of registers")

    monkeypatch.setattr(engine._executor, "compile", fail)
    with pytest.raises(RuntimeError, match="out of registers"):
        engine.warmup()
