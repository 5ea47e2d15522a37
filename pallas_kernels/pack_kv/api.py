"""Contract and dispatch of `pack_kv` and `unpack_kv`."""

import jax.numpy as jnp
from jax import Array

from pallas_kernels.dispatch import Implementation, check, resolve
from pallas_kernels.pack_kv import reference
from pallas_kernels.pack_kv.reference import Pools


def pack_kv(
    pools: Pools,
    slots: Array,
    *,
    chunks: int = 1,
    implementation: Implementation = "auto",
    interpret: bool | None = None,
) -> tuple[Array, ...]:
    """Keys and values of slots, of all layers: an array for each chunk of C slots.

    Args:
        pools: for each layer keys and values, [slots, Hkv, D] each, all alike: float16, bfloat16 or
            float32.
        slots: [chunks * C] int32, those of one chunk after another. All must lie in the pools, and
            any may appear several times.

    Returns:
        `chunks` arrays, [layers, 2, C, Hkv, D] each, of the pools' dtype.
    """
    pallas, interpret = resolve(implementation, interpret)
    _check_pools(pools)
    _check_slots(slots)
    check(
        chunks > 0 and len(slots) % chunks == 0,
        f"chunks is {chunks}, but must be one or more, of equal shares of {len(slots)} slots",
    )
    if slots.size == 0:
        nothing = jnp.zeros((len(pools), 2, 0, *pools[0][0].shape[1:]), pools[0][0].dtype)
        return (nothing,) * chunks
    if not pallas:
        return reference.pack_kv(pools, slots, chunks)
    from pallas_kernels.pack_kv import pallas_triton

    return pallas_triton.pack_kv(pools, slots, chunks=chunks, interpret=interpret)


def unpack_kv(
    pools: Pools,
    packed: tuple[Array, ...],
    slots: Array,
    *,
    implementation: Implementation = "auto",
    interpret: bool | None = None,
) -> Pools:
    """Writes what `pack_kv` packed to `slots`; in place when the pools are donated.

    Slot 0 is the trash slot: padding goes there, and what it then holds is one or another of what
    was written, element by element. Every other slot may appear only once.

    Args:
        pools: as in `pack_kv`.
        packed: one chunk or more, [layers, 2, C, Hkv, D] each, of the pools' dtype.
        slots: [len(packed) * C] int32, those of one chunk after another; all must lie in the pools.

    Returns:
        The updated pools.
    """
    pallas, interpret = resolve(implementation, interpret)
    _check_pools(pools)
    _check_slots(slots)
    _check_packed(pools, packed, slots)
    if slots.size == 0:
        return pools
    if not pallas:
        return reference.unpack_kv(pools, packed, slots)
    from pallas_kernels.pack_kv import pallas_triton

    return pallas_triton.unpack_kv(pools, packed, slots, interpret=interpret)


def _check_pools(pools: Pools) -> None:
    check(len(pools) > 0, "pools is empty, but must have a layer or more")
    for number, layer in enumerate(pools):
        check(
            len(layer) == 2,
            f"pools[{number}] has {len(layer)} arrays, but must have two: keys and values",
        )
    first = pools[0][0]
    check(
        first.ndim == 3 and first.size > 0,
        f"pools[0][0] has shape {first.shape}, but must be [slots, Hkv, D], with a slot or more",
    )
    check(
        first.dtype in (jnp.float16, jnp.bfloat16, jnp.float32),
        f"pools[0][0] is {first.dtype}, but must be float16, bfloat16 or float32",
    )
    for number, layer in enumerate(pools):
        for which, pool in enumerate(layer):
            check(
                pool.shape == first.shape and pool.dtype == first.dtype,
                f"pools[{number}][{which}] is {pool.dtype}{list(pool.shape)}, but must be like "
                f"pools[0][0], {first.dtype}{list(first.shape)}",
            )


def _check_slots(slots: Array) -> None:
    check(
        slots.ndim == 1 and slots.dtype == jnp.int32,
        f"slots is {slots.dtype}{list(slots.shape)}, but must be int32[C]",
    )


def _check_packed(pools: Pools, packed: tuple[Array, ...], slots: Array) -> None:
    check(
        len(packed) > 0 and len(slots) % len(packed) == 0,
        f"packed has {len(packed)} chunks, but must have one or more, of equal shares of "
        f"{len(slots)} slots",
    )
    first = pools[0][0]
    shape = len(pools), 2, len(slots) // len(packed), *first.shape[1:]
    for number, chunk in enumerate(packed):
        check(
            chunk.shape == shape and chunk.dtype == first.dtype,
            f"packed[{number}] is {chunk.dtype}{list(chunk.shape)}, but must be "
            f"[layers, 2, C, Hkv, D] = {first.dtype}{list(shape)}",
        )
