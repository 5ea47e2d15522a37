"""Biases and withheld ids, which kernels patch into a row of logits: few of its ids are in them."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from pallas_kernels.sample_tokens.args import SampleArgs


class Changes(NamedTuple):
    """Sparse changes of each row's logits (or references of them); ids are padded with -1."""

    bias_ids: Any  # int32 [S, N]
    bias_values: Any  # float32 [S, N]
    withheld_ids: Any  # int32 [S, W]; -inf is added to them
    withheld: Any  # int32 [S]; 0 if they are not withheld now

    @classmethod
    def of(cls, args: SampleArgs) -> "Changes":
        withheld = (args.position < args.min_length).astype(jnp.int32)
        fields = args.bias_ids, args.bias_values, args.withheld_ids
        return cls(*(field if field.shape[1] else _padding(field) for field in fields), withheld)

    @classmethod
    def none(cls, n_rows: int) -> "Changes":
        ids, values = jnp.full((n_rows, 1), -1, jnp.int32), jnp.zeros((n_rows, 1))
        return cls(ids, values, ids, jnp.zeros((n_rows,), jnp.int32))


def _padding(field: Array) -> Array:
    """A kernel argument must not be empty."""
    return jnp.full((field.shape[0], 1), -1, field.dtype)
