"""The scheduler under requests of many kinds, with modelled step times instead of a device."""

from __future__ import annotations

import random
from collections import Counter, defaultdict, deque
from collections.abc import Sequence

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


class Simulation:
    """Requests whose drafts agree so often come in these shares.

    Steps take about as long as those of an 8B model on an H200, padding included.

    shares: agreement -> share of the requests. scale: tokens that a position stands for, so that
    long contexts are quick to simulate. noise: standard deviation of step times, as a share; one
    step in fifty takes 1.8 times as long, too, if there is any.
    """

    def __init__(
        self,
        shares: dict[float, float],
        *,
        context: int,
        max_batch: int,
        longest: int,
        k: int | str = "auto",
        by_row: bool = True,
        batch_buckets: tuple[int, ...] | None = None,
        scale: int = 1,
        noise: float = 0.0,
        seed: int = 0,
    ):
        self.drafted = Counter()  # cycles, by agreement and drafts
        self.gaps: defaultdict[int, list[int]] = defaultdict(list)  # by request, in steps
        self._shares, self._scale, self._noise = shares, scale, noise
        how = {"k": k} if k else {"method": "none"}
        self._speculation = SpeculationConfig(**how, min_budget=128 // scale)
        self._prompt = context // scale
        self._buckets = Buckets(
            max_batch=max_batch,
            max_context=self._prompt + longest + 8,
            k=self._speculation.ks[0],
            chunk=self._prompt,
            prefill_rows=1,
            batch_buckets=batch_buckets,
            ks=self._speculation.ks,
        )
        config = EngineConfig(max_batch=max_batch)
        self.drafting = Drafting(self._speculation, config, alone=True, clock=lambda: self._seconds)
        if not by_row:
            self.drafting.rows = None
        space = KvSpace(max_batch * self._buckets.width, 64, 0)
        kv = KvManager(space, "aggressive", self._buckets.k, chunks_per_step=2)
        self._scheduler = Scheduler(self._buckets, kv, row_drafting=self.drafting.rows)
        # Of arrivals apart, so that the same come whatever else is drawn.
        self._random, self._arriving = random.Random(seed), random.Random(seed)
        self._agreements: list[float] = []
        self._last_result: dict[int, int] = {}
        self._in_flight: deque[tuple[PlannedStep, float]] = deque()
        self._steps, self._tokens, self._seconds = 0, 0, 0.0

    def add(self, new_tokens: int) -> None:
        """A request that arrives now."""
        number = len(self._agreements)
        prompt = np.full(self._prompt, number, np.int32)
        params = SamplingParams()
        words = pack_row(params, number, len(prompt), ())
        end = len(prompt) + new_tokens
        agreements, shares = zip(*self._shares.items(), strict=True)
        self._agreements.append(self._arriving.choices(agreements, shares)[0])
        self._scheduler.add(Request(number, prompt, params, words, end, lambda event: None))

    def step(self) -> None:
        self._steps += 1
        if self.drafting.choice is not None:
            self._scheduler.choice = self.drafting.choice
        planned = self._scheduler.plan()
        if planned is not None:
            self._in_flight.append((planned, self._modelled_seconds(planned)))
        if len(self._in_flight) > (planned is not None):
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
        seconds = 1e-3 + max(4e-3, 22e-6 * queries) + 3.7e-8 * self._scale * reads
        if self._noise:
            seconds *= self._random.gauss(1, self._noise)
            seconds *= 1.8 if self._random.random() < 0.02 else 1.0
        return seconds

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
            self.ended()
        elif n_drafts is not None:
            self.drafting.note_cycle(emitting, accepted)

    def ended(self) -> None:
        """A request has all its tokens."""


class Mix(Simulation):
    """A steady state: for each request that ends another one comes."""

    def __init__(self, shares, *, running: int, new_tokens: int = 120, **options):
        super().__init__(shares, longest=new_tokens, scale=16, **options)
        self._new_tokens = new_tokens
        for _ in range(running):
            self.add(new_tokens)

    def ended(self) -> None:
        self.add(self._new_tokens)

    def tokens_a_second(self, steps: int) -> float:
        """Over the next `steps`."""
        tokens, seconds = self._tokens, self._seconds
        for _ in range(steps):
            self.step()
        return (self._tokens - tokens) / (self._seconds - seconds)


class Workload(Simulation):
    """Requests that are all there from the start, with outputs of these lengths."""

    def __init__(self, shares, outputs: Sequence[int], **options):
        super().__init__(shares, longest=max(outputs), **options)
        self._left = len(outputs)
        for new_tokens in outputs:
            self.add(new_tokens)

    def ended(self) -> None:
        self._left -= 1

    def tokens_a_second(self) -> float:
        """From the first step to the last."""
        while self._left:
            self.step()
        return self._tokens / self._seconds
