"""Projections of the tokens of a mixed step, and of a prefill."""

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jax import Array

from pallas_kernels.shapes.arrays import ints, normal


@dataclass(frozen=True)
class Append:
    """The projection of new tokens, in parts, which go to random slots of one layer's pool."""

    n_tokens: int
    n_slots: int
    n_kv_heads: int = 8
    group: int = 4
    head_dim: int = 128
    bias: bool = False
    norms: bool = True
    parts: int = 1
    dtype: str = "bfloat16"
    k: int | None = None
    context: int | None = None

    def bytes(self) -> int:
        """The projection read; queries, keys and values written."""
        row = self.n_kv_heads * (self.group + 2) * self.head_dim
        return (self.parts + 1) * self.n_tokens * row * jnp.dtype(self.dtype).itemsize

    def inputs(self) -> dict[str, Array | None]:
        """Array arguments of `append_kv`."""
        heads = self.n_kv_heads, self.group + 2, self.head_dim
        pool = self.n_slots, self.n_kv_heads, self.head_dim
        angle = 3 * normal((self.n_tokens, self.head_dim // 2), "float32", 3)
        slots = 1 + np.random.default_rng(0).permutation(self.n_slots - 1)[: self.n_tokens]

        def norm(seed: int) -> Array | None:
            return normal((self.head_dim,), self.dtype, seed) if self.norms else None

        return {
            "k_pool": normal(pool, self.dtype, 0),
            "v_pool": normal(pool, self.dtype, 1),
            "qkv": normal((self.parts, self.n_tokens, *heads), self.dtype, 2),
            "slots": ints(slots),
            "cos": jnp.cos(angle),
            "sin": jnp.sin(angle),
            "bias": normal(heads, self.dtype, 4) if self.bias else None,
            "q_norm": norm(5),
            "k_norm": norm(6),
        }


H200 = {
    "mixed": Append(248, n_slots=1 << 20),
    "mixed, 2 parts": Append(248, n_slots=1 << 20, parts=2),
    "mixed, Qwen2": Append(248, n_slots=1 << 20, group=7, bias=True, norms=False),
    "prefill": Append(2048, n_slots=1 << 20),
}

TINY = {"mixed": Append(11, n_slots=1024, n_kv_heads=2, head_dim=64, dtype="float32")}
