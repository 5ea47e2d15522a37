"""`append_kv` in Pallas (Triton lowering): one pass from the projection to queries and the pool.

A program takes one token and a few KV heads. It holds them as two tiles [rows, D / 2], one for each
half of the heads, so that the rotation is elementwise; query heads, key and value are rows of the
same tiles, loaded at once and each stored under its own mask. Everything a row needs is loaded in
the tiles' layout (again for every row, from cache): nothing passes through shared memory.

Rounding is that of the reference, step by step; only the norms' sums have an order of their own.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.append_kv.reference import turn_halves
from pallas_kernels.matmul.reference import add_parts

_PROGRAMS = 528  # enough to fill a large GPU (132 SMs, four programs each)
_MAX_WARPS = 8


class Tile(NamedTuple):
    """KV heads of a program, and its warps."""

    heads: int
    warps: int


def choose_tile(qkv_shape: tuple[int, ...], dtype: jnp.dtype) -> Tile:
    """One access of 16 bytes per thread and half; more heads as long as that fills the GPU."""
    _, n_tokens, n_kv_heads, members, head_dim = qkv_shape
    row_bytes = pl.next_power_of_2(head_dim // 2) * dtype.itemsize

    def warps(heads: int) -> int:
        return max(1, heads * pl.next_power_of_2(members) * row_bytes // (32 * 16))

    heads = 1
    while (
        n_kv_heads % (2 * heads) == 0
        and n_tokens * n_kv_heads >= 2 * heads * _PROGRAMS
        and warps(2 * heads) <= _MAX_WARPS
    ):
        heads *= 2
    return Tile(heads, min(warps(heads), _MAX_WARPS))


def _kernel(
    slots_ref,
    cos_ref,
    sin_ref,
    qkv_ref,
    bias_ref,
    q_norm_ref,
    k_norm_ref,
    k_in_ref,
    v_in_ref,
    q_ref,
    k_ref,
    v_ref,
    *,
    heads: int,
    eps: float,
):
    del k_in_ref, v_in_ref  # aliased to k_ref and v_ref
    n_parts, _, _, members, head_dim = qkv_ref.shape
    group, half = members - 2, head_dim // 2
    lanes = pl.next_power_of_2(members)
    shape = heads * lanes, pl.next_power_of_2(half)
    row, column = (lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1))
    head = pl.program_id(1) * heads + (row >> (lanes.bit_length() - 1))
    member = row & (lanes - 1)
    exists = column < half
    is_query = exists & (member < group)
    is_key = exists & (member == group)
    is_value = exists & (member == group + 1)
    token = pl.program_id(0)
    slot = slots_ref[token]

    def load(ref: Any, *index: Any, mask: Array) -> Array:
        return plt.load(ref.at[index], mask=mask, other=0)

    def load_halves(ref: Any, *index: Any, mask: Array) -> list[Array]:
        return [load(ref, *index, column + start, mask=mask) for start in (0, half)]

    def store_halves(ref: Any, *index: Any, halves: Sequence[Array], mask: Array) -> None:
        for start, x in zip((0, half), halves, strict=True):
            plt.store(ref.at[(*index, column + start)], x.astype(ref.dtype), mask=mask)

    # All loads before anything waits for one of them.
    in_head = exists & (member < members)
    x_parts, value_parts = (
        [load_halves(qkv_ref, part, token, head, at, mask=mask) for part in range(n_parts)]
        for at, mask in ((member, in_head), (group + 1, is_key))
    )
    cos, sin = (load(ref, token, column, mask=is_query | is_key) for ref in (cos_ref, sin_ref))
    bias = scale = None
    if bias_ref is not None:
        bias = load_halves(bias_ref, head, member, mask=in_head)
        value_bias = load_halves(bias_ref, head, group + 1, mask=is_key)
    if q_norm_ref is not None:
        q_scale = load_halves(q_norm_ref, mask=is_query)
        k_scale = load_halves(k_norm_ref, mask=is_key)
        scale = [jnp.where(is_key, k, q) for q, k in zip(q_scale, k_scale, strict=True)]

    x, value_of_key = (
        [add_parts(half) for half in zip(*parts, strict=True)] for parts in (x_parts, value_parts)
    )
    if bias is not None:
        x = [a + b for a, b in zip(x, bias, strict=True)]
        value_of_key = [a + b for a, b in zip(value_of_key, value_bias, strict=True)]

    def finite(x: Array) -> Array:
        return jnp.abs(x.astype(v_ref.dtype).astype(jnp.float32)) < jnp.inf

    value = [jnp.where(finite(a), a, 0) for a in x]
    broken = sum((~finite(a)).astype(jnp.int32) for a in value_of_key).sum(1, keepdims=True) > 0
    if scale is not None:
        wide = [a.astype(jnp.float32) for a in x]
        total = sum(a * a for a in wide).sum(1, keepdims=True)
        factor = lax.rsqrt(total / head_dim + eps)
        x = [(a * factor).astype(s.dtype) * s for a, s in zip(wide, scale, strict=True)]
    x = [jnp.where(broken, jnp.nan, a) for a in turn_halves(*x, cos, sin)]

    # Rows that store no key (or value) aim at the trash slot. They write nothing; only Pallas'
    # interpreter writes back what it read there.
    store_halves(q_ref, token, head, member, halves=x, mask=is_query)
    store_halves(k_ref, jnp.where(member == group, slot, 0), head, halves=x, mask=is_key)
    value_slot = jnp.where(member == group + 1, slot, 0)
    store_halves(v_ref, value_slot, head, halves=value, mask=is_value)


@functools.partial(jax.jit, static_argnames=("eps", "interpret", "tile"))
def append_kv(
    k_pool: Array,
    v_pool: Array,
    qkv: Array,
    slots: Array,
    cos: Array,
    sin: Array,
    *,
    bias: Array | None,
    q_norm: Array | None,
    k_norm: Array | None,
    eps: float,
    interpret: bool,
    tile: Tile | None = None,
) -> tuple[Array, Array, Array]:
    _, n_tokens, n_kv_heads, members, head_dim = qkv.shape
    tile = tile or choose_tile(qkv.shape, qkv.dtype)
    pool = jax.ShapeDtypeStruct(k_pool.shape, k_pool.dtype)
    q_shape = n_tokens, n_kv_heads, members - 2, head_dim
    inputs = slots, cos, sin, qkv, bias, q_norm, k_norm, k_pool, v_pool
    n_arrays = sum(x is not None for x in inputs)
    q, k_pool, v_pool = pl.pallas_call(
        functools.partial(_kernel, heads=tile.heads, eps=eps),
        out_shape=(jax.ShapeDtypeStruct(q_shape, qkv.dtype), pool, pool),
        grid=(n_tokens, n_kv_heads // tile.heads),
        input_output_aliases={n_arrays - 2: 1, n_arrays - 1: 2},
        name="append_kv",
        compiler_params=plt.CompilerParams(num_warps=tile.warps, num_stages=1),
        interpret=interpret,
    )(*inputs)
    return q.reshape(n_tokens, -1, head_dim), k_pool, v_pool
