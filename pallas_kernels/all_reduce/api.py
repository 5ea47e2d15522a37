"""Contract and dispatch of `all_reduce` and `all_reduce_add_norm`."""

from collections.abc import Hashable

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.add_norm import add_norm
from pallas_kernels.add_norm.api import check_arguments
from pallas_kernels.all_reduce import reference
from pallas_kernels.all_reduce.peers import Peers
from pallas_kernels.dispatch import Implementation, check, resolve
from pallas_kernels.matmul.reference import add_parts


def all_reduce(
    x: Array,
    axis_name: Hashable,
    *,
    peers: Peers | None = None,
    implementation: Implementation = "auto",
) -> Array:
    """The sum of the devices' `x` along a mesh axis, inside `jax.shard_map`.

    The kernel adds in float32, in the order of the devices, and rounds once: all devices get the
    same bits, whatever the number of rows. It is for the few rows of a decoding step, where NCCL
    spends its time on everything but moving bytes. NCCL does the rest, also of "pallas": without
    `peers`, more rows than theirs, another width or dtype. Only "xla" has a gradient.

    Args:
        x: [..., hidden] on each device.
        axis_name: of the mesh.
        peers: from `connect`, this device's shard; see there for what calls that share it owe.

    Returns:
        Like `x`, on every device.
    """
    pallas, _ = resolve(implementation, None)
    if not (pallas and _fits(x, axis_name, peers)):
        return reference.all_reduce(x, axis_name)
    from pallas_kernels.all_reduce import mosaic_gpu

    return mosaic_gpu.all_reduce(x.reshape(-1, x.shape[-1]), peers).reshape(x.shape)


def all_reduce_add_norm(
    x: Array,
    delta: Array,
    scale: Array,
    axis_name: Hashable,
    *,
    eps: float = 1e-6,
    peers: Peers | None = None,
    implementation: Implementation = "auto",
) -> tuple[Array, Array]:
    """`add_norm` of a `delta` that is the sum of what the devices of an axis have of it.

    The devices' sum is rounded to the dtype of `x`, as `all_reduce` does, and so is what a device
    contributes if it comes in parts.

    Args:
        x: [..., hidden] float16, bfloat16 or float32, the same on all devices.
        delta: like `x`, or parts of it, [S, ..., hidden], on each device.
        scale: [hidden] of x's dtype.
        axis_name: of the mesh.
        eps: of the norm.
        peers: see `all_reduce`.

    Returns:
        The sum and its norm, both like `x`, on every device.
    """
    pallas, _ = resolve(implementation, None)
    check_arguments(x, delta, scale, eps)
    if not (pallas and _fits(x, axis_name, peers)):
        own = delta if delta.ndim == x.ndim else add_parts(delta)
        total = reference.all_reduce(own, axis_name)
        return add_norm(x, total, scale, eps=eps, implementation=implementation)
    from pallas_kernels.all_reduce import mosaic_gpu

    rows = x.reshape(-1, x.shape[-1])
    outs = mosaic_gpu.all_reduce_add_norm(
        rows, delta.reshape(-1, *rows.shape), scale, peers, eps=float(eps)
    )
    return tuple(out.reshape(x.shape) for out in outs)


def _fits(x: Array, axis_name: Hashable, peers: Peers | None) -> bool:
    if peers is None or x.ndim == 0 or x.size == 0:
        return False
    boxes = peers.mailboxes
    check(
        boxes.devices == lax.axis_size(axis_name) and peers.table.shape[0] == 1,
        f"peers is of {boxes.devices} devices, a shard of {peers.table.shape[0]}, but must be this "
        f"device's shard of the {lax.axis_size(axis_name)} along {axis_name!r}",
    )
    hidden = x.shape[-1]
    return (
        x.dtype in (jnp.bfloat16, jnp.float16)
        and hidden == boxes.hidden
        and x.size // hidden <= boxes.rows
    )
