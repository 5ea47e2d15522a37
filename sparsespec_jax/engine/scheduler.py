"""Which rows draft, verify and prefill in the next step.

The host never waits to learn what was accepted: a row's phase advances by the clock (k drafts, then
one verification), and its length is known as a range. Rows found finished late are inert.
"""

from __future__ import annotations

import dataclasses
from collections import deque

import numpy as np

from sparsespec_jax.engine.buckets import Buckets, Features
from sparsespec_jax.engine.plan import Bucket, Plan
from sparsespec_jax.engine.request import Request
from sparsespec_jax.kv.allocator import SlotAllocator
from sparsespec_jax.kv.prefix import Prefix, PrefixCache


@dataclasses.dataclass(eq=False)
class Row:
    """A request in the device batch.

    reserved: slots promised to it, those of its prefix not included.
    slots: the ones it has taken.
    announced: whether the device knows of the request.
    prefilled: prompt tokens whose KV is written or dispatched to be.
    mapped: positions whose page-table entries the device has.
    phase: 0..k-1 the draft it makes next, k it verifies; None while it prefills.
    first_phase: where in its cycle it started: a first cycle can be short.
    known_length: tokens, as far as results have been read.
    unread: tokens that dispatched steps may have added since.
    """

    index: int
    request: Request
    prefix: Prefix
    reserved: int
    slots: list[np.ndarray] = dataclasses.field(default_factory=list)
    announced: bool = False
    prefilled: int = 0
    mapped: int = 0
    phase: int | None = None
    first_phase: int = 0
    known_length: int = 0
    unread: int = 0

    @property
    def prompt_length(self) -> int:
        return len(self.request.prompt)

    @property
    def longest(self) -> int:
        """The most tokens the row can have, given the results not read yet."""
        return min(self.known_length + self.unread, self.request.max_length)


@dataclasses.dataclass(frozen=True)
class Emitting:
    """An entry of a step's result that belongs to somebody: row, and drafts it verified or None."""

    row: Row
    entry: int
    most_tokens: int
    n_drafts: int | None


@dataclasses.dataclass(frozen=True)
class PlannedStep:
    """A step to dispatch, and whom its result concerns.

    tokens: the step's tokens that are not padding.
    """

    bucket: Bucket
    packed: np.ndarray
    emitting: list[Emitting]
    admitted: list[Request]
    tokens: int


class Scheduler:
    """Waiting and running requests, their rows and slots; `plan` makes the next step of them."""

    def __init__(self, buckets: Buckets, allocator: SlotAllocator):
        self._buckets = buckets
        self._allocator = allocator
        self._prefixes = PrefixCache(allocator)
        self._k = buckets.k
        self._features = Features()
        self._waiting: deque[Request] = deque()
        self._rows: dict[int, Row] = {}
        self._free_rows = list(range(buckets.max_batch - 1, -1, -1))

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> int:
        return len(self._rows)

    def requests(self) -> list[Request]:
        return [*(row.request for row in self._rows.values()), *self._waiting]

    # Requests come and go.

    def add(self, request: Request) -> None:
        """Queue a request.

        What it needs of a step stays in all steps until nothing runs or waits: switching back and
        forth would compile many more of them.
        """
        if not (self._rows or self._waiting):
            self._features = Features()
        self._features = self._features.including(request.params)
        self._waiting.append(request)
        self._prefixes.enqueue(request.prefix_key)

    def remove(self, request: Request) -> None:
        """Forget a request, wherever it is. Steps already dispatched may still run its row."""
        for row in self._rows.values():
            if row.request is request:
                return self._retire(row)
        if request in self._waiting:
            self._waiting.remove(request)
            self._prefixes.dequeue(request.prefix_key)

    def read(self, emitting: Emitting, emitted: int, finished: bool) -> bool:
        """Take note of a result; False if the row has moved on to another request meanwhile."""
        row = emitting.row
        if self._rows.get(row.index) is not row:
            return False
        row.unread -= emitting.most_tokens
        row.known_length += emitted
        if finished:
            self._retire(row)
        return True

    def _retire(self, row: Row) -> None:
        del self._rows[row.index]
        self._free_rows.append(row.index)
        if row.slots:
            self._allocator.give_back(np.concatenate(row.slots))
        self._allocator.release(row.reserved)
        self._prefixes.release(row.prefix)

    def _admit(self) -> list[Request]:
        """First come, first served; a request reserves the most slots it may ever need."""
        admitted = []
        while self._waiting and self._free_rows:
            request = self._waiting[0]
            prompt_length = len(request.prompt)
            own = request.max_length + self._k - (prompt_length - 1)
            shared = self._prefixes.missing_slots(request.prefix_key, prompt_length)
            if not self._allocator.reserve(own + shared):
                # The first in line goes before prefixes kept for those behind it.
                self._prefixes.drop_idle(keep=request.prefix_key)
                if not self._allocator.reserve(own + shared):
                    break
            self._waiting.popleft()
            prefix = self._prefixes.acquire(request.prefix_key, prompt_length)
            self._prefixes.dequeue(request.prefix_key)
            index = self._free_rows.pop()
            self._rows[index] = Row(index, request, prefix, own, known_length=prompt_length)
            admitted.append(request)
        return admitted

    # One step.

    def plan(self) -> PlannedStep | None:
        """The next step, or None if there is nothing to do until a result is read."""
        admitted = self._admit()
        prefilling = [row for row in self._rows.values() if row.phase is None]
        drafting = [
            row for row in self._rows.values() if row.phase is not None and row.phase < self._k
        ]
        verifying = [row for row in self._rows.values() if row.phase == self._k]
        if not (prefilling or drafting or verifying):
            return None
        ends = [row.longest + self._k for row in drafting + verifying]
        ends += [row.prompt_length for row in prefilling]
        bucket = self._buckets.smallest(
            len(drafting), len(verifying), bool(prefilling), max(ends), self._features
        )
        # Who finds no place drafts or verifies a step later.
        drafting, verifying = drafting[: bucket.drafts], verifying[: bucket.verifies]
        layout = self._buckets.layout(bucket)
        packed, plan = layout.empty()
        updates = _Updates(plan, self._allocator)

        for row in drafting + verifying:
            updates.map(row, row.longest + self._k)
        emitting = self._plan_verifies(plan, bucket, verifying)
        self._plan_drafts(plan, drafting)
        emitting += self._plan_chunks(plan, bucket, prefilling, updates)
        tokens = len(drafting) + sum(e.most_tokens for e in emitting if e.n_drafts is not None)
        tokens += int(plan.chunks[:, 2].sum())
        return PlannedStep(bucket, packed, emitting, admitted, tokens)

    def _plan_drafts(self, plan: Plan, rows: list[Row]) -> None:
        for entry, row in enumerate(rows):
            plan.drafts[entry] = row.index, row.phase - row.first_phase
            row.phase += 1

    def _plan_verifies(self, plan: Plan, bucket: Bucket, rows: list[Row]) -> list[Emitting]:
        emitting = []
        for entry, row in enumerate(rows):
            n_drafts = self._k - row.first_phase
            plan.verifies[entry] = row.index, n_drafts
            emitting.append(Emitting(row, entry, n_drafts + 1, n_drafts))
            row.unread += n_drafts + 1
            row.phase = row.first_phase = 0
        return emitting

    def _plan_chunks(
        self, plan: Plan, bucket: Bucket, rows: list[Row], updates: _Updates
    ) -> list[Emitting]:
        """Prompt chunks, in order of admission, while there is room for them and their mapping.

        In this order, a row that shares a prefix comes after the one that fills it.
        """
        emitting, entry = [], 0
        first_result = bucket.verifies
        for row in rows:
            if entry == bucket.chunks:
                break
            if not row.announced:
                plan.admissions[entry] = self._admission(row)
                row.announced = True
                if row.prefix.ready:
                    row.prefilled = row.request.stats.shared_tokens = len(row.prefix)
            while entry < bucket.chunks and row.prefilled < row.prompt_length:
                end = min(row.prefilled + self._buckets.chunk, row.prompt_length)
                if not updates.map(row, end):
                    return emitting
                final = end == row.prompt_length
                plan.chunks[entry] = row.index, row.prefilled, end - row.prefilled, final
                row.prefilled = end
                if final:
                    emitting.append(Emitting(row, first_result + entry, 1, None))
                    self._start_decoding(row)
                entry += 1
        return emitting

    def _admission(self, row: Row) -> np.ndarray:
        head = [row.index, row.prompt_length, row.request.max_length]
        return np.concatenate([head, row.request.sampling])

    def _start_decoding(self, row: Row) -> None:
        """Join the emptiest phase, so that every step has about as many tokens as the others."""
        row.prefix.ready = True
        row.unread += 1
        phases = [other.phase for other in self._rows.values() if other.phase is not None]
        counts = np.bincount(phases, minlength=self._k + 1)
        row.phase = row.first_phase = int(counts.argmin())


class _Updates:
    """Fills the page-table section of a plan."""

    def __init__(self, plan: Plan, allocator: SlotAllocator):
        self._entries = plan.updates
        self._allocator = allocator
        self._used = 0

    def map(self, row: Row, end: int) -> bool:
        """Map the row's positions up to `end`, or as many as fit; True if all of them are."""
        count = min(end - row.mapped, len(self._entries) - self._used)
        if count > 0:
            span = slice(self._used, self._used + count)
            positions = np.arange(row.mapped, row.mapped + count)
            self._entries[span, 0] = row.index
            self._entries[span, 1] = positions
            self._entries[span, 2] = self._slots(row, positions)
            self._entries[span, 3] = self._known_tokens(row, positions)
            self._used += count
            row.mapped += count
        return row.mapped >= end

    def _slots(self, row: Row, positions: np.ndarray) -> np.ndarray:
        """The prefix's slots for what it covers, then fresh ones."""
        shared = row.prefix.slots[positions[0] : positions[-1] + 1]
        fresh = self._allocator.take(len(positions) - len(shared))
        row.slots.append(fresh)
        return np.concatenate([shared, fresh])

    @staticmethod
    def _known_tokens(row: Row, positions: np.ndarray) -> np.ndarray:
        tokens = np.full(len(positions), -1, np.int32)
        prompt = row.request.prompt[positions[0] : positions[-1] + 1]
        tokens[: len(prompt)] = prompt
        return tokens
