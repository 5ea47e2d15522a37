"""The scheduler under a steady mix of requests, with modelled step times instead of a device."""

from __future__ import annotations

import random
from collections import Counter, defaultdict, deque

import numpy as np

from sparsespec_jax.config import EngineConfig, SpeculationConfig
from sparsespec_jax.engine.buckets import Buckets
from sparsespec_jax.engine.drafting import Drafting
from sparsespec_jax.engine.planned import PlannedStep
from sparsespec_jax.engine.request import Request
from sparsespec_jax.engine.scheduler import Scheduler
from sparsespec_jax.kv.manager import KvManager
from sparsespec_jax.kv.space import KvSpace
from sparsespec_jax.sampling.params import SamplingParams
from sparsespec_jax.sampling.rows import pack_row

SCALE = 16  # tokens that a position stands for, so that long contexts are quick to simulate


class Mix:
    """Requests whose drafts agree so often come in these shares, one for each that ends.

    Steps take about as long as those of an 8B model on an H200, padding included.

    shares: agreement -> share of the requests. gaps: by request, steps between its results.
    """

    def __init__(
        self,
        shares: dict[float, float],
        *,
        context: int,
        max_batch: int,
        running: int,
        by_row: bool,
        new_tokens: int = 120,
        seed: int = 0,
    ):
        self.drafted = Counter()  # cycles, by agreement and drafts
        self.gaps: defaultdict[int, list[int]] = defaultdict(list)
        self._shares = shares
        self._speculation = SpeculationConfig(k="auto", min_budget=128 // SCALE)
        self._prompt, self._new_tokens = context // SCALE, new_tokens
        self._buckets = Buckets(
            max_batch=max_batch,
            max_context=self._prompt + new_tokens + 8,
            k=self._speculation.ks[0],
            chunk=self._prompt,
            prefill_rows=1,
            ks=self._speculation.ks,
        )
        config = EngineConfig(max_batch=max_batch)
        self.drafting = Drafting(self._speculation, config, alone=True, clock=lambda: self._seconds)
        if not by_row:
            self.drafting.rows = None
        space = KvSpace(max_batch * self._buckets.width, 64, 0)
        kv = KvManager(space, "aggressive", self._buckets.k, chunks_per_step=2)
        self._scheduler = Scheduler(self._buckets, kv, row_drafting=self.drafting.rows)
        self._random, self._arriving = random.Random(seed), random.Random(seed)
        self._agreements: list[float] = []
        self._last_result: dict[int, int] = {}
        self._in_flight: deque[tuple[PlannedStep, float]] = deque()
        self._steps, self._tokens, self._seconds = 0, 0, 0.0
        for _ in range(running):
            self._add()

    def tokens_a_second(self, steps: int) -> float:
        """Over the next `steps`."""
        tokens, seconds = self._tokens, self._seconds
        for _ in range(steps):
            self._step()
        return (self._tokens - tokens) / (self._seconds - seconds)

    def _add(self) -> None:
        number = len(self._agreements)
        prompt = np.full(self._prompt, number, np.int32)
        params = SamplingParams()
        words = pack_row(params, number, len(prompt), ())
        end = len(prompt) + self._new_tokens
        agreements, shares = zip(*self._shares.items(), strict=True)
        self._agreements.append(self._arriving.choices(agreements, shares)[0])
        self._scheduler.add(Request(number, prompt, params, words, end, lambda event: None))

    def _step(self) -> None:
        self._steps += 1
        self._scheduler.choice = self.drafting.choice
        planned = self._scheduler.plan()
        self._in_flight.append((planned, self._modelled_seconds(planned)))
        if len(self._in_flight) > 1:
            self._read(*self._in_flight.popleft())

    def _modelled_seconds(self, planned: PlannedStep) -> float:
        """Launches, matmuls over all queries of the bucket, and the positions that are read."""
        bucket = planned.bucket
        queries = self._buckets.queries(bucket)
        plan = self._buckets.layout(bucket).unpack(planned.packed)
        lengths = {index: row.kv.length for index, row in self._scheduler._rows.items()}
        drafting = [row for row in plan.drafts[:, 0].tolist() if row < self._buckets.max_batch]
        reads = sum(self._speculation.budget(lengths[row]) for row in drafting)
        reads += sum(e.row.kv.length for e in planned.emitting if e.n_drafts is not None)
        return 1e-3 + max(4e-3, 22e-6 * queries) + 3.7e-8 * SCALE * reads

    def _read(self, planned: PlannedStep, seconds: float) -> None:
        self._seconds += seconds
        self.drafting.note_step(planned, compiled=0)
        for emitting in planned.emitting:
            row, number = emitting.row, emitting.row.request.request_id
            if self._scheduler._rows.get(row.index) is not row:
                continue
            accepted, n_drafts = 0, emitting.n_drafts
            while accepted < (n_drafts or 0) and self._random.random() < self._agreements[number]:
                accepted += 1
            left = row.request.max_length - row.kv.length
            emitted = min(accepted + 1, left)
            self._scheduler.read(emitting, emitted, emitted == left)
            self._tokens += emitted
            self._note(emitting, accepted, emitted == left)

    def _note(self, emitting, accepted: int, finished: bool) -> None:
        row, n_drafts = emitting.row, emitting.n_drafts
        number = row.request.request_id
        if number in self._last_result:
            self.gaps[number].append(self._steps - self._last_result[number])
        self._last_result[number] = self._steps
        if n_drafts is not None:
            self.drafted[self._agreements[number], n_drafts] += 1
        if finished:
            self._add()
        elif n_drafts is not None:
            self.drafting.note_cycle(emitting, accepted)
