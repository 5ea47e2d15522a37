"""A request as the engine sees it: tokens in, events out."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

import numpy as np

from sparsespec_jax.engine.events import TokenEvent
from sparsespec_jax.kv.prefix import PrefixCache
from sparsespec_jax.sampling.params import SamplingParams


@dataclasses.dataclass
class RequestStats:
    """What one request cost. Times are `time.monotonic()` seconds.

    cycles: verifications. `full_cycles` of them verified k drafts and did not end the request, and
    accepted `full_accepted` together, so mean accepted of k is their ratio. An accepted draft is an
    emitted one: neither the verification's own token nor anything behind a stop counts.
    accepted_at: how many times the draft at each place of a cycle was accepted; `drafted_at` how
    many times there was one, not behind a stop.
    """

    submitted: float = dataclasses.field(default_factory=time.monotonic)
    admitted: float | None = None
    first_token: float | None = None
    finished: float | None = None
    prompt_tokens: int = 0
    shared_tokens: int = 0
    output_tokens: int = 0
    cycles: int = 0
    full_cycles: int = 0
    full_accepted: int = 0
    drafted_at: np.ndarray | None = None
    accepted_at: np.ndarray | None = None

    def count_cycle(
        self, k: int, n_drafts: int, accepted: int, emitted: int, *, last: bool = False
    ) -> None:
        if self.drafted_at is None:
            self.drafted_at, self.accepted_at = np.zeros((2, k), np.int64)
        self.cycles += 1
        if n_drafts == 0:  # every step of plain decoding
            return
        self.drafted_at[: min(n_drafts, emitted) if last else n_drafts] += 1
        self.accepted_at[:accepted] += 1
        if n_drafts == k and not last:
            self.full_cycles += 1
            self.full_accepted += accepted

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from submission; None before there is one."""
        return None if self.first_token is None else self.first_token - self.submitted

    @property
    def time_per_output_token(self) -> float | None:
        """Seconds a token after the first; None before the end, or if there was but one."""
        if self.finished is None or self.output_tokens < 2:
            return None
        return (self.finished - self.first_token) / (self.output_tokens - 1)

    @property
    def mean_accepted(self) -> float | None:
        """Accepted drafts of a full cycle; None before there was one, or without drafts."""
        if not self.full_cycles or not len(self.accepted_at):
            return None
        return self.full_accepted / self.full_cycles


@dataclasses.dataclass(eq=False)
class Request:
    """One completion to generate.

    prompt: int32 [n]. max_length: tokens at most, the prompt's included. expected_length: what is
    reserved for it where admission looks ahead; None: `max_length`. turn: its place in line, by
    arrival and priority. number: which of the engine's requests it is.
    sampling: int32 [ROW_WORDS], `params` and the seed as the device wants them.
    """

    request_id: int
    prompt: np.ndarray
    params: SamplingParams
    sampling: np.ndarray
    max_length: int
    sink: Callable[[TokenEvent], None]
    expected_length: int | None = None
    turn: int = 0
    number: int = 0
    stats: RequestStats = dataclasses.field(default_factory=RequestStats)

    def __post_init__(self):
        self.expected_length = self.expected_length or self.max_length
        self.prefix_key = PrefixCache.key(self.prompt)
        self.stats.prompt_tokens = len(self.prompt)
