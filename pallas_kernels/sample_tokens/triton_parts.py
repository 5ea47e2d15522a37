"""What the sampler's kernels are made of: reductions, loads of rows, launches."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

LOG2E = math.log2(math.e)
NO_ID = np.int32(2**31 - 1)


def max_of(x: Array) -> Array:
    """Over all axes, the last one first."""
    while x.ndim:
        x = x.max(-1)
    return x


def min_of(x: Array) -> Array:
    while x.ndim:
        x = x.min(-1)
    return x


def sum_of(x: Array) -> Array:
    while x.ndim:
        x = x.sum(-1)
    return x


def better(one: tuple[Array, Array], other: tuple[Array, Array]) -> tuple[Array, Array]:
    """The higher score with its id; the lower id of equal ones."""
    wins = (one[0] > other[0]) | ((one[0] == other[0]) & (one[1] < other[1]))
    return jnp.where(wins, one[0], other[0]), jnp.where(wins, one[1], other[1])


def high_and_norm(logits: Array, divisor: Array) -> tuple[Array, Array]:
    """The largest logit, and the sum of exp((logits - largest) / divisor); 0 if all are -inf."""
    high = max_of(logits)
    base = jnp.where(high > -jnp.inf, high, 0)
    return high, sum_of(jnp.exp2((logits - base) * (LOG2E / divisor)))


def first_id(part: Array, size: int, vocab: int) -> Array:
    """Of a part; the last one overlaps its predecessor, so that no id is beyond the vocabulary."""
    return jnp.minimum(part * size, max(vocab - size, 0))


def load_row(ref: Any, row: Array, other: float = -jnp.inf) -> Array:
    """A whole row of [S, N], filled up to a power of two."""
    n = ref.shape[1]
    lane = jnp.arange(pl.next_power_of_2(n))
    return plt.load(ref.at[row, lane], mask=lane < n, other=other)


def launch(kernel, out_shapes, inputs, *, grid, name, warps, interpret):
    return pl.pallas_call(
        kernel,
        out_shape=[jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in out_shapes],
        grid=grid,
        name=name,
        compiler_params=plt.CompilerParams(num_warps=warps, num_stages=1),
        interpret=interpret,
    )(*inputs)
