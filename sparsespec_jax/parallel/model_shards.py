"""A model cut into equal shards, each of which is a smaller model of the same kind.

Where a model has fewer KV heads than there are shards, they are repeated first, and the query heads
of each are split among its copies. Where its vocabulary does not divide, it gets tokens that nobody
can sample. Both make an equal model, so that nothing else needs to know.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from sparsespec_jax.models.config import ModelConfig
from sparsespec_jax.models.parameters import (
    Params,
    ParamSpec,
    check_params,
    describe,
    map_specs,
)
from sparsespec_jax.parallel.sharding import Placement


def divisible(model: ModelConfig, shards: int) -> ModelConfig:
    """The equal model that divides into `shards`; `model` itself where it does.

    Raises ValueError where there is none, naming the field that is in the way.
    """
    for field in ("num_heads", "intermediate_size"):
        if getattr(model, field) % shards:
            raise ValueError(
                f"{field}={getattr(model, field)} does not divide among tensor_parallel_size="
                f"{shards} devices: it must be a multiple of that"
            )
    if model.num_kv_heads % shards and shards % model.num_kv_heads:
        raise ValueError(
            f"num_kv_heads={model.num_kv_heads} does not divide among tensor_parallel_size="
            f"{shards} devices: one must be a multiple of the other"
        )
    share = -(-model.vocab_size // shards)
    if share * (shards - 1) >= model.vocab_size:
        raise ValueError(
            f"vocab_size={model.vocab_size} leaves one of tensor_parallel_size={shards} devices "
            f"nothing: it must be more than {share * (shards - 1)}"
        )
    return dataclasses.replace(
        model, num_kv_heads=max(model.num_kv_heads, shards), vocab_size=share * shards
    )


def shard_of(model: ModelConfig, shards: int) -> ModelConfig:
    """What one shard of a divisible model is."""
    parts = ("num_heads", "num_kv_heads", "intermediate_size", "vocab_size")
    return dataclasses.replace(model, **{name: getattr(model, name) // shards for name in parts})


def place_params(params: Params, model: ModelConfig, placement: Placement) -> Params:
    """`params` in their places: those of `model`, or of the divisible model already.

    What is in its place stays there. Raises ValueError if they fit neither.
    """
    target = divisible(model, placement.shards)
    specs = describe(target)
    shapes = jax.tree.map(jnp.shape, params)
    if target == model or shapes != map_specs(lambda spec: spec.shape, specs):
        check_params(params, model)
        params = jax.tree.map(_fit, describe(model), specs, params, is_leaf=_is_spec)

    def put(spec: ParamSpec, array: jax.Array) -> jax.Array:
        sharding = placement.of_param(spec)
        if not sharding.is_fully_addressable and array.is_fully_addressable:
            array = np.asarray(array)  # of which each process puts its part
        return jax.device_put(array, sharding)

    return jax.tree.map(put, specs, params, is_leaf=_is_spec)


def _fit(spec: ParamSpec, target: ParamSpec, array: jax.Array) -> jax.Array:
    """A parameter of the divisible model, from the model's own."""
    if spec == target:
        return array
    axis = next(i for i, name in enumerate(spec.axes) if name in ("kv_heads", "vocab"))
    if spec.axes[axis] == "vocab":
        missing = target.shape[axis] - spec.shape[axis]
        return jnp.pad(array, [(0, missing if i == axis else 0) for i in range(array.ndim)])
    kv_heads, members = spec.shape[axis : axis + 2]
    copies = target.shape[axis] // kv_heads
    own_kv = members - copies * target.shape[axis + 1] != 0  # its key and value follow the queries
    queries, *kv = jnp.split(array, [members - 2, members - 1], axis + 1) if own_kv else [array]
    queries = queries.reshape(*spec.shape[:axis], target.shape[axis], -1, *spec.shape[axis + 2 :])
    return jnp.concatenate([queries, *(jnp.repeat(x, copies, axis) for x in kv)], axis + 1)


def _is_spec(leaf) -> bool:
    return isinstance(leaf, ParamSpec)
