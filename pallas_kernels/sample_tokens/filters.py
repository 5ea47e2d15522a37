"""top_k, top_p and min_p as thresholds on the logits, found without sorting.

All three keep an upper set of the vocabulary: every token whose logit is at least some threshold.
Float32 logits map to unsigned integers in the same order, so the exact threshold is the result of
32 bisection steps, one bit each, of one masked sum over the vocabulary. Sorting and lax.top_k are
slow on GPUs and make dispatch synchronous.
"""

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

_SIGN = np.uint32(1 << 31)


def filter_logits(logits: Array, top_k: Array, top_p: Array, min_p: Array) -> Array:
    """-inf where top_k, then top_p, then min_p drop a token.

    - top_k keeps every token at least as likely as the k-th most likely one.
    - top_p keeps the fewest most likely tokens whose share of the mass left by top_k is >= top_p,
      as summed in float32, and every token equal to the least likely of them. The most likely
      token always stays.
    - min_p keeps the tokens whose probability is >= min_p times the largest one.

    Args:
      logits: float32 [S, V], already divided by temperature.
      top_k: int32 [S]; 0 is off.
      top_p: float32 [S]; 1 is off.
      min_p: float32 [S]; 0 is off.

    Returns:
      float32 [S, V].
    """
    keys = ordered_bits(logits)
    weights = relative_weights(logits, logits.max(-1, keepdims=True))
    at_least_k = top_k_threshold(keys, top_k)
    nucleus = top_p_threshold(keys, jnp.where(keys >= at_least_k[:, None], weights, 0), top_p)
    keep = keys >= jnp.maximum(at_least_k, nucleus)[:, None]
    return jnp.where(keep & (weights >= min_p[:, None]), logits, -jnp.inf)


def relative_weights(logits: Array, largest: Array) -> Array:
    """The probability of each token over that of the most likely one, whose own is exactly 1.

    A compiler may fuse the subtraction with the division that made the logits, and then their
    difference is not quite 0.
    """
    return jnp.where(logits >= largest, 1.0, jnp.exp(logits - largest))


def top_k_threshold(keys: Array, top_k: Array) -> Array:
    """The top_k-th largest of uint32 keys [S, V], or 0 where fewer are asked for or exist: [S]."""
    threshold = _largest_threshold(keys, lambda kept: kept.sum(-1, dtype=jnp.int32) >= top_k)
    return jnp.where(top_k > 0, threshold, 0)


def top_p_threshold(keys: Array, weights: Array, top_p: Array) -> Array:
    """The largest threshold that keeps top_p of the weights float32 [S, V]: uint32 [S].

    A masked sum in a fixed order never grows as the threshold rises, rounding included, so the
    bisection is exact for the sum as the device computes it.
    """
    wanted = top_p * weights.sum(-1)

    def enough(kept: Array) -> Array:
        mass = jnp.where(kept, weights, 0).sum(-1)
        return (mass >= wanted) & (mass > 0)

    return jnp.where(top_p < 1, _largest_threshold(keys, enough), 0)


def ordered_bits(x: Array) -> Array:
    """float32 -> uint32 such that a < b exactly when ordered_bits(a) < ordered_bits(b).

    NaN has no order; it maps above +inf or below -inf.
    """
    bits = lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x), jnp.uint32)  # -0 equals +0
    return jnp.where(bits >= _SIGN, ~bits, bits | _SIGN)


def float_of_bits(keys: Array) -> Array:
    """The inverse of `ordered_bits`."""
    bits = jnp.where(keys >= _SIGN, keys ^ _SIGN, ~keys)
    return lax.bitcast_convert_type(bits, jnp.float32)


def _largest_threshold(keys: Array, enough: Callable[[Array], Array]) -> Array:
    """The largest t [S] for which `enough(keys >= t)` holds; 0 if it never does.

    `enough` maps a mask [S, V] to [S] and must hold for every mask that includes one it holds for.
    """

    def set_bit(step: int, threshold: Array) -> Array:
        trial = threshold | (_SIGN >> step.astype(jnp.uint32))
        return jnp.where(enough(keys >= trial[:, None]), trial, threshold)

    return lax.fori_loop(0, 32, set_bit, jnp.zeros(keys.shape[:1], jnp.uint32))
