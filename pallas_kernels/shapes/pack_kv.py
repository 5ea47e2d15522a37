"""KV that leaves the pools of a whole model for host memory, or comes back."""

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from pallas_kernels.shapes.arrays import ints, normal


@dataclass(frozen=True)
class Pack:
    """Chunks that are packed, or unpacked (`back`): random slots, all layers."""

    n_layers: int
    chunk: int
    n_slots: int
    n_kv_heads: int = 8
    head_dim: int = 128
    chunks: int = 1
    back: bool = False
    dtype: str = "bfloat16"
    k: int | None = None
    context: int | None = None

    def bytes(self) -> int:
        """Every chunk read and written."""
        token = self.n_layers * 2 * self.n_kv_heads * self.head_dim * jnp.dtype(self.dtype).itemsize
        return 2 * self.chunks * self.chunk * token

    def inputs(self) -> dict:
        """Array arguments of `pack_kv`, or of `unpack_kv`."""
        heads = self.n_kv_heads, self.head_dim
        pools = tuple(
            tuple(normal((self.n_slots, *heads), self.dtype, 2 * i + j) for j in range(2))
            for i in range(self.n_layers)
        )
        n_tokens = self.chunks * self.chunk
        slots = 1 + np.random.default_rng(0).permutation(self.n_slots - 1)[:n_tokens]
        arguments = {"pools": pools, "slots": ints(slots)}
        if self.back:
            shape = self.n_layers, 2, self.chunk, *heads
            seeds = range(1000, 1000 + self.chunks)
            arguments["packed"] = tuple(normal(shape, self.dtype, seed) for seed in seeds)
        return arguments


H200 = {
    "pack": Pack(36, chunk=128, n_slots=1 << 16),
    "pack, 4 chunks": Pack(36, chunk=128, n_slots=1 << 16, chunks=4),
    "unpack": Pack(36, chunk=128, n_slots=1 << 16, back=True),
    "unpack, 4 chunks": Pack(36, chunk=128, n_slots=1 << 16, chunks=4, back=True),
    "pack, a shard of 8": Pack(36, chunk=256, n_slots=1 << 16, n_kv_heads=1),
}

TINY = {
    "pack": Pack(2, 16, 256, n_kv_heads=2, head_dim=64, chunks=2, dtype="float32"),
    "unpack": Pack(2, 16, 256, n_kv_heads=2, head_dim=64, chunks=2, back=True, dtype="float32"),
}
