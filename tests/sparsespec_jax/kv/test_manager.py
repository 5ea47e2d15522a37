"""The KV manager on its own: who runs, who is parked, and where everybody's KV is meanwhile."""

from __future__ import annotations

import dataclasses
from collections import deque
from unittest import mock

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sparsespec_jax.kv import manager as manager_module
from sparsespec_jax.kv.manager import Holding, KvManager
from sparsespec_jax.kv.prefix import PrefixCache
from sparsespec_jax.kv.space import KvSpace, Map, Restore
from tests.sparsespec_jax.kv.simulated_pool import SimulatedPool

ROWS, WIDTH = 6, 64
PROMPT_LENGTHS = (1, 2, 5, 9, 14)
MOST_NEW = 14
PREFILL = 4  # positions of a row's prompt that a step computes


@dataclasses.dataclass(eq=False)
class Client:
    """A request: its prompt's number, how long it may get, and what it holds once it is admitted.

    emitted: tokens, of which the manager knows those of steps that are read.
    """

    number: int
    prompt: int
    max_new: int
    told: int | None  # output tokens that admission is told to expect
    holding: Holding | None = None
    starts: bool = True  # its first tokens are to be computed, as far as they are not shared

    @property
    def prompt_length(self) -> int:
        return PROMPT_LENGTHS[self.prompt]

    @property
    def max_length(self) -> int:
        return self.prompt_length + self.max_new

    @property
    def key(self) -> bytes:
        return PrefixCache.key(np.full(self.prompt_length, self.prompt))

    def names(self, start: int, end: int) -> list[int]:
        """Of the tokens at these positions: those of the prefix are everybody's with the prompt."""
        shared = self.prompt_length - 1
        own = 1000 * (self.number + 1 + len(PROMPT_LENGTHS))
        return [
            1000 * self.prompt + position if position < shared else own + position
            for position in range(start, end)
        ]


class Engine:
    """What scheduler and executor do with a manager: steps whose results are read one step late."""

    def __init__(self, spare=0, policy="aggressive", k=2, chunk=4, host=100, chunks_per_step=2):
        self.k, self.policy, self.host_chunks = k, policy, host
        self.capacity = max(PROMPT_LENGTHS) + MOST_NEW + k + spare
        self.space = KvSpace(self.capacity + 1, chunk, host)
        self.kv = KvManager(self.space, policy, k, chunks_per_step)
        self.pool = SimulatedPool(self.capacity + 1, ROWS, WIDTH)
        self.numbers = 0
        self.wrong_lengths = False
        self.waiting: deque[Client] = deque()
        self.rows: dict[int, Client] = {}
        self.parked: deque[Client] = deque()
        self.in_flight: deque[list[tuple[Client, int]]] = deque()
        self.admitted: list[int] = []
        self.prefixes = set()

    # Requests come and go.

    def submit(self, prompt: int, max_new: int = MOST_NEW, told: int | None = None) -> Client:
        client = Client(self.numbers, prompt, max_new, told)
        self.numbers += 1
        self.wrong_lengths |= told is not None and told < max_new
        self.waiting.append(client)
        self.kv.enqueue(client.key)
        return client

    def cancel(self, client: Client) -> None:
        if client in self.waiting:
            self.waiting.remove(client)
            self.kv.dequeue(client.key)
        else:
            self._leave(client)

    def _leave(self, client: Client) -> None:
        del self.rows[client.holding.row]
        if client in self.parked:
            self.parked.remove(client)
        self.kv.release(client.holding)

    @property
    def running(self) -> list[Client]:
        clients = [client for client in self.rows.values() if not client.holding.parked]
        return sorted(clients, key=lambda client: client.holding.order)

    # Steps.

    def step(self, patience=lambda: True) -> bool:
        """Whether a step was dispatched. `patience`: whether a row of it has a turn."""
        self._resume()
        self._admit()
        before = self.running
        self.kv.make_room(self._growth)
        self._note_parked(before)
        dispatched = self._dispatch(patience)
        if len(self.in_flight) > (1 if dispatched else 0):
            self.read()
        return dispatched

    def _resume(self) -> None:
        back = [self.rows[holding.row] for holding in self.kv.resume()]
        assert back == [self.parked.popleft() for _ in back], "first parked, first back"
        for client in back:
            client.starts |= not client.holding.mapped

    def _admit(self) -> None:
        while self.waiting and len(self.rows) < ROWS:
            client = self.waiting[0]
            row = next(row for row in range(ROWS) if row not in self.rows)
            most = client.prompt_length + (client.told or client.max_new) + self.k
            client.holding = self.kv.admit(
                row, client.number, client.key, client.prompt_length, most
            )
            assert client.holding is None or not self.parked, "parked rows go first"
            if client.holding is None:
                break
            self.waiting.popleft()
            self.rows[row] = client
            self.admitted.append(client.number)
            self.prefixes.add(client.holding.prefix)

    def _growth(self, holdings) -> int:
        """A prefix has its slots already."""
        ends = [self._end(self.rows[holding.row]) for holding in holdings]
        pairs = zip(ends, holdings, strict=True)
        return sum(max(0, end - max(h.mapped, h.own.first)) for end, h in pairs)

    def _end(self, client: Client) -> int:
        """Positions that the row wants mapped for its next step."""
        holding = client.holding
        if client.starts:
            shared = len(holding.prefix) if holding.prefix.ready else 0
            return min(holding.target, (holding.mapped or shared) + PREFILL)
        return min(holding.length + holding.unread, client.max_length) + self.k

    def _note_parked(self, before: list[Client]) -> None:
        parked = [client for client in before if client.holding.parked]
        assert before[: len(before) - len(parked)] == self.running, "the youngest are parked"
        assert not before or not before[0].holding.parked, "never the oldest"
        self.parked += reversed(parked)

    def _dispatch(self, patience) -> bool:
        """Rows map what they need, the moves are carried out, then the rows write their KV."""
        entries, results = [], []
        for client in self.running:
            if not patience():
                continue
            holding = client.holding
            start, end = holding.mapped, self._end(client)
            [slots] = self.kv.take([(holding, max(0, end - start))])
            assert holding.mapped == start + len(slots)
            shared = len(holding.prefix) if holding.prefix.ready else 0
            entries.append((client, start, slots, shared))
            if holding.mapped < end:
                assert self.space.free == 0, "it stalls only for want of slots"
            elif not client.starts:
                results.append((client, self.k + 1))
            elif end == holding.target:
                client.starts, holding.prefix.ready = False, True
                results.append((client, 1))
        self.carry_out()
        for client, start, slots, shared in entries:
            row, end = client.holding.row, start + len(slots)
            self.pool.table[row, start:end] = slots
            there = max(0, shared - start)
            self.pool.write(slots[there:], client.names(start + there, end))
        for client, most in results:
            client.holding.unread += most
        if results:
            self.in_flight.append(results)
        return bool(results) or any(len(entry[2]) for entry in entries)

    def carry_out(self) -> None:
        self.pool.move(self.kv.take_moves())

    def read(self, accepted=lambda most: 1) -> None:
        for client, most in self.in_flight.popleft():
            holding = client.holding
            if self.rows.get(holding.row) is not client:
                continue
            assert not holding.lost, "what is not read yet must not be dropped"
            holding.unread -= most
            holding.length = min(holding.length + accepted(most), client.max_length)
            if holding.length == client.max_length:
                self._leave(client)

    def finish(self) -> None:
        """Until nothing is left; everything ends."""
        for _ in range(100 + 40 * self.numbers):
            if not (self.waiting or self.rows or self.in_flight):
                break
            reads = bool(self.in_flight)
            assert self.step() or reads, "nothing runs, and nothing ever will"
            self.check()
        assert not self.waiting
        assert not self.rows
        self.carry_out()
        assert (self.space.free, self.space.away) == (self.capacity, 0)
        assert not self.pool.host
        assert self.kv.parked == 0

    # What must hold at any time.

    def check(self) -> None:
        self.carry_out()
        self._check_places()
        self._check_counts()
        for client in self.running:
            self._check_running(client)

    def _segments(self):
        own = [client.holding.own for client in self.rows.values()]
        self.prefixes = {p for p in self.prefixes | self._shares() if len(p.segment)}
        return own + [prefix.segment for prefix in self.prefixes]

    def _shares(self):
        holdings = [client.holding for client in self.rows.values()]
        return {holding.prefix for holding in holdings if not holding.lost}

    def _check_places(self) -> None:
        """No slot and no chunk is lost, or anybody's but one's."""
        segments = self._segments()
        slots = [slot for segment in segments for slot in segment.slots.tolist()]
        assert len(set(slots)) == len(slots) == self.capacity - self.space.free
        chunks = [number for segment in segments for number, _ in segment.chunks]
        assert sorted(chunks) == sorted(self.pool.host)
        assert len(chunks) <= self.host_chunks
        assert self.space.away == sum(segment.away for segment in segments)

    def _check_counts(self) -> None:
        holdings = [client.holding for client in self.rows.values()]
        for prefix in self.prefixes:
            users = [h for h in holdings if h.prefix is prefix and not h.lost]
            assert prefix.users == len(users)
            assert prefix.running == sum(not holding.parked for holding in users)
        assert self.kv.parked == len(self.parked)
        assert all(client.holding.parked for client in self.parked)
        assert sum(holding.parked for holding in holdings) == len(self.parked)
        assert all(holding.parked and not holding.unread for holding in holdings if holding.lost)
        assert self.kv.parked == 0 or self.policy != "conservative" or self.wrong_lengths
        assert self.admitted == sorted(self.admitted)

    def _check_running(self, client: Client) -> None:
        """All that it has is on the device, and its page table says where."""
        holding = client.holding
        assert not holding.own.chunks
        assert not holding.prefix.segment.chunks
        slots = np.concatenate([holding.prefix.segment.slots, holding.own.slots])
        table = self.pool.table[holding.row, : holding.mapped]
        assert table.tolist() == slots[: holding.mapped].tolist()
        assert self.pool.names[table].tolist() == client.names(0, holding.mapped)


class Traffic(RuleBasedStateMachine):
    """Requests arrive, run, and are cancelled in whatever state they are in."""

    @initialize(
        spare=st.sampled_from([0, 10, 40, 150]),
        policy=st.sampled_from(["aggressive", "aggressive", "conservative", "recompute"]),
        k=st.sampled_from([0, 2, 4]),
        chunk=st.sampled_from([1, 4, 16]),
        host=st.sampled_from([0, 3, 10, 1000]),
        chunks_per_step=st.sampled_from([1, 4]),
        watermarks=st.sampled_from([(0, 1), (0, 1), (0, 0), (8, 32)]),
    )
    def start(self, watermarks, **settings):
        names = dict(zip(("LOW_WATERMARK", "HIGH_WATERMARK"), watermarks, strict=True))
        self.patch = mock.patch.multiple(manager_module, **names)
        self.patch.start()
        if settings["policy"] == "recompute":
            settings["host"] = 0
        self.engine = Engine(**settings)

    @rule(
        prompt=st.sampled_from(range(len(PROMPT_LENGTHS))),
        max_new=st.integers(1, MOST_NEW),
        told=st.none() | st.integers(1, MOST_NEW),
        copies=st.sampled_from([1, 1, 3]),
    )
    def requests_arrive(self, prompt, max_new, told, copies):
        for _ in range(copies):
            self.engine.submit(prompt, max_new, told)

    @precondition(lambda self: self.engine.waiting)
    @rule(data=st.data())
    def a_waiting_request_is_cancelled(self, data):
        self.engine.cancel(data.draw(st.sampled_from(self.engine.waiting)))

    @precondition(lambda self: self.engine.running)
    @rule(data=st.data())
    def a_running_request_is_cancelled(self, data):
        self.engine.cancel(data.draw(st.sampled_from(self.engine.running)))

    @precondition(lambda self: self.engine.parked)
    @rule(data=st.data())
    def a_parked_request_is_cancelled(self, data):
        """Its KV on the device, in host memory, half here and half there, or dropped."""
        self.engine.cancel(data.draw(st.sampled_from(self.engine.parked)))

    @rule(steps=st.integers(1, 8))
    def everybody_steps(self, steps):
        for _ in range(steps):
            self.engine.step()
            self.engine.check()

    @rule(data=st.data())
    def some_step(self, data):
        """As rows do that wait for the verifications of others."""
        self.engine.step(lambda: data.draw(st.booleans()))

    @precondition(lambda self: self.engine.in_flight)
    @rule(data=st.data())
    def a_result_is_read(self, data):
        self.engine.read(lambda most: data.draw(st.integers(1, most)))

    @invariant()
    def all_is_well(self):
        if hasattr(self, "engine"):
            self.engine.check()

    def teardown(self):
        if hasattr(self, "engine"):
            try:
                self.engine.finish()
            finally:
                self.patch.stop()


TestTraffic = Traffic.TestCase
TestTraffic.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


@pytest.fixture
def watermarks(monkeypatch):
    """Rows that come and go as often as they can; a test may set others."""

    def to(low: int, high: int) -> None:
        monkeypatch.setattr(manager_module, "LOW_WATERMARK", low)
        monkeypatch.setattr(manager_module, "HIGH_WATERMARK", high)

    to(0, 1)
    return to


def until(engine: Engine, condition) -> None:
    for _ in range(100):
        if condition():
            return
        engine.step()
        engine.check()
    raise AssertionError("it never comes to this")


def test_the_youngest_are_parked_and_the_first_parked_come_back_first(watermarks):
    engine = Engine(spare=5, k=0)
    first, second, third = (engine.submit(prompt) for prompt in (2, 3, 2))
    until(engine, lambda: len(engine.parked) == 2)
    assert list(engine.parked) == [third, second]
    assert engine.running == [first]
    engine.cancel(first)
    engine.step()
    assert third in engine.running
    engine.finish()


def test_a_parked_row_comes_back_at_once_where_the_slots_are_a_prefix_that_requests_wait_for(
    watermarks,
):
    """The prefix is idle only when the last row that has it makes room."""
    watermarks(0, 0)
    engine = Engine(spare=0, k=0, chunk=1, host=0, chunks_per_step=1)
    for prompt, max_new, copies in ((2, 13, 3), (0, 7, 1), (4, 8, 3), (2, 1, 1)):
        for _ in range(copies):
            engine.submit(prompt, max_new)
    engine.finish()


def test_nobody_is_admitted_while_somebody_is_parked(watermarks):
    engine = Engine(spare=0, k=0)
    engine.submit(2)
    engine.submit(3)
    until(engine, lambda: engine.parked)
    late = engine.submit(0, max_new=1)
    while engine.parked:
        engine.step()
        assert late.holding is None or not engine.parked
    engine.finish()


def test_as_much_leaves_as_is_needed_and_the_last_parked_leaves_first(watermarks):
    engine = Engine(spare=60, k=0, chunk=4)
    first, second, third = (engine.submit(prompt) for prompt in (2, 3, 2))
    until(engine, lambda: third.holding and third.holding.length > third.prompt_length + 4)
    own = len(third.holding.own)
    engine.kv.make_room(lambda running: engine.space.free + 1)
    assert third.holding.parked
    assert not second.holding.parked
    assert engine.space.away == third.holding.own.away == 4
    engine.kv.make_room(lambda running: engine.space.free + own)
    assert second.holding.parked
    assert not first.holding.parked
    assert third.holding.own.away == 4
    assert own <= second.holding.own.away + second.holding.prefix.segment.away < own + 4
    engine.parked += [third, second]
    engine.finish()


def test_what_steps_in_flight_may_have_added_to_is_not_dropped(watermarks):
    engine = Engine(spare=0, k=0, host=0)
    first, second = engine.submit(2), engine.submit(3)
    until(engine, lambda: second.holding and second.holding.unread)
    engine.kv.make_room(lambda running: engine.capacity)
    engine.parked.append(second)
    assert second.holding.parked
    assert not second.holding.lost
    while engine.in_flight:
        engine.read()
    engine.kv.make_room(lambda running: engine.capacity)
    assert second.holding.lost
    assert second.holding.own.slots.size == 0
    assert (second.holding.mapped, second.holding.target) == (0, second.holding.length)
    assert not first.holding.parked
    engine.finish()
    assert engine.kv.stats.dropped > 0
    assert engine.kv.stats.evicted == 0


def test_while_others_run_a_row_comes_back_chunk_by_chunk(watermarks):
    engine = Engine(spare=60, k=0, chunk=1, chunks_per_step=3)
    engine.submit(1)
    second = engine.submit(4)
    until(engine, lambda: second.holding and second.holding.length > second.prompt_length + 3)
    engine.kv.make_room(lambda running: engine.space.capacity - 3)
    engine.parked.append(second)
    away = second.holding.own.away + second.holding.prefix.segment.away
    assert away > 6
    engine.carry_out()
    steps = 0
    while second.holding.parked:
        restored = engine.kv.stats.restored
        engine.step()
        engine.check()
        steps += 1
        assert engine.kv.stats.restored - restored <= 3
    assert steps == -(-away // 3)
    engine.finish()


def test_if_nobody_runs_the_first_parked_comes_back_at_once(watermarks):
    engine = Engine(spare=0, k=0, chunk=1, chunks_per_step=1)
    first, second = engine.submit(2), engine.submit(4)
    until(engine, lambda: second.holding and second.holding.parked and second.holding.own.away > 2)
    engine.cancel(first)
    engine.step()
    assert not second.holding.parked
    engine.finish()


def test_what_the_first_parked_shares_with_others_stays_while_they_make_room_for_it(watermarks):
    engine = Engine(spare=10, k=0, chunk=4)
    first, second, third = engine.submit(0), engine.submit(4), engine.submit(4)
    until(engine, lambda: first.holding and third.holding and third.holding.length >= 15)
    engine.kv.make_room(lambda running: engine.space.free + (4 if len(running) > 1 else 1))
    engine.parked += [third, second]
    shared = third.holding.prefix.segment
    engine.cancel(first)
    watermarks(0, 32)
    version = third.holding.prefix.version
    engine.step()
    assert not third.holding.parked
    assert third.holding.prefix.version == version
    assert second.holding.own.away > 0
    assert len(shared.slots) == 13
    engine.finish()


def test_a_row_maps_its_prefix_again_once_that_has_been_away(watermarks):
    engine = Engine(spare=0, k=0, chunk=4)
    first, _, third = engine.submit(3), engine.submit(4), engine.submit(4)
    until(engine, lambda: third.holding and third.holding.prefix.segment.away)
    engine.cancel(first)
    engine.kv.take_moves()  # were carried out by `until`
    assert engine.kv.resume()[0] is third.holding
    moves = engine.kv.take_moves()
    assert [type(move) for move in moves].index(Restore) < [type(m) for m in moves].index(Map)
    engine.pool.move(moves)
    engine.parked = deque(client for client in engine.parked if client.holding.parked)
    engine.check()
    engine.finish()


def test_expected_lengths_let_more_in_and_may_be_wrong(watermarks):
    """Then rows are parked as by any other policy."""
    running = {}
    for told in (None, 1):
        engine = Engine(spare=0, policy="conservative", k=0)
        for _ in range(4):
            engine.submit(1, told=told)
        engine.step()
        running[told] = len(engine.running)
        engine.finish()
        assert (engine.kv.stats.parked > 0) == (told is not None)
    assert running[None] < running[1] == 4


def test_who_grows_beyond_the_expected_length_counts_with_what_it_has(watermarks):
    """Or slots would be asked that are not there."""
    engine = Engine(spare=0, policy="conservative", k=0)
    first, second = engine.submit(0, told=1), engine.submit(0, told=1)
    engine.step()
    until(engine, lambda: first.holding.mapped == second.holding.mapped == 11)
    large = engine.submit(4, max_new=1)
    engine.step()
    assert large.holding is None
    engine.finish()


@pytest.mark.parametrize("policy", ["aggressive", "conservative"])
def test_a_prefix_left_half_in_host_memory_comes_back_for_who_waits_for_it(policy, watermarks):
    """Though the pool has no room for it twice."""
    engine = Engine(spare=0, policy=policy, k=0)
    first, second = engine.submit(3, told=1), engine.submit(4, told=1)
    until(engine, lambda: second.holding and second.holding.prefix.segment.away)
    prefix = second.holding.prefix
    third = engine.submit(4)
    engine.cancel(first)
    engine.cancel(second)
    engine.check()
    assert prefix.segment.away
    engine.step()
    assert third.holding.prefix is prefix
    assert prefix.segment.away == 0
    engine.finish()


def test_by_policy_nothing_goes_to_host_memory(watermarks):
    engine = Engine(spare=0, policy="recompute", host=0)
    for prompt in (2, 3, 2, 4):
        engine.submit(prompt)
    engine.finish()
    assert engine.kv.stats.dropped > 0
    assert engine.kv.stats.evicted == engine.kv.stats.restored == 0


def test_rows_stop_being_parked_well_before_they_come_back(watermarks):
    """Or they would come and go: what is between the watermarks is left alone."""
    parked = {}
    for marks in ((0, 1), (2, 6)):
        watermarks(*marks)
        engine = Engine(spare=20, k=0)
        for prompt in (2, 3, 2, 3, 1):
            engine.submit(prompt)
        engine.finish()
        parked[marks] = engine.kv.stats.parked
    assert parked[2, 6] <= parked[0, 1]
