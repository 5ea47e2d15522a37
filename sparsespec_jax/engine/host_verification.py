"""Delayed verification: the host decides what a step's rows emit while the next step runs.

`overlap="delayed"`, as in SparseSpec (2026). The rows sit that step out: what was accepted travels
to the device in the plan of the step after it (`Plan.commits`), where their next cycle starts. The
definitions are those of `sampling/verification.py`, in numpy; the device draws all random numbers.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from concurrent.futures import Future
from queue import SimpleQueue

import jax
import numpy as np

from sparsespec_jax.config import Verification
from sparsespec_jax.engine.buckets import Buckets
from sparsespec_jax.engine.plan import NON_FINITE, StepResult
from sparsespec_jax.engine.planned import Emitting, PlannedStep
from sparsespec_jax.sampling.rows import FIELD_WORDS, ROW_WORDS
from sparsespec_jax.sampling.verification import LENGTH, RUNNING, STOPPED


@dataclasses.dataclass(frozen=True)
class Verdict:
    """A step's result as if the device had verified, and the seconds of work that took."""

    result: StepResult
    seconds: float


class HostVerifier:
    """One thread that verifies steps, in the order in which they are submitted."""

    def __init__(self, buckets: Buckets, verification: Verification):
        self._buckets = buckets
        self._coupled = verification == "coupled"
        self._jobs: SimpleQueue[tuple[PlannedStep, jax.Array, Future] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, planned: PlannedStep, result: jax.Array) -> Future[Verdict]:
        """Verify a dispatched step once its result is there."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="verifier", daemon=True)
            self._thread.start()
        future = Future()
        self._jobs.put((planned, result, future))
        return future

    def close(self) -> None:
        """Finish what was submitted and join the thread. Idempotent."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            planned, result, future = job
            try:
                future.set_result(self._verdict(planned, np.asarray(result)))
            except Exception as error:
                future.set_exception(error)
            del job, planned, result, future  # nothing is held while there is nothing to do

    def _verdict(self, planned: PlannedStep, values: np.ndarray) -> Verdict:
        start = time.perf_counter()
        result = self._buckets.result_layout(planned.bucket).unpack(values)
        result = verify_rows(result, planned.emitting, coupled=self._coupled)
        return Verdict(result, time.perf_counter() - start)


def verify_rows(result: StepResult, emitting: list[Emitting], *, coupled: bool) -> StepResult:
    """`result` with the head words of the entries that belong to somebody filled in.

    A row that is verified has no other result unread, so the host knows its length.
    """
    entry = np.array([e.entry for e in emitting], int)
    sampling = np.array([e.row.request.sampling for e in emitting]).reshape(-1, ROW_WORDS)
    emitted, accepted, finish = verify(
        result.tokens[entry],
        drafts=result.drafts[entry],
        n_drafts=np.array([e.n_drafts or 0 for e in emitting], int),
        accepted=None if coupled else result.accepted[entry],
        finite=result.emitted[entry],
        stop_ids=sampling[:, FIELD_WORDS["stop_ids"]],
        length=np.array([e.row.kv.length for e in emitting], int),
        max_length=np.array([e.row.request.max_length for e in emitting], int),
        min_length=sampling[:, FIELD_WORDS["min_length"]].reshape(-1),
    )
    heads = np.zeros((3, len(result.tokens)), np.int32)
    heads[:, entry] = emitted, accepted, finish
    return result._replace(emitted=heads[0], accepted=heads[1], finish=heads[2])


def verify(
    tokens: np.ndarray,
    *,
    drafts: np.ndarray,
    n_drafts: np.ndarray,
    accepted: np.ndarray | None,
    finite: np.ndarray,
    stop_ids: np.ndarray,
    length: np.ndarray,
    max_length: np.ndarray,
    min_length: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What each of R rows emits: how many tokens, how many of them drafts, and its finish code.

    Args:
      tokens: int [R, Q]; the target's own at each draft position and after the last one (coupled
        verification), or what rejection sampling emits.
      drafts: int [R, Q - 1]; drafts[:, n_drafts:] are ignored.
      accepted: int [R] drafts that rejection sampling accepts: it needs the distributions, so the
        device does it, and the host only truncates; None with coupled verification.
      finite: int [R]; queries before the first one whose logits are no numbers.
      stop_ids, length, max_length, min_length: as in `sampling.verification.truncate`.
    """
    if accepted is None:
        accepted = accept_coupled(drafts, n_drafts, tokens)
    emitted, finish = truncate(tokens, accepted + 1, stop_ids, length, max_length, min_length)
    # What plain decoding would emit before it fails; queries of rejected drafts do not count.
    finish = np.where(finite < emitted, NON_FINITE, finish)
    emitted = np.minimum(emitted, finite)
    return emitted, np.minimum(accepted, emitted), finish


def accept_coupled(drafts: np.ndarray, n_drafts: np.ndarray, sampled: np.ndarray) -> np.ndarray:
    """Accepted drafts [R], as `sampling.verification.accept_coupled` has them."""
    kept = (drafts == sampled[:, :-1]) & (np.arange(drafts.shape[1]) < n_drafts[:, None])
    return np.logical_and.accumulate(kept, axis=1).sum(axis=1)


def truncate(
    tokens: np.ndarray,
    emitted: np.ndarray,
    stop_ids: np.ndarray,
    length: np.ndarray,
    max_length: np.ndarray,
    min_length: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Emitted tokens, now cut, and finish code [R], as `sampling.verification.truncate` has it."""
    index = np.arange(tokens.shape[1])
    emitted = np.clip(emitted, 0, np.maximum(max_length - length, 0))
    is_stop = ((tokens[..., None] == stop_ids[:, None]) & (stop_ids >= 0)[:, None]).any(axis=-1)
    is_stop &= (index < emitted[:, None]) & (length[:, None] + index >= min_length[:, None])
    stopped = is_stop.any(axis=1)
    emitted = np.where(stopped, is_stop.argmax(axis=1) + 1, emitted)
    full = length + emitted >= max_length
    return emitted, np.where(stopped, STOPPED, np.where(full, LENGTH, RUNNING))
