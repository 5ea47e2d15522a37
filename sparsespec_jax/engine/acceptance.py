"""How often drafts are accepted, by their place in the cycle."""

from __future__ import annotations

import math

_MEMORY = 0.999  # weight of a cycle among those before, per cycle
_PRIOR = 16  # cycles that an expectation counts for


class Acceptance:
    """Of cycles of up to `places` drafts, the recent ones more than those long ago."""

    def __init__(self, places: int):
        self.drafted = [0.0] * places
        self.accepted = [0.0] * places
        self.cycles = 0  # seen, since the last expectation

    def note(self, n_drafts: int, accepted: int) -> None:
        """A cycle of `n_drafts` drafts, of which the first `accepted` were kept."""
        self.cycles += n_drafts > 0
        for place in range(n_drafts):
            self.drafted[place] = _MEMORY * self.drafted[place] + 1
            self.accepted[place] = _MEMORY * self.accepted[place] + (place < accepted)

    def expect(self, other: Acceptance) -> None:
        """Start over from what another one has seen, but be quick to learn better."""
        weights = [_PRIOR / max(_PRIOR, drafted) for drafted in other.drafted]
        pairs = zip(weights, other.drafted, other.accepted, strict=True)
        counts = [(weight * drafted, weight * accepted) for weight, drafted, accepted in pairs]
        self.drafted, self.accepted = map(list, zip(*counts, strict=True))
        self.cycles = 0

    def tokens(self, k: int) -> float:
        """Expected of a cycle of `k` drafts."""
        return 1 + sum(self._shares(k))

    def relative_error(self, k: int) -> float:
        """Standard error of `tokens(k)`, over it; infinite if nothing is known."""
        if k == 0:
            return 0.0
        shares = self._shares(k)
        mean = sum(shares)
        # Of a count N that is at least i with probability a_i: E[N^2] is the sum of (2i - 1) a_i.
        variance = sum((2 * i + 1) * share for i, share in enumerate(shares)) - mean**2
        cycles = self.drafted[k - 1]
        return math.sqrt(max(variance, 0.0) / cycles) / (1 + mean) if cycles else math.inf

    def _shares(self, k: int) -> list[float]:
        """Nothing is expected of places that no cycle has reached."""
        counts = zip(self.accepted[:k], self.drafted[:k], strict=True)
        return [accepted / drafted if drafted else 0.0 for accepted, drafted in counts]
