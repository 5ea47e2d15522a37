"""Contract and dispatch of `add_norm`."""

import jax.numpy as jnp
from jax import Array

from pallas_kernels.add_norm import reference
from pallas_kernels.dispatch import Implementation, check, resolve


def add_norm(
    x: Array,
    delta: Array | None,
    scale: Array,
    *,
    eps: float = 1e-6,
    implementation: Implementation = "auto",
    interpret: bool | None = None,
) -> tuple[Array, Array]:
    """The residual stream after `x + delta`, and its RMS norm for the next matmul.

    The sum is rounded to the dtype of `x` before the norm sees it, and not before that if there are
    parts; the norm is computed in float32, rounded to that dtype and then scaled. Rows do not see
    each other. Only "xla" has a gradient.

    Args:
        x: [..., hidden] float16, bfloat16 or float32.
        delta: like `x`; or parts of it, [S, ..., hidden], from `matmul_parts`; or None before the
            first layer.
        scale: [hidden] of x's dtype.
        eps: of the norm.

    Returns:
        The sum (`x` itself if there is no `delta`) and the norm, both like `x`.
    """
    pallas, interpret = resolve(implementation, interpret)
    check_arguments(x, delta, scale, eps)
    if x.size == 0:
        return x, x
    if not pallas:
        return reference.add_norm(x, delta, scale, eps=float(eps))
    from pallas_kernels.add_norm import pallas_triton

    return pallas_triton.add_norm(x, delta, scale, eps=float(eps), interpret=interpret)


def check_arguments(x: Array, delta: Array | None, scale: Array, eps: float) -> None:
    check(x.ndim >= 1, "x is a scalar, but must be [..., hidden]")
    check(
        x.dtype in (jnp.float16, jnp.bfloat16, jnp.float32),
        f"x is {x.dtype}, but must be float16, bfloat16 or float32",
    )
    if delta is not None:
        check(
            (delta.shape == x.shape or (delta.shape[1:] == x.shape and len(delta) > 0))
            and delta.dtype == x.dtype,
            f"delta is {delta.dtype}{list(delta.shape)}, but must be like x, "
            f"{x.dtype}{list(x.shape)}, parts of that or None",
        )
    check(
        scale.shape == x.shape[-1:] and scale.dtype == x.dtype,
        f"scale is {scale.dtype}{list(scale.shape)}, but must be {x.dtype}{list(x.shape[-1:])}",
    )
    check(eps >= 0, f"eps={eps}, but must not be negative")
