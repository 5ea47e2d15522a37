"""XLA reference of `append_kv`: one scatter per pool."""

from jax import Array


def append_kv(
    k_pool: Array, v_pool: Array, k_new: Array, v_new: Array, slots: Array
) -> tuple[Array, Array]:
    return k_pool.at[slots].set(k_new), v_pool.at[slots].set(v_new)
