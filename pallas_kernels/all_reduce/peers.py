"""Memory in which the devices of a mesh axis leave each other messages: `connect` and `Peers`.

XLA gives a kernel no address of another device's memory without a rendezvous of the devices' host
threads for every call. Where one process owns all devices, none is needed: an array that lives as
long as the process keeps its address, and every GPU of the process may read and write it (XLA
enables peer access when it starts). So the addresses are data, in a small table that kernels read.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pallas_kernels.dispatch import check

EMPTY = 0xFFFFFFFF
"""A word that no message contains: see `mosaic_gpu`."""
_ITEM_BYTES = 2


class Mailboxes(NamedTuple):
    """Where things are in the memory of each device, in bytes.

    A row has a counter of its calls, and two messages of every device.
    """

    devices: int
    rows: int
    hidden: int

    @property
    def message_bytes(self) -> int:
        return self.hidden * _ITEM_BYTES

    @property
    def messages(self) -> int:
        """The first message, [slot, device, row]; counters, [row] of 4 bytes, are before."""
        return -(-4 * self.rows // 128) * 128

    @property
    def size(self) -> int:
        return self.messages + 2 * self.devices * self.rows * self.message_bytes

    def memory(self) -> np.ndarray:
        """Of all devices before the first call: counters of 0, no messages."""
        words = np.full(self.size // 4, np.uint32(EMPTY).view(np.int32))
        words[: self.messages // 4] = 0
        return np.broadcast_to(words, (self.devices, len(words)))


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=("table", "memory"), meta_fields=("mailboxes",)
)
@dataclass(frozen=True)
class Peers:
    """Devices that can write to each other's memory: an argument of jitted functions, sharded over
    the axis (`PartitionSpec(axis_name)`), never donated."""

    table: Array
    """int32 [devices, 1 + 2 * devices], a row for each: its rank and the addresses of all memories,
    its own first, then those of the ranks that follow, around to the first."""
    memory: Array = field(repr=False)
    """int32 [devices, words]: written behind XLA's back. No program reads it; it keeps it alive."""
    mailboxes: Mailboxes


def connect(mesh: Mesh, axis_name: str, *, rows: int, hidden: int) -> Peers | None:
    """Memory for messages of up to `rows` rows of `hidden` values of two bytes.

    Calls that share it must follow each other, in one order on all devices: within a program each
    needs what the one before returned. A program needs a collective of XLA's too, however small:
    only then do XLA's threads wait for each other before one starts a kernel that waits. After a
    call that failed on some of the devices, connect anew.

    Args:
        mesh: its other axes have size 1.
        axis_name: the axis.
        rows: the most rows of a call.
        hidden: a multiple of 1024.

    Returns:
        None where `all_reduce` has no kernel: devices that are no Hopper GPUs or not all of this
        process, only one, or a `hidden` that does not fit.
    """
    devices = mesh.shape[axis_name]
    check(devices == mesh.size, f"{axis_name!r} is not the only axis of {mesh.shape}")
    mailboxes = Mailboxes(devices, rows, hidden)
    if not supported(mesh) or hidden % 1024 or mailboxes.size >= 2**31:
        return None
    sharding = NamedSharding(mesh, PartitionSpec(axis_name))
    memory = jax.block_until_ready(jax.device_put(mailboxes.memory(), sharding))
    table = jax.device_put(addresses(memory, mesh), sharding)
    return Peers(jax.block_until_ready(table), memory, mailboxes)


def supported(mesh: Mesh) -> bool:
    """Whether the kernel runs on these devices."""
    devices = list(mesh.devices.flat)
    return (
        jax.__version_info__ >= (0, 11)
        and len(devices) > 1
        and all(device.platform == "gpu" for device in devices)
        and len({device.process_index for device in devices}) == 1
        and all(getattr(device, "compute_capability", None) == "9.0" for device in devices)
    )


def addresses(memory: Array, mesh: Mesh) -> np.ndarray:
    """`Peers.table` of the shards of `memory`."""
    shards = {shard.device: shard.data for shard in memory.addressable_shards}
    pointers = [shards[device].unsafe_buffer_pointer() for device in mesh.devices.flat]
    words = np.array(pointers, np.uint64).view(np.int32).reshape(-1, 2)
    table = [[rank, *np.roll(words, -rank, axis=0).flat] for rank in range(len(words))]
    return np.array(table, np.int32)
