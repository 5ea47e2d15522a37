"""What a run amounted to, as a small table."""

from __future__ import annotations

import dataclasses
import statistics
import time
from typing import TYPE_CHECKING

import numpy as np

from sparsespec_jax.cli import terminal
from sparsespec_jax.cli.errors import FAILED, INTERRUPTED, OK

if TYPE_CHECKING:
    from sparsespec_jax.engine.stats import EngineStats
    from sparsespec_jax.outputs import Completion


@dataclasses.dataclass
class Summary:
    """Adds up completions as they finish. The clock starts when it is made."""

    requests: int
    start: float = dataclasses.field(default_factory=time.monotonic)
    done: int = 0
    failed: int = 0
    output_tokens: int = 0
    cycles: int = 0
    full_cycles: int = 0
    full_accepted: int = 0
    first_error: str | None = None

    def __post_init__(self):
        self._prompt_tokens: dict[object, int] = {}
        self._first_tokens: list[float] = []
        self._each_token: list[float] = []
        self._drafted = self._accepted = np.zeros(0, np.int64)

    def add(self, job_id: object, completion: Completion) -> None:
        if completion.finish_reason == "error":
            self.failed += 1
            self.first_error = self.first_error or f"{job_id}: {completion.error}"
        else:
            self.done += 1
        self.output_tokens += len(completion.token_ids)
        stats = completion.stats
        if stats is None:
            return
        self._prompt_tokens[job_id] = stats.prompt_tokens
        for times, seconds in (
            (self._first_tokens, stats.time_to_first_token),
            (self._each_token, stats.time_per_output_token),
        ):
            if seconds is not None:
                times.append(seconds)
        self.cycles += stats.cycles
        self.full_cycles += stats.full_cycles
        self.full_accepted += stats.full_accepted
        if stats.drafted_at is not None:
            self._drafted = _sum(self._drafted, stats.drafted_at)
            self._accepted = _sum(self._accepted, stats.accepted_at)

    def table(self, engine: EngineStats) -> str:
        """Rows of name and value; what does not apply is left out."""
        seconds = time.monotonic() - self.start
        requests = f"{self.done} of {self.requests}"
        if self.failed:
            requests += f", {self.failed} failed"
        time_taken = f"{seconds:.1f} s"
        if engine.dispatch.compiled:
            steps = "step" if engine.dispatch.compiled == 1 else "steps"
            time_taken += (
                f", {engine.dispatch.compile_seconds:.1f} of them compiling "
                f"{engine.dispatch.compiled} {steps}"
            )
        rows = {
            "requests": requests,
            "prompt tokens": f"{sum(self._prompt_tokens.values()):,}",
            "output tokens": f"{self.output_tokens:,}",
            "time": time_taken,
            "throughput": f"{self.output_tokens / max(seconds, 1e-9):,.1f} tok/s",
        }
        if self._first_tokens:
            median, longest = statistics.median(self._first_tokens), max(self._first_tokens)
            rows["first token"] = f"{median:.2f} s median, {longest:.2f} s longest"
        if self._each_token:
            median, late = 1e3 * np.percentile(self._each_token, [50, 99])
            rows["a token"] = f"{median:.1f} ms median, {late:.1f} ms for 1 request in 100"
        if engine.kv.parked:
            rows["KV moved"] = (
                f"{engine.kv.evicted:,} tokens to host memory, {engine.kv.dropped:,} computed again"
            )
        if self._drafted.any():
            k = len(self._drafted)
            rates = 100 * self._accepted / np.maximum(self._drafted, 1)
            rows["cycles"] = f"{self.cycles:,}"
            if self.full_cycles:
                accepted = self.full_accepted / self.full_cycles
                rows["accepted"] = f"{accepted:.2f} of {k} drafts a cycle"
            rows["by position"] = " ".join(f"{rate:.0f}%" for rate in rates)
        width = max(map(len, rows))
        return "\n".join(f"  {name:{width}}  {value}" for name, value in rows.items())

    def exit_code(self, completed: bool) -> int:
        """What the run amounts to, said on standard error unless all is well."""
        if not completed:
            terminal.note(f"interrupted: {self.done} of {self.requests} requests are complete")
            return INTERRUPTED
        if self.failed:
            failed = f"{self.failed} of {self.requests} requests failed"
            terminal.note(f"error: {failed}; the first, {self.first_error}")
            return FAILED
        return OK


def _sum(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    total = np.zeros(max(len(left), len(right)), np.int64)
    total[: len(left)] += left
    total[: len(right)] += right
    return total
