"""Models with the shapes of real ones and random weights: for timing, acceptance means nothing."""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp

from sparsespec_jax.models.config import ModelConfig
from sparsespec_jax.models.parameters import Params, describe, map_specs

SHAPES = {
    "qwen3-8b": dict(vocab_size=151936, hidden_size=4096, intermediate_size=12288, num_layers=36,
                     num_heads=32, num_kv_heads=8, head_dim=128),
    "qwen3-1.7b": dict(vocab_size=151936, hidden_size=2048, intermediate_size=6144, num_layers=28,
                       num_heads=16, num_kv_heads=8, head_dim=128, tie_word_embeddings=True),
    "tiny": dict(vocab_size=512, hidden_size=64, intermediate_size=128, num_layers=2,
                 num_heads=4, num_kv_heads=2, head_dim=16),
}  # fmt: skip


def model_of(shape: str, max_context: int) -> ModelConfig:
    return ModelConfig(
        architecture="Qwen3ForCausalLM",
        max_position_embeddings=max_context,
        qk_norm=True,
        **SHAPES[shape],
    )


def random_params(model: ModelConfig, dtype: jnp.dtype) -> Params:
    """Small random weights, made on the device one array at a time."""
    seeds = itertools.count()

    @functools.partial(jax.jit, static_argnums=0)
    def make(spec, seed):
        if spec.fan_in <= 0:
            return jnp.ones(spec.shape, dtype)
        return spec.fan_in**-0.5 * jax.random.normal(jax.random.key(seed), spec.shape, dtype)

    return map_specs(lambda spec: make(spec, next(seeds)), describe(model))
