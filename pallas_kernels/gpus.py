"""The GPU that kernels are shaped for: the one of this process, or the one lowered for."""

import contextlib
import contextvars
from collections.abc import Iterator
from typing import NamedTuple

import jax


class Gpu(NamedTuple):
    capability: tuple[int, int]
    """Compute capability."""
    multiprocessors: int

    @property
    def shared_memory(self) -> int:
        """Bytes of shared memory that one program can have."""
        return _SHARED_MEMORY.get(self.capability, 99 << 10)


_SHARED_MEMORY = {(8, 0): 163 << 10, (9, 0): 227 << 10, (10, 0): 227 << 10}
GPUS = {
    "NVIDIA A100-SXM4-80GB": Gpu((8, 0), 108),
    "NVIDIA L40": Gpu((8, 9), 142),
    "NVIDIA H100 80GB HBM3": Gpu((9, 0), 132),
    "NVIDIA H200": Gpu((9, 0), 132),
    "NVIDIA B200": Gpu((10, 0), 148),
}
_target: contextvars.ContextVar[Gpu | None] = contextvars.ContextVar("target", default=None)


def current() -> Gpu:
    """The GPU that a kernel traced now will run on; an H200 in a process without any."""
    target = _target.get()
    if target is not None:
        return target
    if jax.default_backend() != "gpu":
        return GPUS["NVIDIA H200"]
    device = jax.devices()[0]
    if device.device_kind in GPUS:
        return GPUS[device.device_kind]
    major, minor = (int(part) for part in device.compute_capability.split("."))
    return Gpu((major, minor), device.core_count)


@contextlib.contextmanager
def target(gpu: Gpu) -> Iterator[None]:
    """Shapes the kernels traced inside for `gpu`."""
    token = _target.set(gpu)
    try:
        yield
    finally:
        _target.reset(token)
