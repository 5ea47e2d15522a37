"""Rows whose drafts are accepted much less than the others' draft fewer, or none.

A step has the shape of its batch, whatever its rows draft. So what a row takes of a step's time is
its place, and what it reads of the KV cache. One that drafts k tokens over a context of C costs

    place + position * (k * budget(C) + C) / (k + 1)

seconds a step and emits (1 + a_1 + ... + a_k) / (k + 1) tokens, where a_i are its own shares of
accepted drafts. It should draft as many as bring most tokens for that. Both costs come from the
measured times of steps with drafts and without.

Whoever drafts less verifies more often, and a step has room for few verifications: what the others
leave of it is what such rows may have. Nobody waits for them.
"""

from __future__ import annotations

from collections.abc import Sequence

from sparsespec_jax.config import SpeculationConfig
from sparsespec_jax.engine.acceptance import Acceptance
from sparsespec_jax.engine.adaptive import AdaptiveDrafting, Choice
from sparsespec_jax.engine.row import Row

_MEMORY = 0.95  # weight of a row's cycle among those before, per cycle
_PRIOR = 8  # cycles that the workload's shares count for in a row that is new or tries again
_GAIN = 1.3  # what another number of drafts must promise
_SPARE = 0.05  # share of the verify rows left alone: full ones would make rows wait
_PATIENCE = 128  # cycles of fewer drafts until a row tries again; then twice that, and so on


class RowDrafting:
    """What each row should draft in its next cycle: as many as the workload's rows, or fewer.

    A row that drafts fewer is *apart*.
    """

    def __init__(self, speculation: SpeculationConfig, workload: AdaptiveDrafting):
        self._speculation = speculation
        self._workload = workload
        self._choice = workload.choice
        self._costs: tuple[float, float] | None = None
        self._room = 0.0  # verifications a step that nobody needs

    def note_cycle(
        self, row: Row, n_drafts: int, accepted: int, sparsity: int, *, apart: bool
    ) -> None:
        """`row` verified `n_drafts` drafts and kept the first `accepted`.

        The workload is to know how it would be without rows apart: so what one does counts as part
        of a cycle like the others', whose drafts are accepted as the row's were.
        """
        if not n_drafts and not apart:
            return
        if row.acceptance is None:
            self._expect_the_usual(row, sparsity)
        row.acceptance.note([place < accepted for place in range(n_drafts)])
        if not apart:
            self._workload.note_cycle(n_drafts, accepted, sparsity)
            return
        row.cycles_apart += 1
        most, steps = self._workload.choice.k, self._workload.cycle_steps
        usual = self._workload.acceptance(sparsity)
        usual.note(row.acceptance.shares(most), min(1.0, steps(n_drafts) / steps(most)))

    def update(self, choice: Choice, rows: Sequence[Row], context: int, verifies: int) -> None:
        """Before each step: what the others draft, the rows that decode, and its verify rows.

        `context`: tokens of those rows, on average.
        """
        self._choice = choice
        if not choice.k:
            return
        steps = self._workload.cycle_steps
        self._costs = self._measured_costs(len(rows), context)
        needed = sum(1 / steps(row.drafts) for row in rows)
        self._room = (1 - _SPARE) * verifies - needed

    def drafts(self, row: Row) -> int:
        """Of the cycle that the row begins now."""
        most, steps = self._choice.k, self._workload.cycle_steps
        if not most:
            return 0
        before = min(row.drafts, most) if row.apart else most
        held = 0.0 if row.phase is None else 1 / steps(row.drafts)
        drafts = most
        if self._costs is not None and row.acceptance is not None and self._room >= 0:
            if row.apart and row.cycles_apart >= _PATIENCE << row.retries:
                row.retries += 1
                self._expect_the_usual(row, self._choice.sparsity)
            else:
                limit = self._room + held + 1e-9
                fitting = [k for k in self._speculation.ks if k < most and 1 / steps(k) <= limit]
                best = max([most, *fitting], key=lambda k: self._value(row, k))
                gains = self._value(row, best) > _GAIN * self._value(row, before)
                drafts = best if gains else before
        self._room -= 1 / steps(drafts) - held
        return drafts

    def _measured_costs(self, rows: int, context: int) -> tuple[float, float] | None:
        """Seconds of a step: of a row's place, and of each position that it reads."""
        known = [self._workload.seconds(choice) for choice in (self._choice, Choice(0))]
        if not rows or None in known:
            return None
        drafting, plain = (seconds / rows for seconds in known)
        reads = self._reads(self._choice.k, context)
        more = self._reads(0, context) - reads  # none where drafts read the whole context
        position = max(0.0, (plain - drafting) / more) if more > 0 else 0.0
        place = drafting - position * reads
        return (place, position) if place > 0 else None

    def _value(self, row: Row, k: int) -> float:
        """Tokens in a second of the steps' time that the row takes."""
        place, position = self._costs
        seconds = place + position * self._reads(k, row.longest)
        return row.acceptance.tokens(k) / self._workload.cycle_steps(k) / seconds

    def _reads(self, k: int, context: int) -> float:
        """Positions a step."""
        reads = self._speculation.cycle_reads(context, k, self._choice.sparsity)
        return reads / self._workload.cycle_steps(k)

    def _expect_the_usual(self, row: Row, sparsity: int) -> None:
        row.acceptance = Acceptance(self._speculation.ks[0], _MEMORY)
        row.acceptance.expect(self._workload.acceptance(sparsity), _PRIOR)
        row.cycles_apart = 0
