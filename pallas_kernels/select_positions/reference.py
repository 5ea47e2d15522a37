"""XLA reference of `select_positions`: top-K of the reversed scores, so that ties go to the newer.

The oracle, and what CPUs run. On a GPU `lax.top_k` sorts whole rows and waits for the host (3.3 ms
a step at Qwen3-8B shapes); the kernel is for that.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array, lax


@functools.partial(jax.jit, static_argnames="k")
def select_positions(scores: Array, candidates: Array, count: Array, *, k: int) -> Array:
    size = scores.shape[-1]
    competes = jnp.arange(size) < candidates[:, None, None]
    # abs: -0.0 is 0. Float32 holds every float16 and bfloat16 exactly.
    keys = jnp.where(competes, jnp.abs(scores.astype(jnp.float32)), -1.0)
    _, best = lax.top_k(keys[..., ::-1], min(k, size))
    taken = jnp.arange(best.shape[-1]) < count[:, None, None]
    ascending = jnp.sort(jnp.where(taken, size - 1 - best, size), axis=-1)
    selected = jnp.where(ascending < size, ascending, 0)
    return jnp.pad(selected, [(0, 0)] * 3 + [(0, k - selected.shape[-1])])
