"""A program's row: its logits in memory stay as they are, what is changed is changed in registers.

Changes cost a block of contiguous ids nothing if none of them is in it. Scores are exact: they are
computed by the operations of the reference.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.sample_tokens.changes import Changes
from pallas_kernels.sample_tokens.noise import gumbel, token_bits


@dataclasses.dataclass(frozen=True)
class Row:
    """What a program knows of its row; scalars, and references to the lists of changes."""

    index: Array
    temperature: Array
    keys: tuple[Array, Array]
    vocab_start: Array
    changes: Changes
    logits_ref: Any
    vocab: int
    interpret: bool

    @classmethod
    def of(cls, index: Array, refs: Sequence[Any], changes: Changes, logits_ref: Any, **options):
        """Loads its scalars; `refs`: of all rows' temperatures, keys and first ids."""
        temperature, key0, key1, start = refs
        scalars = temperature[index], (key0[index], key1[index]), start[0]
        return cls(index, *scalars, changes, logits_ref, **options)

    @property
    def greedy(self) -> Array:
        return self.temperature <= 0

    @property
    def divisor(self) -> Array:
        return jnp.where(self.greedy, jnp.float32(1), self.temperature)

    def load(self, at: Array, mask: Array | None = None) -> Array:
        """The untouched logits of local ids; -inf beyond the vocabulary."""
        exists = at < self.vocab if mask is None else mask & (at < self.vocab)
        return plt.load(self.logits_ref.at[self.index, at], mask=exists, other=-jnp.inf)

    def load_part(self, at: Array, size: int) -> Array:
        """The untouched logits of ids of parts; see `first_id`."""
        if self.vocab < size:
            return self.load(at)
        return plt.load(self.logits_ref.at[self.index, at])

    def patch(self, logits: Array, at: Array, bounds: tuple[Array, Array] | None = None) -> Array:
        """Adds the sparse changes; with the bounds of contiguous ids, at no cost if none is in."""
        bias_ids, bias_values, withheld_ids, withheld = self.changes

        def last(ids_ref):
            """One more than the index of the last id that is in."""
            n = ids_ref.shape[1]
            lane = jnp.arange(pl.next_power_of_2(n))
            ids = plt.load(ids_ref.at[self.index, lane], mask=lane < n, other=-1)
            inside = ids >= 0
            if bounds is not None:
                local = ids - self.vocab_start
                inside &= (local >= bounds[0]) & (local < bounds[1])
            return jnp.where(inside, lane + 1, 0).max()

        def add(j, logits):
            here = at + self.vocab_start == bias_ids[self.index, j]
            return jnp.where(here, logits + bias_values[self.index, j], logits)

        def withhold(j, logits):
            here = at + self.vocab_start == withheld_ids[self.index, j]
            return jnp.where(here, logits - jnp.inf, logits)

        logits = lax.fori_loop(0, last(bias_ids), add, logits)
        count = jnp.where(withheld[self.index] != 0, last(withheld_ids), 0)
        return lax.fori_loop(0, count, withhold, logits)

    def ids(self, at: Array) -> Array:
        return (at + self.vocab_start).astype(jnp.uint32)

    def tempered(self, logits: Array) -> Array:
        return logits / self.divisor

    def exact_scores(self, tempered: Array, at: Array) -> Array:
        noise = gumbel(token_bits(self.ids(at), *self.keys))
        return tempered + jnp.where(self.greedy, jnp.float32(0), noise)
