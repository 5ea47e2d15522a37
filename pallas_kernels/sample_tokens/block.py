"""Some tokens of a row, and what thresholds ask of them: how many or how much is above a key.

Every question is a fold over blocks, so it is the same for a list and for a row in memory.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from pallas_kernels.sample_tokens.filters import ordered_bits
from pallas_kernels.sample_tokens.row import Row
from pallas_kernels.sample_tokens.triton_parts import sum_of


class Block(NamedTuple):
    """Some tokens of a row: local ids, tempered logits, and for the thresholds their keys."""

    at: Array
    tempered: Array
    keys: Array
    """`ordered_bits` of the tempered logits; 0 in lanes without a token."""
    weights: Array
    """Probability over that of the most likely token; 0 in lanes without a token."""

    @classmethod
    def of(cls, row: Row, at: Array, exists: Array, high: Array) -> "Block":
        """Of some ids; `high` is the largest logit of the row."""
        logits = row.patch(row.load(at, exists), at)
        tempered = row.tempered(logits)
        exists &= at < row.vocab
        keys = jnp.where(exists, ordered_bits(tempered), np.uint32(0))
        weights = jnp.exp(tempered - row.tempered(high))
        weights = jnp.where(logits >= high, 1.0, weights)  # whatever the compiler fuses
        return cls(at, tempered, keys, jnp.where(exists, weights, 0))


Fold = Callable[[Callable[[Block, Any], Any], Any], Any]
"""Folds a function (block, carry) -> carry over some tokens."""


def mass_of(fold: Fold, start: Array) -> Array:
    """The weight of the tokens whose key is at least `start`."""

    def add(block, mass):
        return mass + sum_of(jnp.where(block.keys >= start, block.weights, 0))

    return fold(add, jnp.float32(0))


def enough(mass: Array, wanted: Array) -> Array:
    return (mass >= wanted) & (mass > 0)


def top_k_threshold(fold: Fold, top_k: Array) -> Array:
    """The top_k-th largest key; 0 where fewer are asked for or exist. Two bits a step."""

    def set_bits(i, threshold):
        shift = (30 - 2 * i).astype(jnp.uint32)
        trials = [threshold | (np.uint32(digit) << shift) for digit in (1, 2, 3)]

        def count(block, sums):
            return [
                n + sum_of((block.keys >= trial).astype(jnp.int32))
                for n, trial in zip(sums, trials, strict=True)
            ]

        counts = fold(count, [jnp.int32(0)] * 3)
        digit = sum((n >= top_k).astype(jnp.uint32) for n in counts)
        return threshold | (digit << shift)

    steps = 16 * (top_k > 0).astype(jnp.int32)
    return lax.fori_loop(0, steps, set_bits, jnp.uint32(0))
