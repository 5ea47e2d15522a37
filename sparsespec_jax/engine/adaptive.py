"""How many tokens to draft: chosen while running, from what drafts bring and what steps cost.

A cycle of k drafts takes k + 1 steps and emits 1 + a_1 + ... + a_k tokens, where a_i is the share
of cycles whose i-th draft is accepted. So a step of rows that draft k tokens emits

    rows * (1 + a_1 + ... + a_k) / (k + 1)

tokens on average, and what counts is that over its time. The shares come from all cycles, the times
from steps that ran: each candidate is tried for a while, and again now and then, since contexts
grow and texts change. Speculation that does not pay (short contexts, few rows, bad drafts) ends as
k = 0.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections import deque

_TRIAL = 24  # steps that a candidate is tried for at a time
_SETTLING = 12  # before them: rows finish the cycles they are in
_GLANCE, _HOPELESS = 4, 0.8  # or for so many, if it is then that far from the best
_RETRY = 4096  # steps until another candidate is tried again, the one that has waited longest
_GAIN = 1.01  # what another candidate must promise
_MEMORY = 0.999  # weight of a cycle among those before, per cycle


@dataclasses.dataclass
class _Candidate:
    """seconds: of its last steps that ran undisturbed. measured_at: when the last of them did."""

    seconds: deque[float] = dataclasses.field(default_factory=lambda: deque(maxlen=_TRIAL))
    measured_at: int = -1

    @property
    def step_seconds(self) -> float:
        return statistics.median(self.seconds)


class AdaptiveDrafting:
    """`k` is what cycles that start now should draft. Knows no clock: it is told."""

    def __init__(self, ks: tuple[int, ...]):
        """`ks`: candidates; the largest is tried first, so that all shares are known early."""
        self._ks = tuple(sorted(ks, reverse=True))
        self.k = self._ks[0]
        self._drafted = [0.0] * self.k
        self._accepted = [0.0] * self.k
        self._by_batch: dict[int, dict[int, _Candidate]] = {}
        self._batch: int | None = None
        self._steps = 0
        self._chosen_at = 0
        self._trying = False

    def note_cycle(self, n_drafts: int, accepted: int) -> None:
        """A row verified `n_drafts` drafts and kept the first `accepted`."""
        for place in range(n_drafts):
            self._drafted[place] = _MEMORY * self._drafted[place] + 1
            self._accepted[place] = _MEMORY * self._accepted[place] + (place < accepted)

    def note_step(self, batch: int, seconds: float | None) -> None:
        """A step of a batch of size `batch` took so long; None if it was no ordinary one."""
        self._steps += 1
        if batch != self._batch:
            self._begin(batch)
        age = self._steps - self._chosen_at
        if seconds is not None and age > _SETTLING:
            candidate = self._by_batch[batch][self.k]
            candidate.seconds.append(seconds)
            candidate.measured_at = self._steps
        if age >= (_SETTLING + _TRIAL if self._trying else _RETRY) or self._is_hopeless():
            self._decide()
        elif not self._trying and age % _TRIAL == 0 and (best := self._best()) != self.k:
            self._choose(best, trying=True)  # this one has become slower; how is that one now?

    def tokens_per_cycle(self, k: int) -> float:
        """Expected of a cycle of `k` drafts."""
        shares = zip(self._accepted[:k], self._drafted[:k], strict=True)
        return 1 + sum(accepted / drafted for accepted, drafted in shares if drafted)

    def _begin(self, batch: int) -> None:
        """Another size has times of its own; those of the nearest one are a first guess."""
        if batch not in self._by_batch:
            nearest = min(self._by_batch, key=lambda other: abs(other - batch), default=None)
            known = self._by_batch.get(nearest, {})
            self._by_batch[batch] = {
                k: _Candidate(deque(known[k].seconds, _TRIAL)) if known else _Candidate()
                for k in self._ks
            }
        self._batch = batch
        self._choose(self._best(), trying=any(self._unknown()))

    def _decide(self) -> None:
        """Try what is not known; else go on with the best; else see how another one does now."""
        candidates = self._by_batch[self._batch]
        unknown = [k for k in self._unknown() if k != self.k]
        if unknown:
            self._choose(unknown[0], trying=True)
        elif self._trying or len(self._ks) == 1:
            self._choose(self._best(), trying=False)
        else:
            others = [k for k in self._ks if k != self.k]
            oldest = min(others, key=lambda k: candidates[k].measured_at)
            self._choose(oldest, trying=True)

    def _is_hopeless(self) -> bool:
        """Whether what is being tried is so slow that a few steps are enough to see it."""
        rates = self._rates() if self._trying else {}
        few = len(self._by_batch[self._batch][self.k].seconds) < _GLANCE
        return not few and self.k in rates and rates[self.k] < _HOPELESS * max(rates.values())

    def _unknown(self) -> list[int]:
        return [k for k, candidate in self._by_batch[self._batch].items() if not candidate.seconds]

    def _rates(self) -> dict[int, float]:
        """Tokens a second and row of the candidates whose time is known."""
        return {
            k: self.tokens_per_cycle(k) / (k + 1) / candidate.step_seconds
            for k, candidate in self._by_batch[self._batch].items()
            if candidate.seconds
        }

    def _best(self) -> int:
        rates = self._rates()
        best = max(rates, key=rates.get, default=self.k)
        here = rates.get(self.k)
        return self.k if here is not None and rates[best] < _GAIN * here else best

    def _choose(self, k: int, *, trying: bool) -> None:
        self.k, self._trying, self._chosen_at = k, trying, self._steps
        if trying:
            self._by_batch[self._batch][k].seconds.clear()
