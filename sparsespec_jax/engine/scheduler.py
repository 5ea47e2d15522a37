"""Which rows draft, verify and prefill in the next step.

The host never waits to learn what was accepted: a row's phase advances by the clock (k drafts, then
one verification), and its length is known as a range. Rows found finished late are inert.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence

import numpy as np

from sparsespec_jax.config import Phases
from sparsespec_jax.engine.adaptive import Choice
from sparsespec_jax.engine.buckets import Buckets, Features
from sparsespec_jax.engine.plan import Bucket, Plan
from sparsespec_jax.engine.planned import Emitting, PlannedStep
from sparsespec_jax.engine.request import Request
from sparsespec_jax.engine.row import Row
from sparsespec_jax.engine.row_drafting import RowDrafting
from sparsespec_jax.engine.updates import Updates
from sparsespec_jax.kv.manager import Holding, KvManager
from sparsespec_jax.kv.space import Move

PRIORITY_TURNS = 64  # earlier arrivals that a point of priority overtakes


class Scheduler:
    """Waiting and running requests, their rows and slots; `plan` makes the next step of them.

    choice: what the cycles that start from now on draft, as many as one of the buckets' `ks`.
    """

    def __init__(
        self,
        buckets: Buckets,
        kv: KvManager,
        phases: Phases = "balanced",
        row_drafting: RowDrafting | None = None,
    ):
        self._buckets = buckets
        self._kv = kv
        self._k = buckets.k
        self.choice = Choice(self._k)
        self._phases = phases
        self._row_drafting = row_drafting
        self._random = np.random.default_rng(0)
        self._features = Features()
        self._arrivals = itertools.count()
        self._waiting: list[Request] = []  # by turn
        self._admitted: list[Request] = []  # since the last step
        self._rows: dict[int, Row] = {}  # in order of admission
        self._free_rows = list(range(buckets.max_batch - 1, -1, -1))
        self._commits: list[tuple[Row, int, int]] = []

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> int:
        return len(self._rows) - self._kv.parked

    @property
    def parked(self) -> int:
        return self._kv.parked

    def take_moves(self) -> list[Move]:
        """KV moves that no step has taken along: what was forgotten since the last one."""
        return self._kv.take_moves()

    # Requests come and go.

    def add(self, request: Request) -> None:
        """Queue a request.

        What it needs of a step stays in all steps until nothing runs or waits: switching back and
        forth would compile many more of them.
        """
        if not (self._rows or self._waiting):
            self._features = Features()
        self._features = self._features.including(request.params)
        request.turn = next(self._arrivals) - PRIORITY_TURNS * request.params.priority
        bisect.insort(self._waiting, request, key=lambda other: other.turn)
        self._kv.enqueue(request.prefix_key)

    def remove(self, request: Request) -> None:
        """Forget a request, wherever it is. Steps already dispatched may still run its row."""
        for row in self._rows.values():
            if row.request is request:
                return self._retire(row)
        if request in self._waiting:
            self._waiting.remove(request)
            self._kv.dequeue(request.prefix_key)

    def read(self, emitting: Emitting, emitted: int, finished: bool) -> bool:
        """Take note of a result; False if the row has moved on to another request meanwhile."""
        row = emitting.row
        if self._rows.get(row.index) is not row:
            return False
        row.kv.unread -= emitting.most_tokens
        row.kv.length += emitted
        if finished:
            self._retire(row)
        return True

    def commit(self, row: Row, emitted: int, last_token: int) -> None:
        """Tell the device with the next step what the host has verified; there the row goes on."""
        row.sits_out, row.phase = False, row.first_phase
        self._commits.append((row, emitted, last_token))

    def _retire(self, row: Row) -> None:
        del self._rows[row.index]
        self._free_rows.append(row.index)
        self._kv.release(row.kv)

    def _admit(self) -> list[Request]:
        """In turn: nobody overtakes the first in line, for whom room is made."""
        admitted = []
        while self._waiting and self._free_rows:
            request = self._waiting[0]
            most = request.expected_length + self._k
            index = self._free_rows[-1]
            kv = self._kv.admit(index, request.turn, request.prefix_key, len(request.prompt), most)
            if kv is None:
                break
            del self._waiting[0]
            self._free_rows.pop()
            self._rows[index] = Row(request, kv)
            admitted.append(request)
        return admitted

    def _resume(self) -> None:
        for kv in self._kv.resume():
            row = self._rows[kv.row]
            if not kv.mapped:  # its KV is to be computed, from all its tokens
                row.phase, row.prefilled = None, 0
            elif row.phase is not None:
                drafted, row.phase = row.drafted, None
                row.phase = self._join(row.start + drafted)
                row.first_phase = row.phase - drafted

    # One step.

    def plan(self) -> PlannedStep | None:
        """The next step, or None if there is nothing to do until a result is read."""
        self._resume()
        self._admitted += self._admit()  # a step may not follow at once
        self._kv.make_room(self._growth)
        rows = [row for row in self._rows.values() if not (row.kv.parked or row.sits_out)]
        prefilling = [row for row in rows if row.phase is None]
        drafting = [row for row in rows if row.phase is not None and row.phase < self._k]
        verifying = [row for row in rows if row.phase == self._k]
        if not rows:
            return None
        lengths = [row.longest for row in drafting + verifying]
        targets = [row.kv.target for row in prefilling]
        bucket = self._buckets.smallest(
            len(drafting),
            len(verifying),
            self._chunks(prefilling),
            max([max(lengths, default=0) + self._k, *targets]),
            self._features,
            k=self._verified_at_most(drafting, verifying),
        )
        batch = self._buckets.batch(max(1, len(lengths)))
        # Who finds no place drafts or verifies a step later; who drafts less waits for the others.
        verifying.sort(key=lambda row: -(row.drafted + row.waited))
        for row in verifying[bucket.verifies :]:
            row.waited += 1
        if self._row_drafting is not None:
            few = batch <= self.choice.k  # steps of few rows verify now and then only
            context = sum(lengths) // max(1, len(lengths))
            self._row_drafting.update(
                self.choice, drafting + verifying, context, 0 if few else bucket.verifies
            )
        drafting, verifying = drafting[: bucket.drafts], verifying[: bucket.verifies]
        layout = self._buckets.layout(bucket)
        packed, plan = layout.empty()
        plan.sparsity[:] = self.choice.sparsity
        updates = Updates(plan, self._kv)

        decoding = drafting + verifying
        mapped = updates.map([(row, self._end(row)) for row in decoding])
        mapped = set(itertools.compress(decoding, mapped))
        stalled = len(decoding) - len(mapped)
        drafting = [row for row in drafting if row in mapped]
        self._plan_commits(plan)
        emitting = self._plan_verifies(plan, bucket, [row for row in verifying if row in mapped])
        self._plan_drafts(plan, drafting)
        emitting += self._plan_chunks(plan, bucket, prefilling, updates)
        tokens = len(drafting) + sum(e.most_tokens for e in emitting if e.n_drafts is not None)
        tokens += int(plan.chunks[:, 2].sum())
        moves = self._kv.take_moves()
        admitted, self._admitted = self._admitted, []
        return PlannedStep(
            bucket,
            packed,
            moves,
            emitting,
            admitted,
            batch,
            self.choice,
            len(lengths),
            sum(lengths),
            tokens,
            stalled,
        )

    def _verified_at_most(self, drafting: list[Row], verifying: list[Row]) -> int:
        """Drafts that the step's verify rows need room for.

        With any, verification also chooses what to attend to: so where cycles draft, all do.
        """
        drafted = [row.drafted for row in verifying] + [row.drafted + 1 for row in drafting]
        return max([self.choice.k, *drafted])

    def _chunks(self, rows: list[Row]) -> int:
        """That are left of their prompts."""
        return sum(-(-(row.kv.target - row.computed) // self._buckets.chunk) for row in rows)

    def _end(self, row: Row) -> int:
        """Positions that a decoding row may write to in its cycle."""
        return row.longest + self._k - row.first_phase

    def _growth(self, holdings: Sequence[Holding]) -> int:
        """Slots that the rows may take in the next step."""
        rows = [self._rows[holding.row] for holding in holdings]
        prompts = sum(row.kv.due for row in rows if row.phase is None)
        decoding = [self._end(row) - row.kv.mapped for row in rows if row.phase is not None]
        chunks = self._buckets.prefill_rows * self._buckets.chunk
        return min(prompts, chunks) + sum(max(0, count) for count in decoding)

    def _plan_commits(self, plan: Plan) -> None:
        live = [commit for commit in self._commits if self._rows.get(commit[0].index) is commit[0]]
        for entry, (row, emitted, last_token) in enumerate(live):
            plan.commits[entry] = row.index, emitted, last_token
        self._commits.clear()
        for row in self._rows.values():
            if row.sits_out:
                row.phase += 1

    def _plan_drafts(self, plan: Plan, rows: list[Row]) -> None:
        for entry, row in enumerate(rows):
            plan.drafts[entry] = row.index, row.drafted
            row.phase += 1

    def _plan_verifies(self, plan: Plan, bucket: Bucket, rows: list[Row]) -> list[Emitting]:
        emitting = []
        for entry, row in enumerate(rows):
            n_drafts = row.drafted
            plan.verifies[entry] = row.index, n_drafts
            emitting.append(Emitting(row, entry, n_drafts + 1, n_drafts, row.sparsity, row.apart))
            row.kv.unread += n_drafts + 1
            self._begin_cycle(row, bucket)
        return emitting

    def _plan_chunks(
        self, plan: Plan, bucket: Bucket, rows: list[Row], updates: Updates
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
                if row.kv.prefix.ready:
                    row.request.stats.shared_tokens = len(row.kv.prefix)
            row.prefilled = row.computed
            while entry < bucket.chunks and row.prefilled < row.kv.target:
                end = min(row.prefilled + self._buckets.chunk, row.kv.target)
                if not all(updates.map([(row, end)])):
                    return emitting
                final = end == row.kv.target
                plan.chunks[entry] = row.index, row.prefilled, end - row.prefilled, final
                row.prefilled = end
                if final:
                    emitting.append(Emitting(row, first_result + entry, 1, None))
                    row.kv.prefix.ready = True
                    row.kv.unread += 1
                    self._begin_cycle(row, bucket)
                entry += 1
        return emitting

    def _admission(self, row: Row) -> np.ndarray:
        request = row.request
        head = [row.index, len(request.prompt), request.max_length]
        return np.concatenate([head, request.sampling])

    def _begin_cycle(self, row: Row, bucket: Bucket) -> None:
        """Of a row that the step verifies, or whose prompt it ends.

        It drafts if it knows with what. One that starts to decode, or other cycles than before,
        joins the emptiest phase.
        """
        starts = row.phase is None
        row.sits_out = self._buckets.delayed
        row.scored = self._buckets.queries_of(bucket) > 1
        row.sparsity = self.choice.sparsity
        later = int(row.sits_out)
        row.waited = 0
        if not row.scored:
            row.drafts = 0
        elif self._row_drafting is None:
            row.drafts = self.choice.k
        else:
            row.drafts = self._row_drafting.drafts(row)
        row.apart = row.scored and row.drafts < self.choice.k
        row.first_phase = start = self._k - row.drafts
        if starts or start != row.start:
            row.phase, row.start = None, start
            row.first_phase = self._join(start, later)
        row.phase = row.first_phase - later

    def _join(self, first: int, later: int = 0) -> int:
        """The emptiest phase from `first` on, so that steps have about as many tokens as others.

        `later`: steps until the row is in it.
        """
        running = (row for row in self._rows.values() if not row.kv.parked)
        phases = [row.phase + later for row in running if row.phase is not None]
        phases = [phase for phase in phases if 0 <= phase <= self._k]  # the others sit out then
        if self._phases == "lockstep" and phases:
            return max(phases[0], first)
        if self._phases == "random":
            return int(self._random.integers(first, self._k + 1))
        counts = np.bincount(phases, minlength=self._k + 1)
        return first + int(counts[first:].argmin())
