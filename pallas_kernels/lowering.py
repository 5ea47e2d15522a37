"""Lowering for NVIDIA GPUs on a machine without one, to test kernels where there is none.

Lowering runs the whole path from Python to Triton IR, so it finds operations the GPU backend lacks,
arrays that are no power of two and wrong block specs. It does not compile machine code: register
and shared-memory limits stay unchecked.
"""

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from pallas_kernels import gpus


def lower_for_cuda(
    f: Callable[..., Any],
    *args: Any,
    device_kind: str = "NVIDIA H200",
    **kwargs: Any,
) -> jax.stages.Lowered:
    """Traces and lowers `f(*args, **kwargs)` for platform "cuda"; no GPU is needed.

    Ops of this package must be asked for their real kernels, `implementation="pallas",
    interpret=False`: "auto" looks at the default backend of this process.

    Args:
        f: a function of arrays; jitted here unless it already is (so that donations and static
            arguments are kept).
        *args: arrays or `jax.ShapeDtypeStruct`s.
        device_kind: the GPU to lower for, a key of `gpus.GPUS`.
        **kwargs: keyword arguments of `f`.

    Returns:
        The lowered computation; `.as_text()` shows its StableHLO.
    """
    if not hasattr(f, "trace"):
        f = jax.jit(f)
    with contextlib.ExitStack() as stack:
        stack.enter_context(_abstract_gpu(device_kind))
        stack.enter_context(gpus.target(gpus.GPUS[device_kind]))
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", "The Pallas Triton backend is deprecated")
        return f.trace(*args, **kwargs).lower(lowering_platforms=("cuda",))


def _abstract_gpu(device_kind: str) -> contextlib.AbstractContextManager:
    """From jax 0.11 on, the Triton lowering asks the mesh in context what GPU it lowers for."""
    if jax.__version_info__ < (0, 11):
        return contextlib.nullcontext()
    num_cores = gpus.GPUS[device_kind].multiprocessors
    device = AbstractDevice(device_kind=device_kind, num_cores=num_cores, platform="gpu")
    return use_abstract_mesh(AbstractMesh((), (), abstract_device=device))
