"""Blocks of whole rows in Triton, whose arrays are powers of two: padded loads and stores."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt


def lanes(n: int) -> int:
    """Triton arrays are powers of two, and at least 16 on each side of a product."""
    return max(16, pl.next_power_of_2(n))


class Columns(NamedTuple):
    """A padded last axis: lane ids [1, lanes] and the mask of those that exist (None if all do)."""

    at: Array
    live: Array | None

    @classmethod
    def of(cls, size: int) -> "Columns":
        n = lanes(size)
        at = lax.broadcasted_iota(jnp.int32, (1, n), 1)
        return cls(at, None if n == size else at < size)

    def mask(self, rows: Array | None) -> Array | None:
        """Mask of a [rows, lanes] array, from the mask of its rows (None if all are live)."""
        if rows is None:
            return self.live
        return rows[:, None] if self.live is None else rows[:, None] & self.live


def load(ref: Any, *index: Any, mask: Array | None) -> Array:
    """Loads a [rows, lanes] array; masked entries are 0."""
    if mask is None:
        return plt.load(ref.at[index])
    shape = jnp.broadcast_shapes(*(jnp.shape(i) for i in index))
    return plt.load(ref.at[index], mask=jnp.broadcast_to(mask, shape), other=0)


def store(ref: Any, *index: Any, value: Array, mask: Array | None) -> None:
    value = value.astype(ref.dtype)
    into = ref.at[index]
    plt.store(into, value, mask=None if mask is None else jnp.broadcast_to(mask, value.shape))
