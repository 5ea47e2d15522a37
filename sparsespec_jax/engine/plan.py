"""What one step does, as the host decides it: a bucket (its static shape) and one int32 array.

Twelve small arrays cost 490 us to upload, one packed array 10 to 19 us. Every section has a fixed
place; unused entries name the trash row, so that the step needs no masks for them.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import NamedTuple

import jax
import numpy as np

from sparsespec_jax.sampling.rows import NEUTRAL_ROW, ROW_WORDS

ADMISSION_WORDS = 3 + ROW_WORDS  # row, length, max_length, sampling parameters
COMMIT_WORDS = 3  # row, new tokens, the last of them
NON_FINITE = 3  # finish code, beside those of sampling/verification.py: the logits are no numbers
UPDATES_PER_CHUNK = 512  # page-table entries that a prefill row brings at least


class Bucket(NamedTuple):
    """The static shape of a step: one is compiled for each."""

    drafts: int
    verifies: int
    chunks: int
    context: int
    filters: bool = False
    penalties: bool = False
    logprobs: int = -1  # top alternatives reported; -1: no logprobs at all
    k: int | None = None  # drafts that a verify row has room for; None: as many as there ever are

    def __str__(self) -> str:
        flags = [f"logprobs={self.logprobs}"] if self.logprobs >= 0 else []
        flags += [] if self.k is None else [f"k={self.k}"]
        flags += [name for name in ("filters", "penalties") if getattr(self, name)]
        shape = f"{self.drafts} draft + {self.verifies} verify + {self.chunks} prefill rows"
        return ", ".join([f"{shape}, context {self.context}", *flags])


class Plan(NamedTuple):
    """The sections of a packed plan; numpy views on the host, slices of the argument on the device.

    updates: [U, 4] row, position, slot, token (-1: leave): page-table entries and known tokens.
    admissions: [A, ADMISSION_WORDS] rows that start over with a new request.
    drafts: [D, 2] row, index of the draft in its cycle.
    verifies: [V, 2] row, drafts to verify.
    chunks: [C, 4] row, first position, tokens, 1 if the prompt ends here.
    commits: [M, COMMIT_WORDS] rows that the host has verified, new tokens, the last of them; the
      others are the row's drafts, which its history holds already.
    sparsity: [1, 1] which of the candidate sparsities the selections made in this step have.
    """

    updates: np.ndarray | jax.Array
    admissions: np.ndarray | jax.Array
    drafts: np.ndarray | jax.Array
    verifies: np.ndarray | jax.Array
    chunks: np.ndarray | jax.Array
    commits: np.ndarray | jax.Array
    sparsity: np.ndarray | jax.Array


@dataclasses.dataclass(frozen=True)
class PlanLayout:
    """Where the sections of a bucket's plan lie in its packed array.

    commits: entries of that section; 0 where the device verifies, as it does by default.
    """

    bucket: Bucket
    n_queries: int
    chunk: int
    trash_row: int
    commits: int = 0

    @property
    def delayed(self) -> bool:
        """Whether the host verifies, and the step only reports what it needs for that."""
        return self.commits > 0

    @property
    def max_updates(self) -> int:
        decoding = self.bucket.drafts + self.bucket.verifies
        return decoding * self.n_queries + self.bucket.chunks * max(self.chunk, UPDATES_PER_CHUNK)

    @property
    def shapes(self) -> Plan:
        bucket = self.bucket
        return Plan(
            updates=(self.max_updates, 4),
            admissions=(bucket.chunks, ADMISSION_WORDS),
            drafts=(bucket.drafts, 2),
            verifies=(bucket.verifies, 2),
            chunks=(bucket.chunks, 4),
            commits=(self.commits, COMMIT_WORDS),
            sparsity=(1, 1),
        )

    @property
    def size(self) -> int:
        return sum(rows * words for rows, words in self.shapes)

    def empty(self) -> tuple[np.ndarray, Plan]:
        """A packed array in which every entry is padding, and its sections as views."""
        packed = np.zeros(self.size, np.int32)
        plan = self.unpack(packed)
        for section in plan:
            section[:, 0] = self.trash_row
        plan.sparsity[:] = 0
        plan.updates[:, 3] = -1
        plan.admissions[:, 3:] = NEUTRAL_ROW
        return packed, plan

    def unpack(self, packed: np.ndarray | jax.Array) -> Plan:
        sections, start = [], 0
        for rows, words in self.shapes:
            sections.append(packed[start : start + rows * words].reshape(rows, words))
            start += rows * words
        return Plan(*sections)


@dataclasses.dataclass(frozen=True)
class ResultLayout:
    """One step's result: a row of int32 words for each emitting row (verify rows, then prefills).

    Words: emitted tokens, accepted drafts, finish code, the tokens [n_queries]; with logprobs also
    the chosen tokens' logprobs [n_queries], then ids and logprobs of the top alternatives
    [n_queries, top] each; floats are bit-cast.

    drafts: draft tokens at the end of each row, for the host to verify. With delayed verification
    the first three words are: queries before the first whose logits are no numbers, drafts that
    rejection sampling accepts, 0 (`host_verification.verify`).
    """

    n_queries: int
    logprobs: int
    drafts: int = 0

    @property
    def words(self) -> int:
        per_token = 1 if self.logprobs < 0 else 2 + 2 * self.logprobs
        return 3 + self.n_queries * per_token + self.drafts

    def unpack(self, result: np.ndarray) -> StepResult:
        n, queries, top = result.shape[0], self.n_queries, max(self.logprobs, 0)
        sizes = [queries, queries, queries * top, queries * top, self.drafts]
        if self.logprobs < 0:
            sizes[1] = 0
        ends = np.cumsum([3, *sizes])
        tokens, chosen, ids, values, drafts = (
            result[:, start:end] for start, end in itertools.pairwise(ends)
        )
        return StepResult(
            emitted=result[:, 0],
            accepted=result[:, 1],
            finish=result[:, 2],
            tokens=tokens,
            logprobs=np.ascontiguousarray(chosen).view(np.float32),
            top_ids=ids.reshape(n, queries, top),
            top_logprobs=np.ascontiguousarray(values).view(np.float32).reshape(n, queries, top),
            drafts=drafts,
        )


class StepResult(NamedTuple):
    """`ResultLayout.unpack`'s view of a result, one entry per emitting row."""

    emitted: np.ndarray
    accepted: np.ndarray
    finish: np.ndarray
    tokens: np.ndarray
    logprobs: np.ndarray
    top_ids: np.ndarray
    top_logprobs: np.ndarray
    drafts: np.ndarray
