"""A numpy model of the engine's step, which checks every read and write that a plan asks for.

It computes no attention. The KV of a position is what it was computed from: a hash of the tokens up
to there, and whether by full attention. So a slot that was never written, was written by another
request or holds a rejected draft is found when it is read.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from sparsespec_jax.engine.buckets import Buckets
from sparsespec_jax.engine.plan import Bucket, Plan
from sparsespec_jax.engine.planned import PlannedStep
from sparsespec_jax.engine.request import Request
from sparsespec_jax.kv.allocator import TRASH_SLOT
from sparsespec_jax.kv.space import Evict, Forget, Map, Move, Restore

VOCAB = 97
NOBODY = -1


@dataclasses.dataclass(frozen=True)
class Script:
    """What the model says to a request: its tokens, where it stops, and how often drafts agree."""

    request: Request
    stop_at: int
    agreement: float

    def token(self, position: int) -> int:
        return (self.request.request_id * 31 + position * 17 + 5) % VOCAB

    @property
    def output(self) -> list[int]:
        end = min(self.stop_at + 1, self.request.max_length)
        return [self.token(position) for position in range(len(self.request.prompt), end)]


@dataclasses.dataclass(frozen=True)
class Query:
    """A token that a step feeds; `exact` if it attends to everything."""

    row: int
    position: int
    exact: bool


@dataclasses.dataclass(frozen=True)
class SimulatedResult:
    """Per entry of the step's result."""

    emitted: np.ndarray
    finished: np.ndarray
    tokens: list[list[int]]


class SimulatedDevice:
    """The device state of `buckets.max_batch` rows over a pool of `slots`."""

    def __init__(self, buckets: Buckets, slots: int, *, seed: int = 0):
        rows = buckets.max_batch + 1
        self.buckets = buckets
        self.trash = buckets.max_batch
        self.tokens = np.zeros((rows, buckets.width), np.int64)
        self.page_table = np.full((rows, buckets.width), TRASH_SLOT)
        self.mapped_for = np.full((rows, buckets.width), NOBODY)
        self.length = np.ones(rows, np.int64)
        self.max_length = np.ones(rows, np.int64)
        self.done = np.ones(rows, bool)
        self.drafted = np.zeros(rows, np.int64)
        self.scored = np.zeros(rows, bool)
        self.sparsity = np.zeros(rows, np.int64)  # of what each row's drafts attend to
        self.reported: dict[int, list[int]] = {}  # by rows that wait to hear what they emitted
        self.occupant: list[Script | None] = [None] * rows
        self.history = np.zeros(slots, np.uint64)  # of the KV in each slot
        self.exact = np.zeros(slots, bool)
        self.host: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self._powers = np.cumprod(np.full(buckets.width, 0x9E3779B97F4A7C15, np.uint64))
        self._random = np.random.default_rng(seed)
        self._scripts: dict[bytes, Script] = {}

    def expect(self, script: Script) -> None:
        """Know the request when it is admitted, by its packed sampling parameters."""
        self._scripts[script.request.sampling.tobytes()] = script

    def run(self, step: PlannedStep) -> SimulatedResult:
        self.k = self.buckets.queries_of(step.bucket) - 1
        layout = self.buckets.layout(step.bucket)
        assert step.packed.shape == (layout.size,)
        plan = layout.unpack(step.packed)
        for move in step.moves:
            self._move(move)
        self._admit(plan)
        self._commit(plan)
        self._update_page_table(plan)
        drafts, verifies, chunks = self._live(plan)
        queries = self._queries(drafts, verifies, chunks)
        assert len(queries) == step.tokens
        self._write(queries, step.bucket)
        for query in queries:
            self._read(query)
        self._draft(drafts)
        for emitting in step.emitting:
            assert not emitting.n_drafts or emitting.sparsity == self.sparsity[emitting.row.index]
        return self._emit(step.bucket, plan.sparsity.item(), verifies, chunks)

    def _move(self, move: Move) -> None:
        """What has left its slots is not to be found there any more."""
        match move:
            case Evict(slots, chunk):
                assert len(slots) > 0
                assert slots.all()
                assert chunk not in self.host
                self.host[chunk] = self.history[slots], self.exact[slots]
                self.history[slots] = 0
            case Restore(chunk, slots):
                self.history[slots], self.exact[slots] = self.host.pop(chunk)
            case Map(row, position, slots):
                assert len(slots) > 0
                assert slots.all()
                span = slice(position, position + len(slots))
                request_id = self.occupant[row].request.request_id
                assert (self.mapped_for[row, span] == request_id).all()
                self.page_table[row, span] = slots
            case Forget(chunk):
                del self.host[chunk]

    def _admit(self, plan: Plan) -> None:
        for words in plan.admissions:
            row = words[0]
            if row == self.trash:
                continue
            script = self._scripts[words[3:].tobytes()]
            assert words[1] == len(script.request.prompt)
            self.occupant[row] = script
            self.length[row], self.max_length[row] = words[1:3]
            self.done[row] = False
            self.drafted[row] = 0
            self.reported.pop(row, None)

    def _commit(self, plan: Plan) -> None:
        for row, count, last_token in plan.commits:
            if row == self.trash:
                continue
            new, length = self.reported.pop(row), self.length[row]
            assert (count, last_token) == (len(new), new[-1])
            self.tokens[row, length : length + count] = new
            self.length[row] += count

    def _update_page_table(self, plan: Plan) -> None:
        seen = set()
        for row, position, slot, token in plan.updates:
            if row == self.trash:
                assert (position, slot, token) == (0, TRASH_SLOT, -1)
                continue
            assert (row, position) not in seen
            assert 0 < slot < len(self.history)
            seen.add((row, position))
            script = self.occupant[row]
            self.page_table[row, position] = slot
            self.mapped_for[row, position] = script.request.request_id
            prompt = script.request.prompt
            assert token == (prompt[position] if position < len(prompt) else -1)
            if token >= 0:
                self.tokens[row, position] = token

    def _live(self, plan: Plan) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The entries that are not padding; a row is in one of the sections, and once."""
        drafts, verifies, chunks = (
            section[section[:, 0] != self.trash]
            for section in (plan.drafts, plan.verifies, plan.chunks)
        )
        once = [*drafts[:, 0], *verifies[:, 0], *np.unique(chunks[:, 0])]
        assert len(set(once)) == len(once)
        assert self.reported.keys().isdisjoint(once)
        return drafts, verifies, chunks

    def _queries(self, drafts, verifies, chunks) -> list[Query]:
        queries = []
        for row, index in drafts:
            assert index == self.drafted[row] < self.buckets.k
            assert self.scored[row], "what drafts attend to is chosen by the verification before"
            queries.append(Query(row, self.length[row] - 1 + index, exact=False))
        for row, n_drafts in verifies:
            assert n_drafts == self.drafted[row] <= self.k
            first = self.length[row] - 1
            queries += [Query(row, first + i, exact=True) for i in range(n_drafts + 1)]
        for row, start, count, final in chunks:
            assert 0 < count <= self.buckets.chunk
            assert final == (start + count == self.length[row])
            queries += [Query(row, start + i, exact=True) for i in range(count)]
        return queries

    def _write(self, queries: list[Query], bucket: Bucket) -> None:
        written = set()
        for query in queries:
            assert query.position < bucket.context
            slot = self._slots(query.row, query.position)[-1]
            assert slot not in written
            written.add(slot)
            self.history[slot] = self._histories(query.row, query.position)[-1]
            self.exact[slot] = query.exact

    def _read(self, query: Query) -> None:
        """Every position up to the query's own, as a draft may have selected any of them."""
        slots = self._slots(query.row, query.position)
        expected = self._histories(query.row, query.position)
        np.testing.assert_array_equal(self.history[slots], expected)
        final = query.position + 1 if query.exact else self.length[query.row] - 1
        assert self.exact[slots[:final]].all()

    def _slots(self, row: int, position: int) -> np.ndarray:
        request_id = self.occupant[row].request.request_id
        assert (self.mapped_for[row, : position + 1] == request_id).all()
        return self.page_table[row, : position + 1]

    def _histories(self, row: int, position: int) -> np.ndarray:
        tokens = self.tokens[row, : position + 1].astype(np.uint64) + np.uint64(1)
        return np.cumsum(tokens * self._powers[: position + 1])

    def _draft(self, drafts: np.ndarray) -> None:
        for row, index in drafts:
            script, position = self.occupant[row], self.length[row] + index
            agrees = self._random.random() < script.agreement
            self.tokens[row, position] = (script.token(position) + (not agrees)) % VOCAB
            self.drafted[row] += 1

    def _emit(self, bucket: Bucket, sparsity: int, verifies, chunks) -> SimulatedResult:
        tokens = [[] for _ in range(bucket.verifies + bucket.chunks)]
        finished = np.zeros(len(tokens), bool)
        for entry, (row, n_drafts) in enumerate(verifies):
            accepted = 0
            while accepted < n_drafts and self._is_right(row, self.length[row] + accepted):
                accepted += 1
            tokens[entry], finished[entry] = self._extend(row, accepted + 1)
            self._select(row, sparsity)
        for entry, (row, _, _, final) in enumerate(chunks, start=bucket.verifies):
            if final:
                tokens[entry], finished[entry] = self._extend(row, 1)
                self._select(row, sparsity)
        return SimulatedResult(np.array([len(new) for new in tokens], int), finished, tokens)

    def _select(self, row: int, sparsity: int) -> None:
        self.drafted[row], self.scored[row], self.sparsity[row] = 0, self.k > 0, sparsity

    def _is_right(self, row: int, position: int) -> bool:
        return self.tokens[row, position] == self.occupant[row].token(position)

    def _extend(self, row: int, count: int) -> tuple[list[int], bool]:
        if self.done[row]:
            return [], False
        script, length = self.occupant[row], self.length[row]
        end = min(length + count, self.max_length[row], script.stop_at + 1)
        new = [script.token(position) for position in range(length, end)]
        ends = end in (self.max_length[row], script.stop_at + 1)
        if self.buckets.delayed:
            self.reported[row] = new
            return new, ends
        self.tokens[row, length:end] = new
        self.length[row] = end
        self.done[row] = ends
        return new, self.done[row]
