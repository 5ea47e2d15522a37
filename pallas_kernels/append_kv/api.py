"""Contract and dispatch of `append_kv`."""

import jax.numpy as jnp
from jax import Array

from pallas_kernels.append_kv import reference
from pallas_kernels.dispatch import Implementation, check, resolve


def append_kv(
    k_pool: Array,
    v_pool: Array,
    k_new: Array,
    v_new: Array,
    slots: Array,
    *,
    implementation: Implementation = "auto",
    interpret: bool | None = None,
) -> tuple[Array, Array]:
    """Writes the keys and values of T tokens to their slots; in place when the pools are donated.

    Slot 0 is the trash slot: padding tokens all write there, and what it then holds is undefined.
    Every other slot may appear only once, and every slot must lie in the pool.

    Args:
        k_pool: [slots, Hkv, D] keys of one layer.
        v_pool: like `k_pool`, values.
        k_new: [T, Hkv, D] keys to write, cast to the pool's dtype.
        v_new: like `k_new`, values.
        slots: [T] int32 destination of each token.

    Returns:
        The updated `k_pool` and `v_pool`.
    """
    pallas, interpret = resolve(implementation, interpret)
    check(k_pool.ndim == 3, f"k_pool has shape {k_pool.shape}, but must be [slots, Hkv, D]")
    check(
        v_pool.shape == k_pool.shape and v_pool.dtype == k_pool.dtype,
        f"v_pool is {v_pool.dtype}{list(v_pool.shape)}, but must be like k_pool, "
        f"{k_pool.dtype}{list(k_pool.shape)}",
    )
    check(
        slots.ndim == 1 and slots.dtype == jnp.int32,
        f"slots is {slots.dtype}{list(slots.shape)}, but must be int32[T]",
    )
    expected = (slots.shape[0], *k_pool.shape[1:])
    for name, new in (("k_new", k_new), ("v_new", v_new)):
        check(
            new.shape == expected,
            f"{name} has shape {new.shape}, but must be [T, Hkv, D] = {expected}",
        )
    k_new, v_new = k_new.astype(k_pool.dtype), v_new.astype(v_pool.dtype)
    if slots.shape[0] == 0:
        return k_pool, v_pool
    if not pallas:
        return reference.append_kv(k_pool, v_pool, k_new, v_new, slots)
    from pallas_kernels.append_kv import pallas_triton

    return pallas_triton.append_kv(k_pool, v_pool, k_new, v_new, slots, interpret=interpret)
