"""What cycles draft, where that is left to the engine: it learns of results, and chooses."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from sparsespec_jax.config import EngineConfig, SpeculationConfig
from sparsespec_jax.engine.adaptive import AdaptiveDrafting, Choice
from sparsespec_jax.engine.planned import Emitting, PlannedStep
from sparsespec_jax.engine.row_drafting import RowDrafting


class Drafting:
    """Of one engine, for as long as it lives.

    workload: chooses for all rows; None where all is fixed. rows: for single ones, or None.
    """

    def __init__(
        self,
        speculation: SpeculationConfig,
        config: EngineConfig,
        *,
        alone: bool,
        weights: float = math.inf,
        clock: Callable[[], float] = time.perf_counter,
    ):
        """`alone`: whether no other process must plan the same, without knowing the same times.

        `weights`: positions whose KV takes as many bytes as the model. `clock`: in seconds.
        """
        self.workload = self.rows = None
        ks, sparsities = speculation.ks, len(speculation.sparsities)
        if len(ks) * sparsities > 1:
            sits_out = int(config.overlap == "delayed")
            self.workload = AdaptiveDrafting(ks, sparsities, sits_out=sits_out, weights=weights)
        if len(ks) > 1 and config.phases == "balanced" and alone:
            self.rows = RowDrafting(speculation, self.workload)
        self._clock, self._speculation = clock, speculation
        self._last_read: tuple[float | None, int] = None, 0

    @property
    def choice(self) -> Choice | None:
        """For the cycles that start now."""
        return None if self.workload is None else self.workload.choice

    def pause(self) -> None:
        """No step follows the last one at once."""
        self._last_read = None, 0

    def note_step(self, planned: PlannedStep, compiled: int) -> None:
        """A step's result has been read. `compiled`: how many steps ever were."""
        if self.workload is None:
            return
        seconds = self._seconds(planned, compiled)
        if not planned.bucket.chunks:
            self.workload.note_step(planned.batch, seconds, self._reads(planned))

    def _reads(self, planned: PlannedStep) -> dict[Choice, float]:
        """Positions that a step of these rows reads on average, by what they draft."""
        context = planned.positions // max(1, planned.rows)
        return {
            choice: planned.rows * self._speculation.cycle_reads(context, *choice) / (choice.k + 1)
            for choice in self.workload.candidates
        }

    def _seconds(self, planned: PlannedStep, compiled: int) -> float | None:
        """Since the result before; None if something else than a step as chosen took time, too."""
        now = self._clock()
        (since, known), self._last_read = self._last_read, (now, compiled)
        ordinary = not planned.moves and planned.choice == self.choice and compiled == known
        return now - since if ordinary and since is not None else None

    def note_cycle(self, emitting: Emitting, accepted: int) -> None:
        """A row that goes on verified its drafts and kept the first `accepted`."""
        row, n_drafts, sparsity = emitting.row, emitting.n_drafts, emitting.sparsity
        if self.rows is not None:
            self.rows.note_cycle(row, n_drafts, accepted, sparsity, apart=emitting.apart)
        elif self.workload is not None:
            self.workload.note_cycle(n_drafts, accepted, sparsity)
