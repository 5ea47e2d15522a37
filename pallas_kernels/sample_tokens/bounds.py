"""Upper bounds of a part's noisy scores, which cost much less than the scores.

They are good to within a margin: a part whose bound is below the `least_bound` of an exact score
has no better token. Every token id is hashed, but tokens compare by their odds, exp(logit) / u, and
a part takes one logarithm.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental.pallas import triton as plt

from pallas_kernels.sample_tokens.noise import fold, unfolded_bits
from pallas_kernels.sample_tokens.row import Row
from pallas_kernels.sample_tokens.triton_parts import LOG2E, max_of

_MAX_NOISE = 34.0  # more than any, to base 2


def bound_of(
    row: Row, logits: list[Array], at: Array, high: Array, aligned: Array | bool = False
) -> Array:
    """An upper bound, to within `margin`, of a part's base 2 scores (greedy rows: logits).

    Args:
      logits: the part's, in blocks of one shape that follow each other.
      at: local ids of the first block.
      high: the largest of the logits.
      aligned: whether the first id is a multiple of the part's length, a power of two.
    """
    keys = [fold(key) for key in row.keys]

    def noisy(high, aligned):
        scale = LOG2E / row.divisor
        shift = jnp.where(high > -jnp.inf, high, 0) * scale
        first = fold(row.ids(at))
        odds = []
        for i, block in enumerate(logits):
            offset = i * block.size
            ids = first ^ np.uint32(offset) if aligned else fold(row.ids(at + offset))
            bits = unfolded_bits(ids, *keys)
            odds.append(odds_of(block, bits, scale, -shift, row.interpret))
        noise = jnp.log2(max_of(functools.reduce(jnp.maximum, odds))) + 32
        # Odds of huge scores leave float32's range; noise is less than their margin.
        return shift + jnp.where(jnp.abs(shift) < 2.0**29, noise, _MAX_NOISE)

    def either(high):
        fast, general = (functools.partial(noisy, aligned=value) for value in (True, False))
        return general(high) if len(logits) == 1 else lax.cond(aligned, fast, general, high)

    return lax.cond(row.greedy, lambda high: high, either, high)


def least_bound(row: Row, score: Array) -> Array:
    """A part with a lower bound has no token with a better (exact) score."""
    base_2 = score * LOG2E
    return jnp.where(row.greedy, score, base_2 - margin(base_2))


def odds_of(logits: Array, bits: Array, scale: Array, shift: Array, interpret: bool) -> Array:
    """2**(scale * logits + shift) * (1 / u - 1 / 2) / 2**32, for u = bits / 2**32.

    1 / -log1p(-u) is less than 1 / u - 1 / 2, and nearly that where u is small.

    The kernel is bound by its instructions, and the compiler fuses no multiplication with an
    addition: hence assembly.
    """
    if interpret:
        return jnp.exp2(logits * scale + shift) * (1 / bits.astype(jnp.float32) - 2.0**-33)
    [odds] = plt.elementwise_inline_asm(
        _ODDS,
        args=[jnp.broadcast_to(x, logits.shape) for x in (logits, bits, scale, shift)],
        constraints="=f,f,r,f,f",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(logits.shape, jnp.float32)],
    )
    return odds


_ODDS = """{
    .reg .f32 inverse, power;
    cvt.rn.f32.u32 inverse, $2;
    rcp.approx.ftz.f32 inverse, inverse;
    add.rn.ftz.f32 inverse, inverse, 0fAF000000;
    fma.rn.ftz.f32 power, $1, $3, $4;
    ex2.approx.ftz.f32 power, power;
    mul.rn.ftz.f32 $0, power, inverse;
}"""  # 0fAF000000 is -2**-33


def margin(best: Array) -> Array:
    """By how much a bound may be too low: 20 times what its errors add up to."""
    return 2.0**-9 + jnp.abs(best) * 2.0**-16
