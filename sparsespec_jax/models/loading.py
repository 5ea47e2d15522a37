"""Loading a model, wherever it is: Hugging Face directory or hub id, Orbax checkpoint, GGUF file.

Weights are read one tensor at a time, assembled on the host one parameter at a time and sent
straight to their devices; a few parameters are under way at once. Of a model that is split over
devices, each device's part is read and assembled on its own, as the smaller model that it is.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from sparsespec_jax.models import hub
from sparsespec_jax.models.config import ModelConfig
from sparsespec_jax.models.gguf import GGUFCheckpoint
from sparsespec_jax.models.huggingface import HFCheckpoint
from sparsespec_jax.models.orbax import OrbaxCheckpoint, is_orbax
from sparsespec_jax.models.parameters import Params
from sparsespec_jax.models.weights import (
    Parameter,
    check_tensors,
    join,
    parameters,
    part_of,
    unflatten,
    zero_tensors,
)
from sparsespec_jax.parallel.model_shards import divisible, place_params, shard_of
from sparsespec_jax.parallel.sharding import Placement

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Checkpoint = HFCheckpoint | GGUFCheckpoint | OrbaxCheckpoint


@dataclasses.dataclass(frozen=True)
class LoadedModel:
    """A model's parameters, and what its checkpoint says about using them.

    `params` are those of the model that is split over the devices asked for, see `place_params`.
    `generation_defaults` holds the sampling parameters of generation_config.json, by the names used
    there; empty if it does not ask for sampling. `path` is where the files are on this machine.
    """

    config: ModelConfig
    params: Params
    generation_defaults: dict[str, Any]
    path: Path


def load_model(
    source: str | Path,
    *,
    dtype: Dtype = "auto",
    placement: Placement | None = None,
    progress: bool = True,
) -> LoadedModel:
    """Load the model at `source`: a path, or a hub id such as "Qwen/Qwen3-8B".

    dtype: "auto" keeps the checkpoint's (bfloat16 for a quantised GGUF file).
    placement: the devices that share the model; by default, the default device.

    Raises ValueError for a checkpoint that does not fit, or does not divide among the devices.
    """
    checkpoint = open_checkpoint(source)
    checkpoint.open()
    params = read_params(
        checkpoint, resolve_dtype(dtype, checkpoint), placement=placement, progress=progress
    )
    return LoadedModel(
        checkpoint.config,
        params,
        generation_defaults(checkpoint.generation_config),
        checkpoint.path,
    )


def load_config(source: str | Path) -> ModelConfig:
    """The configuration alone; of a hub id, only the JSON files are downloaded."""
    return open_checkpoint(source, hub.CONFIG_FILES).config


def open_checkpoint(
    source: str | Path,
    files: Iterable[str] = (*hub.CONFIG_FILES, *hub.TOKENIZER_FILES, *hub.WEIGHT_FILES),
) -> Checkpoint:
    """The checkpoint at `source`, of which only the configuration has been read."""
    path = hub.resolve(source, tuple(files))
    if path.is_file():
        if path.suffix != ".gguf":
            raise ValueError(f"{path} is neither a directory nor a .gguf file")
        return GGUFCheckpoint(path)
    return OrbaxCheckpoint(path) if is_orbax(path) else HFCheckpoint(path)


def resolve_dtype(dtype: Dtype, checkpoint: Checkpoint) -> np.dtype:
    """The dtype to load an opened checkpoint in."""
    name = checkpoint.dtype if dtype == "auto" else dtype
    allowed = Dtype.__args__[1:]
    if name not in allowed:
        raise ValueError(f"dtype must be auto or one of {', '.join(allowed)}, got {name!r}")
    return jnp.dtype(name)


def read_params(
    checkpoint: Checkpoint,
    dtype: np.dtype,
    *,
    placement: Placement | None = None,
    progress: bool = True,
) -> Params:
    """The parameters of an opened checkpoint, on their devices."""
    place = None if placement is None else placement.assemble
    placement = placement or Placement.single_device()
    config, shards = checkpoint.config, placement.shards
    split = divisible(config, shards)
    if isinstance(checkpoint, OrbaxCheckpoint):
        return place_params(checkpoint.restore(dtype, placement), config, placement)
    check_tensors(checkpoint.shapes, config, str(checkpoint.path))
    for name in zero_tensors(config):
        if name in checkpoint.shapes and checkpoint.read(name).any():
            raise ValueError(f"{name} is not zero: this decoder's output projection has no bias")

    part = shard_of(split, shards)

    def assemble(pair: tuple[Parameter, Parameter]) -> dict[int, np.ndarray]:
        """The parts of a parameter that devices of this process hold, by shard."""
        whole, own = pair
        found = {}
        for shard in (0,) if own.spec == whole.spec else placement.local_shards:
            tensors = []
            for name, shape in own.tensors.items():
                window = part_of(whole, own, name, shard, shards) if shards > 1 else ()
                tensor = checkpoint.read(name, window).astype(dtype)
                missing = shape[0] - len(tensor)
                padding = [(0, missing), *[(0, 0)] * (tensor.ndim - 1)]
                tensors.append(np.pad(tensor, padding) if missing else tensor)
            found[shard] = join(own, tensors, part)
        return found

    todo = list(zip(parameters(config), parameters(part), strict=True))
    specs, leaves = [parameter.spec for parameter in parameters(split)], []
    with tqdm(
        total=sum(int(np.prod(spec.shape)) for spec in specs) * dtype.itemsize,
        desc="loading",
        unit="B",
        unit_scale=True,
        disable=not progress,
    ) as bar:
        for spec, parts in zip(specs, _ahead(assemble, todo), strict=True):
            leaves.append(place(spec, parts) if place else jax.device_put(parts[0]))
            bar.update(leaves[-1].nbytes)
        return jax.block_until_ready(unflatten(config, leaves))


def generation_defaults(generation_config: dict[str, Any]) -> dict[str, Any]:
    """The sampling parameters that a generation_config.json recommends."""
    if not generation_config.get("do_sample"):
        return {}
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    return {
        name: generation_config[name] for name in names if generation_config.get(name) is not None
    }


def _ahead(function: Callable, items: Iterable, count: int = 3) -> Iterator:
    """`map(function, items)`, in order, with up to `count` results computed ahead in threads."""
    with ThreadPoolExecutor(count) as pool:
        pending = collections.deque()
        for item in items:
            pending.append(pool.submit(function, item))
            if len(pending) > count:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
