"""Lists the groups with the largest maxima, for the rows that have filters.

They hold the row's largest logits, all of them down to a bound that is kept with the list.
"""

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.sample_tokens.filters import ordered_bits

_TOP_BIT = np.uint32(1 << 31)


def collect_kernel(
    position_ref,
    filtered_ref,
    group_ref,
    list_ref,
    count_ref,
    bound_ref,
    *,
    n_groups: int,
    listed: int,
):
    """Lists the groups whose maximum is above a bound: at most `listed`, if possible half as many.

    A bound of 0 means that every group is in the list.
    """
    r = pl.program_id(0)

    @pl.when((position_ref[r] >= 0) & (filtered_ref[r] != 0))
    def _():
        lane = jnp.arange(pl.next_power_of_2(n_groups))
        exists = lane < n_groups
        maxima = plt.load(group_ref.at[r, lane], mask=exists, other=-jnp.inf)
        keys = jnp.where(exists, ordered_bits(maxima), np.uint32(0))

        def number(threshold):
            return (keys >= threshold).astype(jnp.int32).sum()

        def narrow(state):
            """Too many groups are at or above `many`; `few` is a threshold with few enough."""
            bit, many, few = state
            trial = many | bit
            n = number(trial)
            good = (n <= listed) & (n >= listed // 2)
            many = jnp.where(n > listed, trial, many)
            few = jnp.where(good, trial, few)
            return jnp.where(good, np.uint32(0), bit >> np.uint32(1)), many, few

        zero = jnp.uint32(0)
        start = jnp.where(n_groups > listed, _TOP_BIT, zero)
        _, many, few = lax.while_loop(lambda s: s[0] != 0, narrow, (start, zero, zero))
        threshold = jnp.where(few > 0, few, many + np.uint32(1))
        take = keys >= threshold
        rank = jnp.cumsum(take.astype(jnp.int32)) - 1
        plt.store(list_ref.at[r, jnp.where(take, rank, listed)], lane, mask=take)
        count_ref[r] = take.astype(jnp.int32).sum()
        bound_ref[r] = threshold - np.uint32(1)
