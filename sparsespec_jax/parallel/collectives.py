"""What crosses between the shards of a model, inside the step's `shard_map`.

Nothing does where there is one shard: the program of one device is that of a step without tensor
parallelism.
"""

from __future__ import annotations

import dataclasses
from typing import TypeVar

import jax
import jax.numpy as jnp

from pallas_kernels import add_norm, all_reduce, all_reduce_add_norm
from pallas_kernels.add_norm.reference import add
from pallas_kernels.all_reduce import Peers
from pallas_kernels.matmul.reference import add_parts
from sparsespec_jax.config import Implementation

Tree = TypeVar("Tree")


@dataclasses.dataclass(frozen=True)
class Shards:
    """The shards of the mesh axis `axis`; `size` of them."""

    size: int = 1
    axis: str = "tp"

    @property
    def index(self) -> int | jax.Array:
        """Which one this is."""
        return 0 if self.size == 1 else jax.lax.axis_index(self.axis)

    def all_reduce(self, x: jax.Array) -> jax.Array:
        """The sum over the shards."""
        return x if self.size == 1 else jax.lax.psum(x, self.axis)

    def add(self, x: jax.Array, delta: jax.Array, peers: Peers | None) -> jax.Array:
        """`x` [T, hidden] and the sum over the shards of `delta`, parts [S, T, hidden]."""
        if self.size == 1:
            return add(x, delta)
        return add(x, all_reduce(add_parts(delta), self.axis, peers=peers))

    def add_norm(
        self,
        x: jax.Array,
        delta: jax.Array | None,
        scale: jax.Array,
        *,
        eps: float,
        peers: Peers | None,
        implementation: Implementation,
    ) -> tuple[jax.Array, jax.Array]:
        """`add`, and the norm of that; of `x` itself where there is no `delta`."""
        how = {"eps": eps, "implementation": implementation}
        if self.size == 1 or delta is None:
            return add_norm(x, delta, scale, **how)
        return all_reduce_add_norm(x, delta, scale, self.axis, peers=peers, **how)

    def all_gather(self, tree: Tree) -> Tree:
        """What every shard has, stacked: [size, ...] each."""
        if self.size == 1:
            return jax.tree.map(lambda x: x[None], tree)
        return jax.lax.all_gather(tree, self.axis)

    # A shard's columns of all rows, exchanged for all columns of its rows: rows [N] in order, the
    # same number for every shard, so that the last ones may be padding (copies of the last row).

    def own_rows(self, tree: Tree) -> Tree:
        """This shard's rows of replicated arrays [N, ...]."""

        def take(x: jax.Array) -> jax.Array:
            count = -(-len(x) // self.size)
            row = self.index * count + jnp.arange(count)
            return x[jnp.minimum(row, len(x) - 1)]

        return tree if self.size == 1 else jax.tree.map(take, tree)

    def exchange(self, x: jax.Array) -> jax.Array:
        """From columns [N, ..., V / size] of every row to this shard's rows [N / size, ..., V]."""
        if self.size == 1:
            return x
        padding = -len(x) % self.size
        if padding:
            x = jnp.concatenate([x, jnp.broadcast_to(x[-1:], (padding, *x.shape[1:]))])
        return jax.lax.all_to_all(x, self.axis, 0, x.ndim - 1, tiled=True)

    def all_rows(self, tree: Tree, n: int) -> Tree:
        """All `n` rows, of every shard's own."""
        if self.size == 1:
            return tree
        return jax.tree.map(lambda x: x[:n], jax.lax.all_gather(tree, self.axis, tiled=True))
