"""`add_norm` in Pallas (Triton lowering): a program holds one row in registers, in one pass.

Rounding is that of the reference, step by step; only the norm's sum has an order of its own.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.add_norm.reference import add_parts

_MAX_WARPS = 16


def choose_warps(hidden: int, dtype: jnp.dtype) -> int:
    """Two accesses of 16 bytes per thread and array."""
    row_bytes = pl.next_power_of_2(hidden) * dtype.itemsize
    return min(max(1, row_bytes // (32 * 2 * 16)), _MAX_WARPS)


def _kernel(x_ref, delta_ref, scale_ref, *out_refs, eps: float):
    hidden = x_ref.shape[1]
    row = pl.program_id(0)
    column = lax.broadcasted_iota(jnp.int32, (pl.next_power_of_2(hidden),), 0)
    mask = column < hidden

    # All loads before anything waits for one of them.
    x = plt.load(x_ref.at[row, column], mask=mask, other=0)
    if delta_ref is not None:
        parts = [
            plt.load(delta_ref.at[part, row, column], mask=mask, other=0)
            for part in range(delta_ref.shape[0])
        ]
    scale = plt.load(scale_ref.at[column], mask=mask, other=0)

    *sum_refs, normed_ref = out_refs
    if delta_ref is not None:
        x = add_parts(x, parts)
        plt.store(sum_refs[0].at[row, column], x, mask=mask)
    wide = x.astype(jnp.float32)
    factor = lax.rsqrt(jnp.sum(wide * wide) / hidden + eps)
    plt.store(normed_ref.at[row, column], (wide * factor).astype(x.dtype) * scale, mask=mask)


@functools.partial(jax.jit, static_argnames=("eps", "interpret"))
def add_norm(
    x: Array, delta: Array | None, scale: Array, *, eps: float, interpret: bool
) -> tuple[Array, Array]:
    shape, hidden = x.shape, x.shape[-1]
    rows = x.reshape(-1, hidden)
    out = jax.ShapeDtypeStruct(rows.shape, rows.dtype)
    outs = pl.pallas_call(
        functools.partial(_kernel, eps=eps),
        out_shape=(out,) if delta is None else (out, out),
        grid=(rows.shape[0],),
        name="add_norm",
        compiler_params=plt.CompilerParams(
            num_warps=choose_warps(hidden, rows.dtype), num_stages=1
        ),
        interpret=interpret,
    )(rows, None if delta is None else delta.reshape(-1, *rows.shape), scale)
    *total, normed = (out.reshape(shape) for out in outs)
    return (x if delta is None else total[0]), normed
