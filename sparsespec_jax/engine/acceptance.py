"""How often drafts are accepted, by their place in the cycle."""

from __future__ import annotations

import math
from collections.abc import Sequence

_MEMORY = 0.999


class Acceptance:
    """Of cycles of up to `places` drafts, the recent ones more than those long ago.

    memory: weight of a cycle among those before, per cycle.
    """

    def __init__(self, places: int, memory: float = _MEMORY):
        self._memory = memory
        self.drafted = [0.0] * places
        self.accepted = [0.0] * places
        self.cycles = 0  # seen, since the last expectation

    def note(self, kept: Sequence[float], weight: float = 1.0) -> None:
        """A cycle: whether each draft was kept, or how likely; `weight`: what it counts for."""
        decay = self._memory**weight
        self.cycles += len(kept) > 0
        for place, share in enumerate(kept):
            self.drafted[place] = decay * self.drafted[place] + weight
            self.accepted[place] = decay * self.accepted[place] + weight * share

    def expect(self, other: Acceptance, cycles: int) -> None:
        """Start over from what another one has seen, but as if that were few `cycles`."""
        weights = [cycles / max(cycles, drafted) for drafted in other.drafted]
        pairs = zip(weights, other.drafted, other.accepted, strict=True)
        counts = [(weight * drafted, weight * accepted) for weight, drafted, accepted in pairs]
        self.drafted, self.accepted = map(list, zip(*counts, strict=True))
        self.cycles = 0

    def tokens(self, k: int) -> float:
        """Expected of a cycle of `k` drafts."""
        return 1 + sum(self.shares(k))

    def relative_error(self, k: int) -> float:
        """Standard error of `tokens(k)`, over it; infinite if nothing is known."""
        if k == 0:
            return 0.0
        shares = self.shares(k)
        mean = sum(shares)
        # Of a count N that is at least i with probability a_i: E[N^2] is the sum of (2i - 1) a_i.
        variance = sum((2 * i + 1) * share for i, share in enumerate(shares)) - mean**2
        cycles = self.drafted[k - 1]
        return math.sqrt(max(variance, 0.0) / cycles) / (1 + mean) if cycles else math.inf

    def shares(self, k: int) -> list[float]:
        """Of the first `k` places. Nothing is expected of those that no cycle has reached."""
        counts = zip(self.accepted[:k], self.drafted[:k], strict=True)
        return [accepted / drafted if drafted else 0.0 for accepted, drafted in counts]
