"""Models with the shapes of real ones and random weights: for timing, acceptance means nothing."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from sparsespec_jax.models.config import ModelConfig
from sparsespec_jax.models.parameters import Params, ParamSpec, describe, map_specs
from sparsespec_jax.parallel.model_shards import divisible
from sparsespec_jax.parallel.sharding import Placement

SHAPES = {
    "qwen3-8b": dict(vocab_size=151936, hidden_size=4096, intermediate_size=12288, num_layers=36,
                     num_heads=32, num_kv_heads=8, head_dim=128),
    "qwen3-14b": dict(vocab_size=151936, hidden_size=5120, intermediate_size=17408, num_layers=40,
                      num_heads=40, num_kv_heads=8, head_dim=128),
    "qwen3-32b": dict(vocab_size=151936, hidden_size=5120, intermediate_size=25600, num_layers=64,
                      num_heads=64, num_kv_heads=8, head_dim=128),
    "qwq-32b": dict(vocab_size=152064, hidden_size=5120, intermediate_size=27648, num_layers=64,
                    num_heads=40, num_kv_heads=8, head_dim=128),
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


def random_params(
    model: ModelConfig, dtype: jnp.dtype, placement: Placement | None = None
) -> Params:
    """Small random weights, made in their places (by default one device), an array at a time."""
    placement = placement or Placement.single_device()
    seeds = itertools.count()

    def make(spec: ParamSpec) -> jax.Array:
        return _make(spec, dtype, placement.of_param(spec))(next(seeds))

    return map_specs(make, describe(divisible(model, placement.shards)))


@functools.cache
def _make(spec: ParamSpec, dtype: jnp.dtype, sharding: jax.sharding.Sharding) -> Callable:
    def make(seed):
        if spec.fan_in <= 0:
            return jnp.ones(spec.shape, dtype)
        return spec.fan_in**-0.5 * jax.random.normal(jax.random.key(seed), spec.shape, dtype)

    return jax.jit(make, out_shardings=sharding)
