"""The weights of a layer, times the tokens of a step."""

from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array

from pallas_kernels.shapes.arrays import normal


@dataclass(frozen=True)
class Matmul:
    """The tokens of one step times a weight; in parts if the consumer adds them."""

    n_tokens: int
    inner: int
    columns: int
    in_parts: bool = False
    dtype: str = "bfloat16"
    k: int | None = None
    context: int | None = None

    def bytes(self) -> int:
        """Operands read, the product written, once. (Products alone take longer: 64 us of the
        `gate_up` of 8B at 800 TFLOP/s.)"""
        n, k, m = self.n_tokens, self.inner, self.columns
        return (n * k + k * m + n * m) * jnp.dtype(self.dtype).itemsize

    def inputs(self) -> tuple[Array, Array]:
        """Arguments of `matmul`."""
        x = normal((self.n_tokens, self.inner), self.dtype, 0)
        return x, normal((self.inner, self.columns), self.dtype, 1) * self.inner**-0.5


H200 = {
    "8B, qkv": Matmul(256, 4096, 6144, in_parts=True),
    "8B, gate_up": Matmul(256, 4096, 24576),
    "8B, out": Matmul(256, 4096, 4096, in_parts=True),
    "8B, down": Matmul(256, 12288, 4096, in_parts=True),
}

TINY = {"tiny": Matmul(11, 96, 64, dtype="float32")}
