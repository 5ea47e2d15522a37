"""Contract and dispatch of `matmul` and `matmul_parts`."""

import math

import jax.numpy as jnp
from jax import Array

from pallas_kernels import gpus
from pallas_kernels.dispatch import Implementation, check, resolve
from pallas_kernels.matmul import reference
from pallas_kernels.matmul.tiles import MAX_PARTS, choose_parts, choose_tile


def matmul(
    x: Array,
    weight: Array,
    *,
    contracted: int = 1,
    implementation: Implementation = "auto",
    interpret: bool | None = None,
) -> Array:
    """The product [..., *N] of `x` and `weight`, rounded once: `matmul_parts` in one part."""
    return _matmul_parts(x, weight, contracted, implementation, interpret, 1)[0]


def matmul_parts(
    x: Array,
    weight: Array,
    *,
    contracted: int = 1,
    implementation: Implementation = "auto",
    interpret: bool | None = None,
) -> Array:
    """Parts whose sum is the product of `x` and `weight`, for a consumer that adds them in float32.

    Products are summed in float32 and each part is rounded to the dtype of `x`. Rounding S parts
    loses as little as rounding their sum: each is smaller by the square root of S, and their errors
    are independent. Parts in float32 would double what the consumer reads and save no rounding that
    `add_norm` does not do anyway.

    There is no kernel for most products: `tiles.choose_tile` says which it takes. XLA does the
    others, also of "pallas", in as many parts as `tiles.choose_parts` says; and all of them, whole,
    in the interpreter. Only "xla" has a gradient.

    Args:
        x: [..., *K] float16, bfloat16 or float32.
        weight: [*K, *N] of x's dtype.
        contracted: how many axes K has.

    Returns:
        [S, ..., *N] of x's dtype.
    """
    return _matmul_parts(x, weight, contracted, implementation, interpret, MAX_PARTS)


def _matmul_parts(
    x: Array,
    weight: Array,
    contracted: int,
    implementation: Implementation,
    interpret: bool | None,
    max_parts: int,
) -> Array:
    pallas, interpret = resolve(implementation, interpret)
    _check(x, weight, contracted)
    lead, columns = x.shape[: x.ndim - contracted], weight.shape[contracted:]
    n_rows, k, n_columns = math.prod(lead), math.prod(weight.shape[:contracted]), math.prod(columns)
    gpu, tile, parts = gpus.current(), None, 1
    if x.dtype == jnp.float16:
        max_parts = 1  # a part can leave its range where the sum does not
    if pallas and not interpret and x.dtype.itemsize == 2:
        tile = choose_tile(n_rows, k, n_columns, gpu, max_parts)
        parts = choose_parts(n_rows, k, n_columns, gpu, max_parts)
    if tile is None and parts == 1:
        return reference.matmul(x, weight, contracted)[None]
    if tile is None:
        split = reference.split_matmul(x.reshape(n_rows, k), weight.reshape(k, n_columns), parts)
        return split.reshape(parts, *lead, *columns)
    from pallas_kernels.matmul import mosaic_gpu

    parts = mosaic_gpu.matmul_parts(
        x.reshape(n_rows, k),
        weight.reshape(k, n_columns),
        tile=tile,
        multiprocessors=gpu.multiprocessors,
    )
    return parts.reshape(tile.parts, *lead, *columns)


def _check(x: Array, weight: Array, contracted: int) -> None:
    check(
        x.dtype in (jnp.float16, jnp.bfloat16, jnp.float32),
        f"x is {x.dtype}, but must be float16, bfloat16 or float32",
    )
    check(
        1 <= contracted <= min(x.ndim, weight.ndim)
        and weight.shape[:contracted] == x.shape[x.ndim - contracted :]
        and weight.dtype == x.dtype,
        f"weight is {weight.dtype}{list(weight.shape)}, but must be {x.dtype}[*K, *N], where K is "
        f"the last {contracted} axes of x, {list(x.shape)}",
    )
