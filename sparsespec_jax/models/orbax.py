"""Orbax checkpoints: `params/`, written by Orbax, beside the JSON and tokenizer files of a model.

Parameters are restored straight into their shardings, in the dtype asked for.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np

from sparsespec_jax.models.architectures import config_from_hf
from sparsespec_jax.models.config import ModelConfig
from sparsespec_jax.models.hub import read_json
from sparsespec_jax.models.huggingface import write_configs
from sparsespec_jax.models.parameters import Params, ParamSpec, check_params, describe, map_specs
from sparsespec_jax.parallel.sharding import Placement


def is_orbax(path: Path) -> bool:
    return (path / "params").is_dir()


class OrbaxCheckpoint:
    """A directory that `save_orbax` wrote."""

    def __init__(self, path: Path):
        self.path = path
        raw = read_json(path / "config.json")
        self.generation_config = read_json(path / "generation_config.json", default={})
        self.config = config_from_hf(raw, self.generation_config)
        self.dtype = raw.get("torch_dtype")

    def open(self) -> None:
        """Nothing to do: Orbax finds its own files."""

    def restore(self, dtype: np.dtype, placement: Placement) -> Params:
        """The parameters in their places, but for those that do not divide: on every device."""
        import orbax.checkpoint as ocp

        def target(spec: ParamSpec) -> jax.ShapeDtypeStruct:
            sharding = placement.of_param(spec)
            try:
                sharding.shard_shape(spec.shape)
            except ValueError:
                sharding = placement.replicated
            return jax.ShapeDtypeStruct(spec.shape, dtype, sharding=sharding)

        with ocp.StandardCheckpointer() as checkpointer:
            path = (self.path / "params").absolute()
            stored = checkpointer.metadata(path).item_metadata.tree
            check_params(stored, self.config)
            return checkpointer.restore(path, map_specs(target, describe(self.config)))


def save_orbax(
    params: Params,
    config: ModelConfig,
    directory: str | Path,
    *,
    generation_config: dict[str, Any] | None = None,
) -> None:
    """Write `params` and the configuration; `directory` must not hold a checkpoint yet."""
    import orbax.checkpoint as ocp

    check_params(params, config)
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    dtype = params["embedding"].dtype.name
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save((directory / "params").absolute(), params)
    write_configs(directory, config, dtype, generation_config)
