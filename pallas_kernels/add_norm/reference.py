"""XLA reference of `add_norm`."""

from jax import Array

from pallas_kernels.append_kv.reference import rms_norm


def add_norm(x: Array, delta: Array | None, scale: Array, *, eps: float) -> tuple[Array, Array]:
    if delta is not None:
        x = x + delta
    return x, rms_norm(x, scale, eps)
