"""`append_kv` in Pallas (Triton lowering): one program copies one token to its slot."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt


def _kernel(slots_ref, k_new_ref, v_new_ref, k_in_ref, v_in_ref, k_ref, v_ref):
    del k_in_ref, v_in_ref  # aliased to k_ref and v_ref
    n_heads, head_dim = k_ref.shape[1:]
    lanes = pl.next_power_of_2(n_heads), pl.next_power_of_2(head_dim)
    head = lax.broadcasted_iota(jnp.int32, lanes, 0)
    column = lax.broadcasted_iota(jnp.int32, lanes, 1)
    mask = (head < n_heads) & (column < head_dim)
    token = pl.program_id(0)
    slot = slots_ref[token]

    def copy(new_ref: Any, pool_ref: Any) -> None:
        value = plt.load(new_ref.at[token, head, column], mask=mask, other=0)
        plt.store(pool_ref.at[slot, head, column], value, mask=mask)

    copy(k_new_ref, k_ref)
    copy(v_new_ref, v_ref)


@functools.partial(jax.jit, static_argnames="interpret")
def append_kv(
    k_pool: Array, v_pool: Array, k_new: Array, v_new: Array, slots: Array, *, interpret: bool
) -> tuple[Array, Array]:
    pool = jax.ShapeDtypeStruct(k_pool.shape, k_pool.dtype)
    k_pool, v_pool = pl.pallas_call(
        _kernel,
        out_shape=(pool, pool),
        grid=(slots.shape[0],),
        input_output_aliases={3: 0, 4: 1},
        name="append_kv",
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
    )(slots, k_new, v_new, k_pool, v_pool)
    return k_pool, v_pool
