"""What to draft: chosen while running, from what drafts bring and what steps cost.

A cycle of k drafts takes k + 1 steps and emits 1 + a_1 + ... + a_k tokens, where a_i is the share
of cycles whose i-th draft is accepted. So a step of rows that draft k tokens emits

    rows * (1 + a_1 + ... + a_k) / (k + 1)

tokens on average, and what counts is that over its time. The times come from steps that ran, by
batch size and choice, and are told for what the rows have to read by now: what a position takes is
learned as contexts grow. The shares come from all cycles whose drafts read the same share of the KV
cache.
Each choice is tried for a while, and again now and then, since contexts grow and texts change.
Speculation that does not pay (short contexts, few rows, bad drafts) ends as k = 0.

The search goes along one axis at a time: the largest and the smallest k with the first sparsity and
those between them that could be the best, then the other sparsities with the best k, then what lies
beside the best of them. No k in between makes steps much shorter than both ends do: it has more
queries than the smallest, and reads more than the largest.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from sparsespec_jax.engine.acceptance import Acceptance
from sparsespec_jax.engine.step_times import ReadingCost, StepTimes

_TRIAL = 36  # steps that a choice is tried for at a time
_SETTLING = 12  # before them: rows finish the cycles they are in
_NOISE = 0.4  # or for a cycle or more, if it is then that far from the best, over sqrt(steps)
_GLANCE = 8  # steps that such a cycle has at least
_PRIOR = 16  # cycles that shares of another sparsity, or of old, count for
_FEW = 8  # cycles of the batch's rows that must have been seen to say so
_RETRY = 4096  # steps until what nobody expects to pay is tried; others again when that costs
_LOST = 0.001  # no more than this share of the tokens since their last trial,
_DOUBT = 0.05  # were they so much better than their first one said, half of that than the second
_LATEST = 20_000  # steps until one is tried again, whatever that costs
_TRIED = 1 / 7  # at most: trials' share of the steps
_SHORTER = 0.9  # of the shortest steps known: what others may take
_GAIN = 1.01  # what another choice must promise
_SURE = 0.02  # relative error of a promise that is good enough to end a trial
_NOTHING: Mapping = MappingProxyType({})


class Choice(NamedTuple):
    """What cycles draft. sparsity: index among the speculation's sparsities; 0 without drafts."""

    k: int
    sparsity: int = 0


class AdaptiveDrafting:
    """`choice` is what cycles that start now should draft. Knows no clock: it is told."""

    def __init__(
        self,
        ks: tuple[int, ...],
        sparsities: int = 1,
        *,
        sits_out: int = 0,
        weights: float = math.inf,
    ):
        """`ks`: candidates; the largest is tried first, so that all shares are known early.

        `sparsities`: how many there are. `sits_out`: steps of a row between two cycles. `weights`:
        positions whose KV takes as many bytes as the model does.
        """
        self._ks = tuple(sorted(ks, reverse=True))
        self._sparsities = range(sparsities)
        self.candidates = [Choice(*pair) for pair in itertools.product(self._ks, self._sparsities)]
        self._sits_out = sits_out
        self.choice = Choice(self._ks[0])
        self._acceptance = [Acceptance(self.choice.k) for _ in self._sparsities]
        self._by_batch: dict[int, dict[Choice, StepTimes]] = {}
        self._reads: Mapping[Choice, float] = _NOTHING
        self._cost = ReadingCost(weights)
        self._batch: int | None = None
        self._steps = 0
        self._chosen_at = 0
        self._trying = False
        self._weighing = False  # whether it is not known how it is accepted, either
        self._trial = 0  # steps that the last one took

    def note_cycle(self, n_drafts: int, accepted: int, sparsity: int = 0) -> None:
        """A row verified `n_drafts` drafts of that sparsity and kept the first `accepted`."""
        self._acceptance[sparsity].note([place < accepted for place in range(n_drafts)])

    def note_step(
        self, batch: int, seconds: float | None, reads: Mapping[Choice, float] = _NOTHING
    ) -> None:
        """A step of a batch of size `batch` took so long; None if it was no ordinary one.

        `reads`: by choice, positions that a step of the present rows reads on average.
        """
        self._steps += 1
        self._reads = reads
        if batch != self._batch:
            self._begin(batch)
        age = self._steps - self._chosen_at
        if seconds is not None and age > _SETTLING:
            read = reads.get(self.choice, 0.0)
            self._times[self.choice].note(seconds, read, self._steps)
            self._cost.note((batch, self.choice), read, seconds)
        if self._trying:
            if self._is_tried(age):
                self._times[self.choice].tried(age)
                self._trial = age
                self._decide()
        elif age % _TRIAL == 0:
            best = self._best()
            if best != self.choice:  # this one has become slower; how is that one now?
                self._choose(best, trying=True)
            elif age >= self._trial * (1 / _TRIED - 1):
                self._try_again(best)

    def cycle_steps(self, k: int) -> int:
        """From one cycle of `k` drafts to the next."""
        return k + 1 + self._sits_out

    def seconds(self, choice: Choice) -> float | None:
        """Of a step of the present rows, if known."""
        steps = self._by_batch.get(self._batch, {}).get(choice)
        if steps is None or not steps.seconds:
            return None
        return steps.mean(self._reads.get(choice, 0.0), self._cost)

    def acceptance(self, sparsity: int) -> Acceptance:
        """Of all rows' drafts of that sparsity."""
        return self._acceptance[sparsity]

    @property
    def _times(self) -> dict[Choice, StepTimes]:
        return self._by_batch[self._batch]

    def _begin(self, batch: int) -> None:
        """Another size has times of its own; those of the nearest one are a first guess."""
        if batch not in self._by_batch:
            nearest = min(self._by_batch, key=lambda other: abs(other - batch), default=None)
            known = self._by_batch.get(nearest, {})
            self._by_batch[batch] = {
                choice: StepTimes.of(_window(choice.k), known.get(choice))
                for choice in self.candidates
            }
        self._batch = batch
        self._choose(self._best(), trying=bool(self._unknown()))

    def _decide(self) -> None:
        """Try what is not known; else go on with the best."""
        unknown = [choice for choice in self._unknown() if choice != self.choice]
        self._choose(unknown[0] if unknown else self._best(), trying=bool(unknown))

    def _try_again(self, best: Choice) -> None:
        """The one that has waited longest, of those that have waited long enough."""
        rates, step = self._rates(), self.seconds(best)

        def patience(choice: Choice) -> float:
            times, seconds = self._times[choice], self.seconds(choice)
            if not times.trials or seconds is None:
                return _RETRY
            lost = 1 - rates[choice] / rates[best] - _DOUBT / times.trials
            return min(_LATEST, times.trial * seconds / step * lost / _LOST)

        waited = {
            choice: self._steps - self._times[choice].measured_at
            for choice in self._beside(best)
            if choice != best
        }
        due = [choice for choice, steps in waited.items() if steps >= patience(choice)]
        if due:
            self._choose(max(due, key=waited.get), trying=True)

    def _beside(self, choice: Choice) -> list[Choice]:
        """Those that differ in k, then those that differ in sparsity."""
        ks = [Choice(k, choice.sparsity if k else 0) for k in self._ks]
        return ks + [Choice(choice.k, s) for s in self._sparsities if choice.k and s]

    def _unknown(self) -> list[Choice]:
        """What is worth a trial; k in between only where it could be the best."""
        best = self._best()
        unknown = [choice for choice in self._beside(best) if not self._times[choice].seconds]
        ends = [c for c in unknown if c.k != best.k and c.k in (self._ks[0], self._ks[-1])]
        return ends or [c for c in unknown if c.k == best.k or self._can_win(c)]

    def _can_win(self, choice: Choice) -> bool:
        """If its steps were a little shorter than any that are known."""
        rates = self._rates()
        shortest = min(self.seconds(known) for known in rates)
        tokens = self._acceptance[choice.sparsity].tokens(choice.k)
        most = tokens / self.cycle_steps(choice.k) / (_SHORTER * shortest)
        return most > max(rates.values())

    def _is_tried(self, age: int) -> bool:
        """Whether the trial has shown what it can."""
        rates = self._rates()
        here = rates.pop(self.choice, None)
        best = max(rates, key=rates.get, default=None)
        if here is None:
            return age >= _SETTLING + _TRIAL
        steps = len(self._times[self.choice].seconds)
        seen = steps >= max(_GLANCE, self.choice.k + 1)
        if self._weighing or best is None:
            seen &= self.acceptance(self.choice.sparsity).cycles >= _FEW
        if best is None:
            return seen or age >= _SETTLING + _TRIAL
        off = abs(here / rates[best] - 1)
        if age < _SETTLING + _TRIAL:
            error = self._relative_error(self.choice, best) if self._weighing else 0.0
            return seen and off > _NOISE / math.sqrt(steps) + 2 * error
        # Of what this trial can learn: what the best has accepted it does not tell.
        k, sparsity = self.choice
        error = self.acceptance(sparsity).relative_error(k) if self._weighing else 0.0
        return error < max(_SURE, off / 2) or age >= _RETRY

    def _relative_error(self, one: Choice, other: Choice) -> float:
        """Of the ratio of their rates, as far as it comes from what is accepted."""
        if one.sparsity == other.sparsity and one.k and other.k:
            return 0.0  # from the same cycles
        return math.hypot(*(self._acceptance[s].relative_error(k) for k, s in (one, other)))

    def _rates(self) -> dict[Choice, float]:
        """Tokens a second and row of the choices whose time is known."""
        return {
            choice: self._acceptance[choice.sparsity].tokens(choice.k)
            / self.cycle_steps(choice.k)
            / self.seconds(choice)
            for choice, steps in self._times.items()
            if steps.seconds
        }

    def _best(self) -> Choice:
        rates = self._rates()
        best = max(rates, key=rates.get, default=self.choice)
        here = rates.get(self.choice)
        if here is None:
            return best
        gain = _GAIN
        if self.choice.k:  # without drafts, doubt speaks for drafting: only that ends it
            gain = max(gain, 1 + self._relative_error(self.choice, best))
        return self.choice if rates[best] < gain * here else best

    def _choose(self, choice: Choice, *, trying: bool) -> None:
        drafted = self.choice.k or self._trying  # a trial without drafts is short
        news = choice.sparsity != self.choice.sparsity or not drafted
        self._weighing = trying and news and choice.k > 0
        if self._weighing:
            # What was accepted long ago says less than what is of another sparsity now.
            now = self._acceptance[self.choice.sparsity]
            self._acceptance[choice.sparsity].expect(now, _PRIOR)
        self.choice, self._trying, self._chosen_at = choice, trying, self._steps
        if trying:
            self._times[choice].clear()


def _window(k: int) -> int:
    """Steps whose times count: whole cycles, as those of few rows hold steps of different kinds."""
    return max(1, _TRIAL // (k + 1)) * (k + 1)
