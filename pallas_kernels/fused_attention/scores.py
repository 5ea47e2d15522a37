"""Softmax probabilities of the scored queries, for every layer of a step.

Two forms of one thing. `DenseScores` is what the XLA reference makes. `CodedScores` is what the
GPU kernel can write while it attends, in one pass over the keys: the weight of a key relative to
its query's reference is at hand, and the factor that makes it a probability is known only at the
end. So weights go out in a byte each, and a factor for each query apart.

A code is 5 bits of exponent and 3 of mantissa: weights from 2^-15 to 2^17, 6% off at most. A mean
over heads and queries is off by less, and all that scores do is to rank positions.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

# The exponent and 3 bits of mantissa of a float32 are its bits >> 20. A smallest weight is added
# to all, so that 0 is not special, and of what remains the low byte is enough.
SMALLEST = 2.0**-15
SHIFT = 20
FIRST = (127 - 15) << 3  # bits >> 20 of the smallest weight


class DenseScores(NamedTuple):
    """R scored rows, Q queries each, C positions."""

    probabilities: Array
    """[L, R, Hkv, Q, C] float32, mean over the query heads of a group; 0 where a query does not
    exist or does not see the position."""

    def n_queries(self, group: int) -> int:
        return self.probabilities.shape[3]


class CodedScores(NamedTuple):
    """R scored rows; P = Q * group packed queries, p = query * group + head; C positions and more.

    Packed query p gives position n the probability `decode(codes[.., p, n]) * factor[.., p]`.
    What is stored at positions past a row's last query was never written.
    """

    codes: Array
    """[L, R, Hkv, P, C or more] uint8; a multiple of 32 positions."""
    factor: Array
    """[L, R, Hkv, P] float32."""

    def n_queries(self, group: int) -> int:
        return self.factor.shape[3] // group


AttentionScores = DenseScores | CodedScores


def encode(weights: Array) -> Array:
    """Codes (uint8) of weights, float32 and not negative; larger ones are taken for 2^17."""
    steps = lax.bitcast_convert_type(weights + SMALLEST, jnp.int32) >> SHIFT
    return jnp.minimum(steps, FIRST + 255).astype(jnp.uint8)


def decode(codes: Array) -> Array:
    """The weights of codes, float32: the middle of what a code stands for."""
    steps = (codes.astype(jnp.int32) - FIRST) & 0xFF
    bits = ((steps + FIRST) << SHIFT) | (1 << (SHIFT - 1))
    weights = lax.bitcast_convert_type(bits, jnp.float32) - SMALLEST
    return jnp.where(steps == 0, 0.0, weights)


def dense(scores: CodedScores, end: Array, group: int) -> DenseScores:
    """The decoded probabilities; positions from `end` [R] on are 0."""
    *lead, n_packed, size = scores.codes.shape
    weights = decode(scores.codes) * scores.factor[..., None]
    live = jnp.arange(size) < end[:, None, None, None]
    weights = jnp.where(live, weights, 0).reshape(*lead, n_packed // group, group, size)
    return DenseScores(weights.mean(axis=-2))
