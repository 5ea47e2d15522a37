"""Where arrays live: which logical axes of parameters, pools and state a mesh axis splits.

One small table, so that tensor parallelism is a mesh and not a rewrite. Attention splits by KV
head, the feed-forward by its columns, embedding and head by vocabulary; all else is replicated.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pallas_kernels.all_reduce import Peers, connect
from sparsespec_jax.config import EngineConfig
from sparsespec_jax.models.parameters import ParamSpec

# The logical axes that tensor parallelism splits.
SPLIT = (
    "kv_heads",  # of attention's weights, and of the KV pools
    "lists",  # of selected positions: a shard selects for its own heads
    "mlp",  # gate and up by columns, down by rows
    "vocab",  # of embedding and head, and so of logits
)


@dataclasses.dataclass(frozen=True)
class Placement:
    """A mesh, and the axis of it that tensor parallelism runs over.

    What the mesh's other axes hold are replicas: each runs the same steps.
    """

    mesh: Mesh
    axis: str = "tp"

    def __post_init__(self):
        if self.axis not in self.mesh.axis_names:
            raise ValueError(
                f"axis={self.axis!r} is not an axis of the mesh, which has "
                f"{', '.join(map(repr, self.mesh.axis_names))}"
            )
        # Shardings are the compiler's business outside the step, whatever the caller's are.
        object.__setattr__(self, "mesh", Mesh(self.mesh.devices, self.mesh.axis_names))

    @classmethod
    def single_device(cls, device: jax.Device | None = None) -> Placement:
        return cls(Mesh(np.array([device or jax.local_devices()[0]]), ("tp",)))

    @classmethod
    def over(cls, tensor_parallel_size: int) -> Placement:
        """The first `tensor_parallel_size` devices of all processes."""
        devices = jax.devices()
        if tensor_parallel_size > len(devices):
            raise ValueError(
                f"tensor_parallel_size={tensor_parallel_size} is more than the devices that there "
                f"are: {len(devices)}"
            )
        return cls(Mesh(np.array(devices[:tensor_parallel_size]), ("tp",)))

    @property
    def shards(self) -> int:
        """Devices that share one model."""
        return self.mesh.shape[self.axis]

    def of(self, *axes: str | None) -> NamedSharding:
        spec = PartitionSpec(*(self.axis if axis in SPLIT else None for axis in axes))
        return NamedSharding(self.mesh, spec)

    def of_param(self, spec: ParamSpec) -> NamedSharding:
        return self.of(*spec.axes)

    @property
    def local_shards(self) -> tuple[int, ...]:
        """Those that devices of this process hold."""
        return tuple(sorted({shard for shard, _ in self._local_devices()}))

    def assemble(self, spec: ParamSpec, parts: dict[int, np.ndarray]) -> jax.Array:
        """A parameter from its local shards, each sent to its own devices.

        `parts`: by shard; of a replicated parameter, shard 0 is the whole.
        """
        sharding = self.of_param(spec)
        split = not sharding.is_fully_replicated
        placed = [
            jax.device_put(parts[shard if split else 0], device)
            for shard, device in self._local_devices()
        ]
        return jax.make_array_from_single_device_arrays(spec.shape, sharding, placed)

    def _local_devices(self) -> list[tuple[int, jax.Device]]:
        """This process' devices, and which shard of the model each holds."""
        place = self.mesh.axis_names.index(self.axis)
        return [
            (index[place], device)
            for index, device in np.ndenumerate(self.mesh.devices)
            if device.process_index == jax.process_index()
        ]

    def jit(
        self, function: Callable, in_shardings: Any, out_shardings: Any, **options: Any
    ) -> jax.stages.Wrapped:
        """`function`, jitted with `options`; it sees one shard's part of every argument.

        Shardings are trees of `NamedSharding`, also one for several arguments.
        """
        if self.mesh.size > 1:
            specs = jax.tree.map(lambda sharding: sharding.spec, (in_shardings, out_shardings))
            function = jax.shard_map(
                function, mesh=self.mesh, in_specs=specs[0], out_specs=specs[1], check_vma=False
            )
        return jax.jit(function, out_shardings=out_shardings, **options)

    def connect(self, rows: int, hidden: int) -> Peers | None:
        """Memory for the shards' messages of up to `rows` rows of `hidden` values: see `Peers`."""
        if self.mesh.size == 1 or self.mesh.size != self.shards:
            return None
        return connect(self.mesh, self.axis, rows=rows, hidden=hidden)

    @property
    def replicated(self) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec())


def placement_of(config: EngineConfig, placement: Placement | None = None) -> Placement:
    """Where an engine of `config` lives; `placement` is the caller's, who has a mesh already.

    Raises ValueError if the two disagree, or if there are fewer devices.
    """
    size = config.tensor_parallel_size
    if placement is None:
        placement = Placement.single_device() if size == 1 else Placement.over(size)
    if not placement.mesh.local_devices:
        raise ValueError(f"process {jax.process_index()} has none of the mesh's devices")
    if size not in (1, placement.shards):
        raise ValueError(
            f"tensor_parallel_size={size} is not the size of the mesh's axis "
            f"{placement.axis!r}, {placement.shards}: give one of the two"
        )
    return placement
