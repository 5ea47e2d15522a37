"""A step that the scheduler has planned, and whom its result concerns."""

from __future__ import annotations

import dataclasses

import numpy as np

from sparsespec_jax.engine.adaptive import Choice
from sparsespec_jax.engine.plan import Bucket
from sparsespec_jax.engine.request import Request
from sparsespec_jax.engine.row import Row
from sparsespec_jax.kv.space import Move


@dataclasses.dataclass(frozen=True)
class Emitting:
    """An entry of a step's result that belongs to somebody: row, and drafts it verified or None.

    sparsity: which one those drafts had. apart: whether they were fewer than others made.
    """

    row: Row
    entry: int
    most_tokens: int
    n_drafts: int | None
    sparsity: int = 0
    apart: bool = False


@dataclasses.dataclass(frozen=True)
class PlannedStep:
    """A step to dispatch, and whom its result concerns.

    moves: what must happen to the KV before it, in order.
    batch, choice: decoding rows that its bucket is made for, and what the cycles that start draft.
    rows, positions: that decode, with a place in it or waiting, and how long they are together, at
      most.
    tokens: the step's tokens that are not padding.
    stalled: rows that had to sit out, for want of slots.
    """

    bucket: Bucket
    packed: np.ndarray
    moves: list[Move]
    emitting: list[Emitting]
    admitted: list[Request]
    batch: int
    choice: Choice
    rows: int
    positions: int
    tokens: int
    stalled: int
