"""Streams of the tokens of a step; models differ in the width of theirs."""

from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array

from pallas_kernels.shapes.arrays import normal


@dataclass(frozen=True)
class AddNorm:
    """The tokens of one step, and the output of a matmul to add to each, whole or in parts."""

    n_tokens: int
    hidden: int
    dtype: str = "bfloat16"
    parts: int | None = None
    k: int | None = None
    context: int | None = None

    def bytes(self) -> int:
        """Stream and addend read; sum and norm written."""
        arrays = 3 + (self.parts or 1)
        return arrays * self.n_tokens * self.hidden * jnp.dtype(self.dtype).itemsize

    def inputs(self) -> tuple[Array, Array, Array]:
        """Arguments of `add_norm`."""
        shape = self.n_tokens, self.hidden
        whole = shape if self.parts is None else (self.parts, *shape)
        x, delta = normal(shape, self.dtype, 0), normal(whole, self.dtype, 1)
        return x, delta, normal(shape[1:], self.dtype, 2)


H200 = {
    "8B": AddNorm(256, 4096),
    "8B, 2 parts": AddNorm(256, 4096, parts=2),
    "8B, 4 parts": AddNorm(256, 4096, parts=4),
    "1.7B": AddNorm(256, 2048),
}

TINY = {"tiny": AddNorm(11, 96, dtype="float32")}
