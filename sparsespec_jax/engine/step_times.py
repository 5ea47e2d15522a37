"""How long steps take, as far as it is known from those that ran."""

from __future__ import annotations

import dataclasses
import statistics
from collections import deque
from collections.abc import Hashable

_HICCUP = 4  # times the median: what a step counts for at most
_DOUBT = 0.3  # of a step's reads: before they have changed by that, little is known of their cost


@dataclasses.dataclass
class StepTimes:
    """Of the last steps of a kind that ran undisturbed: seconds, and positions read.

    measured_at: which step was the last of them. trial: steps that the last of `trials` took.
    """

    seconds: deque[float]
    reads: deque[float]
    measured_at: int = -1
    trial: int = 0
    trials: int = 0

    @classmethod
    def of(cls, most: int, other: StepTimes | None = None) -> StepTimes:
        """Room for `most`, and for a start what another choice of the kind is known to take."""
        other = other or cls(deque(), deque())
        seconds, reads = deque(other.seconds, most), deque(other.reads, most)
        return dataclasses.replace(other, seconds=seconds, reads=reads)

    def note(self, seconds: float, reads: float, at: int) -> None:
        self.seconds.append(seconds)
        self.reads.append(reads)
        self.measured_at = at

    def tried(self, steps: int) -> None:
        self.trial, self.trials = steps, self.trials + 1

    def clear(self) -> None:
        self.seconds.clear()
        self.reads.clear()

    def mean(self, reads: float, cost: ReadingCost) -> float:
        """Seconds of a step that reads so many positions."""
        limit = _HICCUP * statistics.median(self.seconds)
        mean = statistics.fmean(min(seconds, limit) for seconds in self.seconds)
        before = statistics.fmean(self.reads)
        if before > 0:  # reading took no longer than all of the step
            mean += min(cost.a_position(before, mean), mean / before) * (reads - before)
        return mean


class ReadingCost:
    """Seconds that a step takes longer for each position it reads.

    The slope within steps of a kind, of all kinds together; as long as contexts have hardly
    changed, what reading takes where all bytes take as long, those of the weights, too.
    """

    def __init__(self, weights: float):
        """`weights`: positions whose KV takes as many bytes."""
        self._weights = weights
        self._means: dict[Hashable, tuple[int, float, float]] = {}
        self._products = self._squares = 0.0

    def note(self, kind: Hashable, reads: float, seconds: float) -> None:
        count, mean_reads, mean_seconds = self._means.get(kind, (0, reads, seconds))
        seconds = min(seconds, _HICCUP * mean_seconds)
        count += 1
        off = reads - mean_reads
        mean_reads += off / count
        mean_seconds += (seconds - mean_seconds) / count
        self._means[kind] = count, mean_reads, mean_seconds
        self._products += off * (seconds - mean_seconds)
        self._squares += off * (reads - mean_reads)

    def a_position(self, reads: float, seconds: float) -> float:
        """Where a step reads about so many in so long."""
        doubt = (_DOUBT * reads) ** 2
        by_bytes = seconds / (self._weights + reads)
        return max(0.0, (self._products + doubt * by_bytes) / (self._squares + doubt))
