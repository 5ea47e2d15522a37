"""Contract and dispatch of `select_positions`."""

import jax.numpy as jnp
from jax import Array

from pallas_kernels.dispatch import Implementation, check, resolve
from pallas_kernels.select_positions import reference


def select_positions(
    scores: Array,
    candidates: Array,
    count: Array,
    *,
    k: int,
    implementation: Implementation = "auto",
    interpret: bool | None = None,
) -> Array:
    """The positions of the `count` highest scores of every list, in ascending order.

    Exact, per layer, row and list; ties go to the newer (larger) position.

    Args:
        scores: [L, R, lists, C] float16, bfloat16 or float32; never negative, never NaN.
        candidates: [R] int32 <= C; only positions < candidates[r] compete.
        count: [R] int32 <= min(k, candidates[r]); how many positions row r takes.
        k: size of the lists.

    Returns:
        [L, R, lists, k] int32; the first count[r] entries are live, the rest are 0.
    """
    pallas, interpret = resolve(implementation, interpret)
    check(scores.ndim == 4, f"scores has shape {scores.shape}, but must be [L, R, lists, C]")
    check(
        scores.dtype in (jnp.float16, jnp.bfloat16, jnp.float32),
        f"scores is {scores.dtype}, but must be float16, bfloat16 or float32",
    )
    n_rows = scores.shape[1]
    for name, value in (("candidates", candidates), ("count", count)):
        check(
            value.shape == (n_rows,) and value.dtype == jnp.int32,
            f"{name} is {value.dtype}{list(value.shape)}, but must be int32[R] = int32[{n_rows}]",
        )
    check(k >= 1, f"k={k}, but must be at least 1")
    if scores.size == 0:
        return jnp.zeros((*scores.shape[:3], k), jnp.int32)
    if not pallas:
        return reference.select_positions(scores, candidates, count, k=k)
    from pallas_kernels.select_positions import pallas_triton

    return pallas_triton.select_positions(scores, candidates, count, k=k, interpret=interpret)
