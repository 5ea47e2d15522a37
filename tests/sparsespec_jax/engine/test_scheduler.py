"""The scheduler, driven through a simulated device: no step may read what it should not."""

from __future__ import annotations

import dataclasses
import functools
import random
from collections import Counter, deque
from typing import NamedTuple
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsespec_jax.engine import plan as plan_module
from sparsespec_jax.engine.adaptive import Choice
from sparsespec_jax.engine.buckets import Buckets
from sparsespec_jax.engine.planned import PlannedStep
from sparsespec_jax.engine.request import Request
from sparsespec_jax.engine.row import Row
from sparsespec_jax.engine.scheduler import PRIORITY_TURNS, Scheduler
from sparsespec_jax.kv import manager as manager_module
from sparsespec_jax.kv.manager import KvManager
from sparsespec_jax.kv.space import KvSpace
from sparsespec_jax.sampling.params import SamplingParams
from sparsespec_jax.sampling.rows import pack_row
from tests.sparsespec_jax.engine.simulated_device import Script, SimulatedDevice

EOS_IDS = (95, 96)
MAX_CONTEXT = 64


@dataclasses.dataclass(frozen=True)
class Arrival:
    """A request to be: its life is fixed before it starts. Times are in steps.

    expected: output tokens that admission is told, None for `max_new`.
    """

    prompt: tuple[int, ...]
    max_new: int = 8
    stop_after: int = 100
    agreement: float = 0.7
    arrives: int = 0
    cancelled: int | None = None
    expected: int | None = None

    @property
    def max_length(self) -> int:
        return len(self.prompt) + self.max_new


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Arrivals and the engine they meet. `spare`: slots beyond what the largest request needs."""

    arrivals: tuple[Arrival, ...]
    k: int = 4
    max_batch: int = 4
    chunk: int = 4
    prefill_rows: int = 2
    batch_buckets: tuple[int, ...] | None = None
    spare: int = 100
    in_flight: int = 1
    delayed: bool = False
    updates_per_chunk: int = 512
    policy: str = "aggressive"
    phases: str = "balanced"
    ks: tuple[int, ...] = ()
    by_row: bool = False
    kv_chunk: int = 4
    host_chunks: int = 1000
    watermarks: tuple[int, int] = (8, 32)

    @property
    def capacity(self) -> int:
        return max(arrival.max_length for arrival in self.arrivals) + self.k + self.spare


class AnyDrafts:
    """In place of `RowDrafting`: each row drafts what it likes, at most as many as the others."""

    def __init__(self, ks: tuple[int, ...]):
        self._ks, self._random = ks, random.Random(0)

    def update(self, choice: Choice, rows: list[Row], context: int, verifies: int) -> None:
        self._most = choice.k

    def drafts(self, row: Row) -> int:
        return self._random.choice([k for k in self._ks if k <= self._most])


class Step(NamedTuple):
    """What a dispatched step held, padding not counted."""

    drafts: int
    verifies: int
    prompt_tokens: int
    planned: PlannedStep


class Loop:
    """The engine's loop, with the simulated device for an executor."""

    def __init__(self, traffic: Traffic):
        self.traffic = traffic
        self.buckets = Buckets(
            max_batch=traffic.max_batch,
            max_context=MAX_CONTEXT,
            k=traffic.k,
            chunk=traffic.chunk,
            prefill_rows=traffic.prefill_rows,
            batch_buckets=traffic.batch_buckets,
            context_buckets=(32, 64),
            phases=traffic.phases,
            ks=tuple(k for k in traffic.ks if k < traffic.k),
            delayed=traffic.delayed,
        )
        self.space = KvSpace(traffic.capacity + 1, traffic.kv_chunk, traffic.host_chunks)
        self.kv = KvManager(self.space, traffic.policy, traffic.k, chunks_per_step=2)
        by_row = AnyDrafts(self.buckets.ks) if traffic.by_row else None
        self.scheduler = Scheduler(self.buckets, self.kv, traffic.phases, by_row)
        self.device = SimulatedDevice(self.buckets, traffic.capacity + 1)
        self.scripts: list[Script] = []
        self.tokens: dict[int, list[int]] = {}
        self.live: dict[int, Script] = {}
        self.cancelled: set[int] = set()
        self.admitted: list[int] = []
        self.steps: list[Step] = []
        self._ks = random.Random(0)
        self._in_flight = deque()
        for arrival in traffic.arrivals:
            self._prepare(arrival)

    def _prepare(self, arrival: Arrival) -> None:
        number = len(self.scripts)
        prompt = np.array(arrival.prompt, np.int32)
        params = SamplingParams()
        sampling = pack_row(params, number, len(prompt), EOS_IDS)
        most = arrival.max_length
        told = None
        if arrival.expected is not None:
            alone = self.traffic.capacity - self.traffic.k
            told = min(len(prompt) + arrival.expected, alone)
        request = Request(number, prompt, params, sampling, most, lambda event: None, told)
        stop_at = len(prompt) - 1 + arrival.stop_after
        script = Script(request, stop_at, arrival.agreement)
        self.scripts.append(script)
        self.device.expect(script)

    def run(self) -> Loop:
        """Until nothing is left; a loop that can make no progress fails."""
        clock, last_event = 0, self._last_event()
        while clock <= last_event or self.live or self._in_flight:
            self._requests_come_and_go(clock)
            progress = self._advance()
            assert progress or not self.live, "nothing runs, and nothing can be admitted"
            self._check_ownership()
            clock += 1
            assert clock < 5_000
        return self

    def _last_event(self) -> int:
        arrivals = self.traffic.arrivals
        return max(max(a.arrives, a.cancelled or 0) for a in arrivals)

    def _requests_come_and_go(self, clock: int) -> None:
        for script, arrival in zip(self.scripts, self.traffic.arrivals, strict=True):
            number = script.request.request_id
            if arrival.arrives == clock:
                self.scheduler.add(script.request)
                self.live[number] = script
                self.tokens[number] = []
            if arrival.cancelled == clock and number in self.live:
                self.scheduler.remove(script.request)
                self.cancelled.add(number)
                del self.live[number]

    def _advance(self) -> bool:
        if self.traffic.ks:
            k = self._ks.choice(self.buckets.ks)
            self.scheduler.choice = Choice(k, self._ks.randrange(3) if k else 0)
        planned = self.scheduler.plan()
        if planned is not None:
            self.admitted += [request.request_id for request in planned.admitted]
            self.steps.append(self._checked(planned))
            self._in_flight.append((planned, self.device.run(planned)))
        keep = self.traffic.in_flight if planned is not None else 0
        was_waiting = bool(self._in_flight)
        while len(self._in_flight) > keep:
            self._read(*self._in_flight.popleft())
            if planned is None:
                break
        return planned is not None or was_waiting

    def _read(self, planned: PlannedStep, result) -> None:
        for emitting in planned.emitting:
            entry, number = emitting.entry, emitting.row.request.request_id
            new = result.tokens[entry]
            if self.scheduler.read(emitting, len(new), bool(result.finished[entry])):
                self.tokens[number] += new
                if result.finished[entry]:
                    del self.live[number]
                elif self.traffic.delayed:
                    self.scheduler.commit(emitting.row, len(new), new[-1])
            else:
                assert number not in self.live
                assert number in self.cancelled or not new

    def _checked(self, planned: PlannedStep) -> Step:
        bucket = planned.bucket
        plan = self.buckets.layout(bucket).unpack(planned.packed)
        drafts, verifies = (
            int((section[:, 0] != self.device.trash).sum())
            for section in (plan.drafts, plan.verifies)
        )
        step = Step(drafts, verifies, int(plan.chunks[:, 2].sum()), planned)
        assert drafts + verifies <= self.traffic.max_batch
        if self.traffic.phases == "balanced":
            k = self.buckets.queries_of(bucket) - 1
            assert verifies <= self.buckets.most_verifies(self.traffic.max_batch, k)
        assert planned.tokens <= (
            drafts + verifies * (self.traffic.k + 1) + bucket.chunks * self.traffic.chunk
        )
        return step

    def _check_ownership(self) -> None:
        """A slot of a request's own is nobody else's; a prefix is shared among equal prompts."""
        own, shared = Counter(), {}
        for row in self.scheduler._rows.values():
            if row.kv.parked:
                continue
            slots = self.device.page_table[row.index, : row.kv.mapped]
            prefix = len(row.request.prompt) - 1
            own.update(slots[prefix:])
            for slot in slots[:prefix]:
                assert shared.setdefault(slot, row.request.prefix_key) == row.request.prefix_key
        assert all(count == 1 for count in own.values())
        assert own.keys().isdisjoint(shared)
        assert len(own) + len(shared) <= self.space.allocator.used


def run(traffic: Traffic) -> Loop:
    low, high = traffic.watermarks
    with (
        mock.patch.object(plan_module, "UPDATES_PER_CHUNK", traffic.updates_per_chunk),
        mock.patch.object(manager_module, "LOW_WATERMARK", low),
        mock.patch.object(manager_module, "HIGH_WATERMARK", high),
    ):
        return Loop(traffic).run()


def requests(scheduler: Scheduler) -> list[Request]:
    """Those that run, and those that wait."""
    return [*(row.request for row in scheduler._rows.values()), *scheduler._waiting]


def assert_all_is_well_in_the_end(loop: Loop) -> None:
    for script in loop.scripts:
        number = script.request.request_id
        output = script.output
        if number in loop.cancelled:
            output = output[: len(loop.tokens[number])]
        assert loop.tokens[number] == output
    assert loop.admitted == sorted(loop.admitted), "not first come, first served"
    assert set(range(len(loop.scripts))) - set(loop.admitted) <= loop.cancelled
    assert loop.scheduler.running == loop.scheduler.waiting == 0
    assert requests(loop.scheduler) == []
    assert loop.space.allocator.used == loop.space.away == 0


PROMPTS = [(7,), (7, 8, 9, 1, 2), (7, 8, 9, 1, 3), tuple(range(20, 39))]


@st.composite
def arrivals(draw) -> Arrival:
    arrives = draw(st.sampled_from([0, 0, 1, 2, 5, 13, 30]))
    delay = draw(st.none() | st.integers(0, 12))
    return Arrival(
        prompt=draw(st.sampled_from(PROMPTS)),
        max_new=draw(st.integers(1, 30)),
        stop_after=draw(st.integers(1, 40)),
        agreement=draw(st.sampled_from([0.0, 0.7, 1.0])),
        arrives=arrives,
        cancelled=None if delay is None else arrives + delay,
        expected=draw(st.none() | st.integers(1, 30)),
    )


@st.composite
def traffics(draw) -> Traffic:
    fewest = draw(st.sampled_from([1, 4, 8]))
    requests = draw(st.lists(arrivals(), min_size=fewest, max_size=14))
    return Traffic(
        arrivals=tuple(sorted(requests, key=lambda arrival: arrival.arrives)),
        k=draw(st.sampled_from([0, 1, 4, 8])),
        max_batch=draw(st.sampled_from([1, 2, 4, 7, 16])),
        chunk=draw(st.sampled_from([1, 3, 16])),
        prefill_rows=draw(st.sampled_from([1, 2, 4])),
        batch_buckets=draw(st.sampled_from([None, (1,), (2, 4, 8), (3,), (16,)])),
        spare=draw(st.sampled_from([0, 20, 50, 200])),
        in_flight=draw(st.sampled_from([1, 1, 0])),
        delayed=draw(st.booleans()),
        updates_per_chunk=draw(st.sampled_from([512, 1])),
        ks=draw(st.sampled_from([(), (), (0,), (0, 2)])),
        by_row=draw(st.booleans()),
        policy=draw(st.sampled_from(["aggressive", "aggressive", "conservative"])),
        phases=draw(st.sampled_from(["balanced", "balanced", "random", "lockstep"])),
        kv_chunk=draw(st.sampled_from([1, 4, 16])),
        host_chunks=draw(st.sampled_from([0, 2, 10, 1000])),
        watermarks=draw(st.sampled_from([(0, 0), (0, 0), (1, 4), (8, 32)])),
    )


@settings(max_examples=100, deadline=None)
@given(traffics())
def test_any_traffic_ends_well_and_no_step_touches_what_is_not_its_own(traffic):
    """Whatever the arrivals, cancellations, sizes and what is accepted."""
    assert_all_is_well_in_the_end(run(traffic))


def test_who_is_parked_before_a_first_step_counts_as_admitted_all_the_same():
    """With the first step that follows, as nobody could run in that one."""
    disagreed = functools.partial(Arrival, agreement=0.0)
    last, long = disagreed((7,), max_new=1, arrives=30), tuple(range(20, 39))
    before = [
        *[disagreed((7,), max_new=1)] * 4,
        Arrival((7, 8, 9, 1, 2), max_new=14),
        disagreed((7,), max_new=9, stop_after=6),
        disagreed(long, max_new=2),
        disagreed(long, max_new=23, cancelled=0),
    ]
    sizes = dict(k=4, max_batch=4, chunk=1, prefill_rows=1, spare=0, kv_chunk=1, host_chunks=10)
    loop = run(Traffic((*before, last), **sizes, delayed=True, watermarks=(0, 0), in_flight=1))
    assert_all_is_well_in_the_end(loop)
    assert loop.admitted[-1] == len(before)


def _prompt_tokens(loop: Loop) -> int:
    return sum(step.prompt_tokens for step in loop.steps)


def _fixed(count: int, **changes) -> tuple[Arrival, ...]:
    """Requests with prompts of their own."""
    return tuple(Arrival((number, number + 1, number + 2), **changes) for number in range(count))


def test_without_requests_there_is_nothing_to_do():
    assert Loop(Traffic(_fixed(1))).scheduler.plan() is None


def test_a_cycle_is_k_drafts_and_then_one_verification():
    loop = run(Traffic(_fixed(1, max_new=11, agreement=1.0), k=4))
    steps = [step[:3] for step in loop.steps]
    cycle = [(1, 0, 0)] * 4 + [(0, 1, 0)]
    assert steps[:11] == [(0, 0, 3), *cycle, *cycle]
    assert loop.tokens[0] == loop.scripts[0].output


def test_without_drafts_every_step_emits_a_token_of_every_row():
    loop = run(Traffic(_fixed(3, max_new=6), k=0, prefill_rows=4))
    assert [step[:3] for step in loop.steps[:6]] == [(0, 0, 9)] + [(0, 3, 0)] * 5


def test_the_next_step_is_planned_before_the_last_result_is_read():
    """A row is found finished one step late, and that step is all that is wasted on it."""
    late, sync = (run(Traffic(_fixed(1, max_new=5), k=0, in_flight=n)) for n in (1, 0))
    assert late.tokens == sync.tokens
    assert len(late.steps) == len(sync.steps) + 1


@pytest.mark.parametrize("stagger", [0, 3])
def test_steps_have_about_as_many_tokens_as_each_other(stagger):
    """B (2k + 1) / (k + 1) tokens on average, and never off by more than one verification."""
    batch, k = 16, 4
    requests = tuple(
        Arrival((number,), max_new=60, agreement=0.7, arrives=number * stagger)
        for number in range(batch)
    )
    loop = run(Traffic(requests, k=k, max_batch=batch, prefill_rows=4, spare=2000))
    full = [step for step in loop.steps if step.drafts + step.verifies == batch]
    steady = [step.planned.tokens for step in full[k + 1 :]]
    mean = batch * (2 * k + 1) / (k + 1)
    assert len(steady) > 2 * (k + 1)
    assert max(abs(tokens - mean) for tokens in steady) <= k + 1
    whole = len(steady) // (k + 1) * (k + 1)
    assert np.mean(steady[:whole]) == pytest.approx(mean, abs=0.5)


def test_with_delayed_verification_a_row_sits_out_the_step_after_its_own():
    loop = run(Traffic(_fixed(2, max_new=11, agreement=1.0), k=4, prefill_rows=2, delayed=True))
    assert_all_is_well_in_the_end(loop)
    emitted = [[], []]  # by request, the steps that emit
    for index, step in enumerate(loop.steps):
        for emitting in step.planned.emitting:
            emitted[emitting.row.request.request_id].append(index)
    assert emitted[0] == [0, 5, 11]
    assert emitted[1][:3] == [0, 4, 10]
    assert [step.drafts for step in loop.steps[:8]] == [0, 2, 2, 2, 1, 0, 1, 2]


@pytest.mark.parametrize("stagger", [1, 3])
def test_with_delayed_verification_rows_spread_over_a_cycle_that_is_a_step_longer(stagger):
    batch, k = 18, 4
    requests = tuple(
        Arrival((number,), max_new=90, agreement=0.7, arrives=number * stagger)
        for number in range(batch)
    )
    traffic = Traffic(requests, k=k, max_batch=batch, prefill_rows=4, spare=3000, delayed=True)
    loop = run(traffic)
    start = batch * stagger + 2
    steady = loop.steps[start : start + 5 * (k + 2)]
    assert all(step.prompt_tokens == 0 for step in steady)
    assert {step.verifies for step in steady} == {batch // (k + 2)}
    assert {step.drafts for step in steady} == {batch // (k + 2) * k}


def test_rows_that_all_want_to_verify_at_once_take_turns():
    """The bucket is that of all rows that run, not of the few that find a place."""
    requests = tuple(Arrival((number,), max_new=20) for number in range(4))
    loop = run(Traffic(requests, k=1, max_batch=8, batch_buckets=(2, 4, 8), prefill_rows=4))
    assert_all_is_well_in_the_end(loop)


def test_no_row_waits_longer_than_a_cycle_for_its_verification():
    k = 1
    requests = tuple(Arrival((number,), max_new=30) for number in range(16))
    loop = run(Traffic(requests, k=k, max_batch=16, prefill_rows=16, spare=2000))
    verified = {number: [] for number in range(16)}
    for index, step in enumerate(loop.steps):
        for emitting in step.planned.emitting:
            verified[emitting.row.request.request_id].append(index)
    gaps = {gap for steps in verified.values() for gap in np.diff(steps).tolist()}
    assert max(gaps) <= 2 * (k + 1)


def test_rows_that_draft_less_wait_for_the_others_but_not_for_ever():
    """More of them than there are verify rows: those that have waited longest go first."""
    k, batch = 4, 16
    requests = tuple(Arrival((number,), max_new=40, agreement=1.0) for number in range(batch))
    loop = Loop(Traffic(requests, k=k, max_batch=batch, prefill_rows=16, spare=2000))
    numbers = range(batch // 2)
    loop.scheduler._row_drafting = mock.Mock(
        drafts=lambda row: 0 if row.request.request_id in numbers else k
    )
    loop.run()
    gaps = {number: [] for number in range(batch)}
    for index, step in enumerate(loop.steps):
        for emitting in step.planned.emitting:
            gaps[emitting.row.request.request_id].append(index)
    gaps = {number: np.diff(steps[:10]) for number, steps in gaps.items()}
    assert max(gaps[number].max() for number in numbers) <= k + 1
    assert max(gaps[number].max() for number in range(batch // 2, batch)) <= 2 * (k + 1)
    assert_all_is_well_in_the_end(loop)


def test_the_first_in_line_is_not_overtaken_by_smaller_requests():
    small = Arrival((1,), max_new=4)
    large = Arrival(tuple(range(20)), max_new=30)
    loop = run(Traffic((small, small, large, small, small), spare=0, max_batch=16))
    assert loop.admitted == [0, 1, 2, 3, 4]
    assert_all_is_well_in_the_end(loop)


def test_equal_prompts_are_computed_once():
    """But for their last token, whose pass gives each request its own first logits."""
    prompt = tuple(range(19))
    loop = run(Traffic((Arrival(prompt),) * 4, max_batch=4, chunk=4, prefill_rows=4))
    assert _prompt_tokens(loop) == 18 + 4
    assert [script.request.stats.shared_tokens for script in loop.scripts] == [0, 18, 18, 18]
    assert_all_is_well_in_the_end(loop)


def test_a_prompt_stays_cached_while_an_equal_one_waits():
    prompt = tuple(range(13))
    loop = run(Traffic((Arrival(prompt),) * 3, max_batch=1))
    assert _prompt_tokens(loop) == 12 + 3


def test_prompts_that_begin_alike_are_not_shared():
    loop = run(Traffic((Arrival((1, 2, 3, 4)), Arrival((1, 2, 3, 5)), Arrival((1, 2, 3)))))
    assert _prompt_tokens(loop) == 4 + 4 + 3
    assert_all_is_well_in_the_end(loop)


@pytest.mark.parametrize("cancelled", range(6))
def test_another_request_starts_over_when_the_one_that_fills_their_prefix_is_cancelled(cancelled):
    prompt = tuple(range(13))
    first = Arrival(prompt, cancelled=cancelled)
    loop = run(Traffic((first, Arrival(prompt), Arrival(prompt)), prefill_rows=1))
    assert loop.tokens[1] == loop.scripts[1].output
    assert loop.tokens[2] == loop.scripts[2].output
    assert_all_is_well_in_the_end(loop)


def test_a_prefix_kept_for_a_later_request_makes_room_for_the_first_in_line():
    """Or nothing would ever run again: the prefix waits for its request, which waits in line."""
    shared = Arrival(tuple(range(20)), max_new=2)
    large = Arrival(tuple(range(20, 30)), max_new=40)
    loop = run(Traffic((shared, large, shared), max_batch=1, spare=0))
    assert_all_is_well_in_the_end(loop)


def test_a_page_table_too_long_for_one_step_is_sent_in_several():
    prompt = tuple(range(50))
    loop = run(Traffic((Arrival(prompt),) * 3, updates_per_chunk=1, chunk=3, prefill_rows=2))
    assert any(step.planned.bucket.chunks and not step.prompt_tokens for step in loop.steps)
    assert_all_is_well_in_the_end(loop)


def test_a_cancelled_row_is_not_in_the_next_step():
    loop = Loop(Traffic(_fixed(2, max_new=30, cancelled=5)))
    loop.run()
    assert len(loop.steps) == 5
    assert_all_is_well_in_the_end(loop)


def test_results_of_a_request_that_left_its_row_are_ignored():
    """The row may be another's by the time they are read."""
    loop = Loop(Traffic(_fixed(2, max_new=30), max_batch=1))
    first, second = (script.request for script in loop.scripts)
    loop.scheduler.add(first)
    planned = loop.scheduler.plan()
    loop.scheduler.remove(first)
    loop.scheduler.add(second)
    assert loop.scheduler.plan().admitted == [second]
    assert planned.emitting[0].row.request is first
    assert not loop.scheduler.read(planned.emitting[0], 1, True)
    assert requests(loop.scheduler) == [second]


def test_removing_an_unknown_request_changes_nothing():
    loop = Loop(Traffic(_fixed(2)))
    known, unknown = (script.request for script in loop.scripts)
    loop.scheduler.add(known)
    loop.scheduler.remove(unknown)
    assert requests(loop.scheduler) == [known]


def test_what_one_request_needs_of_a_step_stays_until_nothing_is_left():
    """Switching back and forth would compile many more steps."""
    loop = Loop(Traffic(_fixed(3, max_new=6), max_batch=4))
    plain, penalised, later = (script.request for script in loop.scripts)
    penalised.params = SamplingParams(presence_penalty=1.0)
    loop.scheduler.add(plain)
    assert not loop.scheduler.plan().bucket.penalties
    loop.scheduler.add(penalised)
    assert loop.scheduler.plan().bucket.penalties
    loop.scheduler.remove(penalised)
    assert loop.scheduler.plan().bucket.penalties
    loop.scheduler.remove(plain)
    loop.scheduler.add(later)
    assert not loop.scheduler.plan().bucket.penalties


# Rows that leave and come back.


@dataclasses.dataclass
class Watch:
    """Who was parked, dropped and brought back, in order: request, drafts it had, tokens."""

    parked: list[tuple[int, int | None, int]] = dataclasses.field(default_factory=list)
    dropped: list[tuple[int, int | None, int]] = dataclasses.field(default_factory=list)
    back: list[tuple[int, int | None, int]] = dataclasses.field(default_factory=list)


@pytest.fixture
def watch(monkeypatch) -> Watch:
    """Also checks, in every run of a test, whom the scheduler admits and where rows join."""
    seen, rows = Watch(), {}
    park, drop, admit = KvManager._park, KvManager._drop, KvManager.admit
    resume, join = Scheduler._resume, Scheduler._join

    def note(holding):
        row = rows[holding]
        drafted = None if row.phase is None else row.drafted
        return row.request.request_id, drafted, holding.length

    def watched_park(manager, holding):
        seen.parked.append(note(holding))
        park(manager, holding)

    def watched_drop(manager, holding):
        seen.dropped.append(note(holding))
        drop(manager, holding)

    def watched_admit(manager, *arguments):
        holding = admit(manager, *arguments)
        assert holding is None or not manager.parked, "parked rows go first"
        return holding

    def watched_resume(scheduler):
        rows.update({row.kv: row for row in scheduler._rows.values()})
        away = [row for row in scheduler._rows.values() if row.kv.parked]
        resume(scheduler)
        back = [row for row in away if not row.kv.parked]
        order = [number for number, *_ in seen.parked]
        back.sort(key=lambda row: -order[::-1].index(row.request.request_id))
        seen.back += [note(row.kv) for row in back]

    def watched_join(scheduler, first, later=0):
        phase = join(scheduler, first, later)
        if scheduler._phases == "balanced" and not later:
            others = [row for row in scheduler._rows.values() if not row.kv.parked]
            counts = Counter(row.phase for row in others)
            emptiest = min(counts[place] for place in range(first, scheduler._k + 1))
            assert first <= phase <= scheduler._k
            assert counts[phase] == emptiest
        return phase

    monkeypatch.setattr(KvManager, "_park", watched_park)
    monkeypatch.setattr(KvManager, "_drop", watched_drop)
    monkeypatch.setattr(KvManager, "admit", watched_admit)
    monkeypatch.setattr(Scheduler, "_resume", watched_resume)
    monkeypatch.setattr(Scheduler, "_join", watched_join)
    original = Scheduler.plan

    def plan(scheduler):
        rows.update({row.kv: row for row in scheduler._rows.values()})
        return original(scheduler)

    def admitting(scheduler, kept=Scheduler._admit):
        admitted = kept(scheduler)
        rows.update({row.kv: row for row in scheduler._rows.values()})
        return admitted

    monkeypatch.setattr(Scheduler, "plan", plan)
    monkeypatch.setattr(Scheduler, "_admit", admitting)
    return seen


def _crowd(**changes) -> Traffic:
    """Eight requests that run at once, in a pool for about three; each step's results are known."""
    settings = dict(k=4, max_batch=8, prefill_rows=8, spare=60, in_flight=0, watermarks=(0, 1))
    return Traffic(_fixed(8, max_new=40), **settings | changes)


@pytest.mark.parametrize("host_chunks", [1000, 3, 0])
def test_parked_rows_come_back_first_in_first_out(watch, host_chunks):
    assert_all_is_well_in_the_end(run(_crowd(host_chunks=host_chunks)))
    assert len(watch.parked) > 8
    assert [number for number, *_ in watch.back] == [number for number, *_ in watch.parked]
    assert bool(watch.dropped) == (host_chunks < 1000)


def test_a_row_comes_back_with_the_drafts_it_left_with_to_the_emptiest_phase_for_them(watch):
    """So steps stay even; the fixture checks the phase."""
    for spare in range(40, 80, 5):
        assert_all_is_well_in_the_end(run(_crowd(spare=spare)))
        assert watch.back == watch.parked
    assert {drafted for _, drafted, _ in watch.back} == {0, 1, 2, 3, 4}


def test_nobody_is_admitted_while_somebody_is_parked(watch):
    """The fixture checks it, whenever somebody is admitted."""
    late = tuple(Arrival((50 + n,), arrives=30 + n, max_new=5) for n in range(8))
    crowd = _crowd()
    loop = run(dataclasses.replace(crowd, arrivals=crowd.arrivals[:6] + late))
    assert_all_is_well_in_the_end(loop)
    assert len(watch.parked) > 4


@pytest.mark.parametrize("host_chunks", [1000, 0])
def test_the_first_in_line_runs_through_and_is_done_first(watch, host_chunks):
    loop = run(_crowd(host_chunks=host_chunks))
    assert 0 not in {number for number, *_ in watch.parked}
    assert_all_is_well_in_the_end(loop)


def test_what_is_dropped_is_computed_again_from_prompt_and_output(watch):
    requests = _fixed(2, max_new=30)
    loop = run(Traffic(requests, k=0, spare=5, host_chunks=0, watermarks=(0, 1), in_flight=0))
    assert_all_is_well_in_the_end(loop)
    ((number, _, length),) = watch.dropped
    assert number == 1
    assert length > 3
    assert _prompt_tokens(loop) == 3 + 3 + length


def test_what_leaves_for_host_memory_is_not_computed_again(watch):
    loop = run(_crowd())
    assert watch.parked
    assert _prompt_tokens(loop) == 8 * 3


def test_expected_lengths_let_more_requests_in(watch):
    """If they are right, nobody is parked; if they are too short, rows are, and all goes well."""
    running = {}
    for expected in (None, 10, 1):
        stops = _fixed(8, max_new=40, stop_after=10 if expected == 10 else 100, expected=expected)
        crowd = dataclasses.replace(_crowd(), arrivals=stops, policy="conservative", k=0)
        before = len(watch.parked)
        loop = run(crowd)
        assert_all_is_well_in_the_end(loop)
        running[expected] = max(step.verifies for step in loop.steps)
        assert (len(watch.parked) > before) == (expected == 1)
    assert running[None] < running[10]


# Phases for comparison.


@pytest.mark.parametrize("stagger", [0, 3])
def test_in_lockstep_all_rows_draft_or_all_verify(stagger):
    """Who starts to decode in the middle of a cycle makes the drafts that are left of it."""
    requests = tuple(Arrival((n,), max_new=40, arrives=n * stagger) for n in range(8))
    loop = run(Traffic(requests, max_batch=8, prefill_rows=8, spare=2000, phases="lockstep"))
    assert all(step.drafts == 0 or step.verifies == 0 for step in loop.steps)
    full = [step for step in loop.steps if step.drafts + step.verifies == 8]
    assert {step.verifies for step in full} == {0, 8}
    assert_all_is_well_in_the_end(loop)


def test_random_phases_cover_the_cycle_and_every_row_finds_a_place():
    k, batch = 4, 64
    requests = tuple(Arrival((n,), max_new=30, agreement=1.0) for n in range(batch))
    traffic = Traffic(
        requests, k=k, max_batch=batch, prefill_rows=batch, spare=9000, phases="random"
    )
    loop = run(traffic)
    assert_all_is_well_in_the_end(loop)
    verified = {number: [] for number in range(batch)}
    for index, step in enumerate(loop.steps):
        for emitting in step.planned.emitting:
            verified[emitting.row.request.request_id].append(index)
    first_cycles = Counter(steps[1] - steps[0] for steps in verified.values())
    assert first_cycles.keys() == set(range(1, k + 2))
    assert max(first_cycles.values()) > min(first_cycles.values()), "not evenly, as balanced ones"
    assert {gap for steps in verified.values() for gap in np.diff(steps[1:])} == {k + 1}


def test_priority_goes_before_earlier_arrivals_but_only_so_many():
    """A point is worth PRIORITY_TURNS arrivals: urgent requests cannot keep others waiting."""
    loop = Loop(Traffic(_fixed(5, max_new=3), max_batch=1))
    first, *others = (script.request for script in loop.scripts)
    urgent, usual, low, high = others
    urgent.params = SamplingParams(priority=1)
    low.params = SamplingParams(priority=-1)
    high.params = SamplingParams(priority=2)
    for request in (first, usual, low, urgent, high):
        loop.scheduler.add(request)
    turns = sorted((first, usual, low, urgent, high), key=lambda request: request.turn)
    assert turns == [high, urgent, first, usual, low]
    for _ in range(PRIORITY_TURNS):
        later = dataclasses.replace(usual, params=SamplingParams(priority=1))
        loop.scheduler.add(later)
    assert later.turn > usual.turn, "whoever came this much later has to wait"


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(-3, 3), min_size=1, max_size=60), st.sampled_from([1, 3]))
def test_whatever_the_priorities_nobody_starves(priorities, max_batch):
    """A request waits for those before it and for those that may overtake it, and no longer."""
    arrivals = _fixed(len(priorities), max_new=2)
    loop = Loop(Traffic(arrivals, max_batch=max_batch, k=1))
    for script, priority in zip(loop.scripts, priorities, strict=True):
        script.request.params = SamplingParams(priority=priority)
    loop.run()
    turns = {script.request.request_id: script.request.turn for script in loop.scripts}
    assert loop.admitted == sorted(turns, key=turns.get)
    assert len(set(turns.values())) == len(turns)
