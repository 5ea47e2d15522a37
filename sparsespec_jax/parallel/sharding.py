"""Where arrays live: logical axes of parameters and state, mapped to the axes of a mesh.

One small table, so that tensor parallelism is a mesh and not a rewrite. Attention splits by KV
head, the feed-forward by its columns, embedding and head by vocabulary; all else is replicated.
"""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sparsespec_jax.models.parameters import ParamSpec


@dataclasses.dataclass(frozen=True)
class ShardingRules:
    """Mesh axis of each logical axis; None replicates."""

    kv_heads: str | None = "tp"
    mlp: str | None = "tp"
    vocab: str | None = "tp"

    def spec(self, axes: tuple[str | None, ...]) -> PartitionSpec:
        return PartitionSpec(*(axis and getattr(self, axis) for axis in axes))


@dataclasses.dataclass(frozen=True)
class Placement:
    """A mesh and the rules that place arrays on it."""

    mesh: Mesh
    rules: ShardingRules = ShardingRules()

    @classmethod
    def single_device(cls, device: jax.Device | None = None) -> Placement:
        return cls(Mesh(np.array([device or jax.devices()[0]]), ("tp",)))

    def of(self, *axes: str | None) -> NamedSharding:
        return NamedSharding(self.mesh, self.rules.spec(axes))

    def of_param(self, spec: ParamSpec) -> NamedSharding:
        return self.of(*spec.axes)

    @property
    def replicated(self) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec())
