"""Hugging Face checkpoint directories: config.json, generation_config.json, safetensors."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file
from tqdm import tqdm

from sparsespec_jax.models.architectures import config_from_hf, config_to_hf
from sparsespec_jax.models.config import ModelConfig
from sparsespec_jax.models.hub import TOKENIZER_FILES, read_json, write_json
from sparsespec_jax.models.parameters import Params, check_params
from sparsespec_jax.models.weights import Parameter, parameters, split, zero_tensors

_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_INDEX = "model.safetensors.index.json"


class HFCheckpoint:
    """A checkpoint directory whose tensors are read one at a time."""

    def __init__(self, path: Path):
        self.path = path
        raw = read_json(path / "config.json")
        self.generation_config = read_json(path / "generation_config.json", default={})
        self.config = config_from_hf(raw, self.generation_config)
        self._declared = raw.get("dtype") or raw.get("torch_dtype")

    def open(self) -> None:
        """Read the headers of the safetensors files: sets `shapes` and `dtype`."""
        self._files, self.shapes, dtypes = {}, {}, {}
        for name in self._file_names():
            file = safe_open(self.path / name, framework="np")
            for tensor in file.keys():  # noqa: SIM118 (not a dict)
                header = file.get_slice(tensor)
                self._files[tensor] = file
                self.shapes[tensor] = tuple(header.get_shape())
                dtypes[tensor] = header.get_dtype()
                if dtypes[tensor] not in _DTYPES:
                    raise ValueError(
                        f"tensor {tensor} in {self.path / name} has unsupported dtype "
                        f"{dtypes[tensor]}; supported: {', '.join(_DTYPES)}"
                    )
        stored = next((_DTYPES[dtype] for dtype in dtypes.values()), None)
        self.dtype = self._declared or stored

    def read(self, tensor: str, window: tuple[slice, ...] = ()) -> np.ndarray:
        """A tensor, or the part of it in `window`, which is all that is read then."""
        file = self._files[tensor]
        return file.get_slice(tensor)[window] if window else file.get_tensor(tensor)

    def _file_names(self) -> list[str]:
        if (self.path / _INDEX).exists():
            index = read_json(self.path / _INDEX)
            names = sorted(set(index["weight_map"].values()))
            for name in names:
                if not (self.path / name).exists():
                    raise FileNotFoundError(f"{self.path} has no {name}, which {_INDEX} names")
            return names
        if (self.path / "model.safetensors").exists():
            return ["model.safetensors"]
        names = sorted(path.name for path in self.path.glob("*.safetensors"))
        if not names:
            pickles = [p.name for s in ("bin", "pt", "pth") for p in self.path.glob(f"*.{s}")]
            hint = f"; {', '.join(sorted(pickles))}: convert to safetensors first"
            raise FileNotFoundError(
                f"{self.path} has no *.safetensors file{hint if pickles else ''}"
            )
        return names


def save_hf(
    params: Params,
    config: ModelConfig,
    directory: str | Path,
    *,
    dtype: str | None = None,
    generation_config: dict[str, Any] | None = None,
    shard_bytes: int = 5_000_000_000,
    progress: bool = False,
) -> None:
    """Write the checkpoint that transformers, vLLM and `load_model` read.

    Tensors keep the dtype of `params` unless `dtype` names another. Files hold up to `shard_bytes`
    (host memory is needed for one of them), with an index if there are several.
    """
    check_params(params, config)
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    leaves = jax.tree.leaves(params)
    dtype = np.dtype(dtype or leaves[0].dtype)
    shards = _shards(list(zip(parameters(config), leaves, strict=True)), shard_bytes, dtype)
    weight_map = {}
    bar = tqdm(total=len(leaves), desc="writing", unit="param", disable=not progress)
    for number, shard in enumerate(shards, 1):
        name = "model.safetensors"
        if len(shards) > 1:
            name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        tensors = {}
        for parameter, leaf in shard:
            tensors |= split(parameter, np.asarray(leaf).astype(dtype), config)
            bar.update()
        if number == 1:
            tensors |= {n: np.zeros(s, dtype) for n, s in zero_tensors(config).items()}
        weight_map |= dict.fromkeys(tensors, name)
        unfinished = directory / f"{name}.part"
        save_file(tensors, unfinished, metadata={"format": "pt"})
        unfinished.replace(directory / name)
    bar.close()
    (directory / _INDEX).unlink(missing_ok=True)
    if len(shards) > 1:
        total = dtype.itemsize * sum(leaf.size for leaf in leaves)
        write_json(
            directory / _INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map}
        )
    write_configs(directory, config, dtype.name, generation_config)
    for name in set(weight_map.values()):  # safetensors makes its files private
        shutil.copymode(directory / "config.json", directory / name)


def write_configs(
    directory: Path,
    config: ModelConfig,
    dtype: str,
    generation_config: dict[str, Any] | None,
) -> None:
    """config.json, and generation_config.json if there is anything to say in it."""
    write_json(directory / "config.json", config_to_hf(config, dtype))
    if generation_config:
        write_json(directory / "generation_config.json", generation_config)


def copy_tokenizer(source: Path, directory: Path) -> None:
    """Copy the tokenizer files that `source`, a checkpoint directory, has."""
    for name in TOKENIZER_FILES:
        if (source / name).exists():
            shutil.copyfile(source / name, directory / name)


def _shards(
    pairs: list[tuple[Parameter, jax.Array]], limit: int, dtype: np.dtype
) -> list[list[tuple[Parameter, jax.Array]]]:
    """`pairs` in order, in groups of up to `limit` bytes or of one."""
    shards, size = [[]], 0
    for parameter, leaf in pairs:
        if shards[-1] and size + leaf.size * dtype.itemsize > limit:
            shards.append([])
            size = 0
        shards[-1].append((parameter, leaf))
        size += leaf.size * dtype.itemsize
    return shards
