"""Rotary position embeddings (Su et al., 2021) with the rescalings that checkpoints ask for."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from sparsespec_jax.models.config import RopeConfig


def rope_frequencies(rope: RopeConfig, head_dim: int) -> tuple[np.ndarray, float]:
    """Inverse frequencies [head_dim / 2] float32, and the factor that cos and sin are scaled by."""
    inverse = 1.0 / rope.theta ** (np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    rescale = {"default": _keep, "linear": _linear, "llama3": _llama3, "yarn": _yarn}[rope.kind]
    inverse, attention_factor = rescale(inverse, rope, head_dim)
    return inverse.astype(np.float32), attention_factor


def rope_tables(
    positions: jax.Array, rope: RopeConfig, head_dim: int
) -> tuple[jax.Array, jax.Array]:
    """cos and sin, each [..., head_dim / 2] float32, of `positions` [...]."""
    inverse, attention_factor = rope_frequencies(rope, head_dim)
    angles = positions[..., None].astype(jnp.float32) * inverse
    return jnp.cos(angles) * attention_factor, jnp.sin(angles) * attention_factor


def _keep(inverse, rope, head_dim):
    return inverse, 1.0


def _linear(inverse, rope, head_dim):
    return inverse / rope.factor, 1.0


def _llama3(inverse, rope, head_dim):
    """Llama 3.1: long wavelengths are stretched by `factor`, short ones kept, a ramp between."""
    original = rope.original_max_position_embeddings
    wavelength = 2 * math.pi / inverse
    keep = (original / wavelength - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    keep = np.clip(keep, 0.0, 1.0)
    return (1 - keep) * inverse / rope.factor + keep * inverse, 1.0


def _yarn(inverse, rope, head_dim):
    """YaRN (Peng et al., 2023): a per-channel ramp between interpolation and extrapolation."""

    def channel(rotations: float) -> float:
        """The channel that turns `rotations` times over the original context."""
        original = rope.original_max_position_embeddings
        return (
            head_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))
        )

    low, high = channel(rope.beta_fast), channel(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # no division by zero
    interpolate = np.clip((np.arange(head_dim // 2) - low) / (high - low), 0.0, 1.0)
    inverse = interpolate * inverse / rope.factor + (1 - interpolate) * inverse
    return inverse, _yarn_attention_factor(rope)


def _yarn_attention_factor(rope: RopeConfig) -> float:
    def scale(mscale: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * mscale * math.log(rope.factor) + 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return scale(rope.mscale) / scale(rope.mscale_all_dim)
    return scale(1.0)
