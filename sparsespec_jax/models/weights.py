"""Hugging Face tensors and the parameters of the decoder: one table of names, read both ways.

Hugging Face stores a projection as [out, in]. A parameter here is the rows of one or more such
tensors (`qkv`: three, interleaved by KV head), transposed so that the input comes first.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from sparsespec_jax.models.architectures import ARCHITECTURES
from sparsespec_jax.models.config import ModelConfig
from sparsespec_jax.models.parameters import Params, ParamSpec, describe

_TENSORS = {
    "embedding": ("model.embed_tokens.weight",),
    "final_norm": ("model.norm.weight",),
    "lm_head": ("lm_head.weight",),
    "attention_norm": ("input_layernorm.weight",),
    "qkv": ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
    "qkv_bias": ("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"),
    "q_norm": ("self_attn.q_norm.weight",),
    "k_norm": ("self_attn.k_norm.weight",),
    "out": ("self_attn.o_proj.weight",),
    "mlp_norm": ("post_attention_layernorm.weight",),
    "gate_up": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "down": ("mlp.down_proj.weight",),
}
_IGNORED = re.compile(r"rotary_emb\.inv_freq$")  # a buffer that old releases saved


@dataclasses.dataclass(frozen=True)
class Parameter:
    """One leaf of the parameter tree, and the shapes of the tensors that it is made of, by name."""

    kind: str
    spec: ParamSpec
    tensors: dict[str, tuple[int, ...]]


def parameters(config: ModelConfig) -> list[Parameter]:
    """Every parameter, in the order of the tree's leaves."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(describe(config), is_leaf=_is_spec)
    result = []
    for path, spec in leaves:
        *above, kind = jax.tree_util.keystr(path, simple=True, separator=".").split(".")
        prefix = f"model.layers.{above[1]}." if above else ""
        shapes = _shapes(kind, spec, config)
        names = [prefix + name for name in _TENSORS[kind]]
        result.append(Parameter(kind, spec, dict(zip(names, shapes, strict=True))))
    return result


def part_of(
    whole: Parameter, own: Parameter, tensor: str, shard: int, shards: int
) -> tuple[slice, ...]:
    """Which part of a tensor shard number `shard` of a model is made of.

    `whole` and `own` are the parameter of the model and of its shard (`parallel/model_shards.py`).
    The part is smaller than the shard's tensor where the vocabulary ends before it.
    """
    window = []
    for size, length in zip(whole.tensors[tensor], own.tensors[tensor], strict=True):
        if "vocab" in whole.spec.axes:
            start = 0 if size == length else min(shard * length, size)
        else:  # of a KV head that several shards have, each takes the whole
            start = shard * size // shards // length * length
        window.append(slice(start, min(start + length, size)))
    return tuple(window)


def unflatten(config: ModelConfig, leaves: Sequence[Any]) -> Params:
    """The parameter tree with `leaves` in the order of `parameters`."""
    return jax.tree.unflatten(jax.tree.structure(describe(config), is_leaf=_is_spec), leaves)


def join(parameter: Parameter, tensors: Sequence[np.ndarray], config: ModelConfig) -> np.ndarray:
    """The parameter made of `tensors`, in the order of `parameter.tensors`."""
    shape = parameter.spec.shape
    if parameter.kind in ("qkv", "qkv_bias"):
        by_head = [
            tensor.reshape(config.num_kv_heads, -1, config.head_dim, *tensor.shape[1:])
            for tensor in tensors
        ]
        rows = np.concatenate(by_head, axis=1)
        rows = rows.reshape(-1, *rows.shape[3:])
    else:
        rows = np.concatenate(tensors) if len(tensors) > 1 else tensors[0]
    return (_transpose(rows) if _is_projection(parameter.spec) else rows).reshape(shape)


def split(parameter: Parameter, array: np.ndarray, config: ModelConfig) -> dict[str, np.ndarray]:
    """The inverse of `join`: tensors by name."""
    spec, shapes = parameter.spec, list(parameter.tensors.values())
    rows = np.asarray(array)
    if _is_projection(spec):
        rows = _transpose(rows.reshape(spec.fan_in, -1))
    if parameter.kind in ("qkv", "qkv_bias"):
        group = config.group
        rows = rows.reshape(config.num_kv_heads, group + 2, config.head_dim, *shapes[0][1:])
        parts = [rows[:, :group], rows[:, group], rows[:, group + 1]]
    else:
        parts = np.split(rows, len(shapes))
    return {
        name: np.ascontiguousarray(part).reshape(shape)
        for (name, shape), part in zip(parameter.tensors.items(), parts, strict=True)
    }


def zero_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Tensors that the architecture has and this decoder does not: loadable while all zero.

    With `attention_bias`, Llama and Qwen3 have a bias on the output projection. The checkpoints
    that set it are other families in Llama's clothes, and fill that bias with zeros.
    """
    if not config.qkv_bias or ARCHITECTURES[config.architecture].qkv_bias:
        return {}
    return {
        f"model.layers.{layer}.self_attn.o_proj.bias": (config.hidden_size,)
        for layer in range(config.num_layers)
    }


def check_tensors(shapes: dict[str, tuple[int, ...]], config: ModelConfig, source: str) -> None:
    """Raise a ValueError naming every missing, unexpected or misshapen tensor of a checkpoint."""
    expected = {}
    for parameter in parameters(config):
        expected |= parameter.tensors
    optional = zero_tensors(config)
    if config.tie_word_embeddings:
        optional["lm_head.weight"] = (config.vocab_size, config.hidden_size)
    found = {name: shape for name, shape in shapes.items() if not _IGNORED.search(name)}
    problems = [f"{name} is missing" for name in expected.keys() - found.keys()]
    expected |= optional
    problems += [f"{name} is unexpected" for name in found.keys() - expected.keys()]
    problems += [
        f"{name} has shape {found[name]}, expected {expected[name]}"
        for name in expected.keys() & found.keys()
        if expected[name] != found[name]
    ]
    if problems:
        shown = sorted(problems)[:20]
        rest = f"; and {len(problems) - 20} more" if len(problems) > 20 else ""
        raise ValueError(
            f"{source} does not fit {config.architecture} as configured: {'; '.join(shown)}{rest}"
        )


def _shapes(kind: str, spec: ParamSpec, config: ModelConfig) -> list[tuple[int, ...]]:
    """Hugging Face's shapes of a parameter's tensors."""
    heads, kv, dim = config.num_heads, config.num_kv_heads, config.head_dim
    if kind == "qkv":
        return [(n * dim, config.hidden_size) for n in (heads, kv, kv)]
    if kind == "qkv_bias":
        return [(n * dim,) for n in (heads, kv, kv)]
    if kind == "gate_up":
        return [(config.intermediate_size, config.hidden_size)] * 2
    if _is_projection(spec):
        return [(math.prod(spec.shape) // spec.fan_in, spec.fan_in)]
    return [spec.shape]


def _is_projection(spec: ParamSpec) -> bool:
    return spec.fan_in > 0 and "vocab" not in spec.axes


def _transpose(matrix: np.ndarray) -> np.ndarray:
    """A contiguous transpose, in tiles that stay in cache: about five times a strided copy."""
    bits = matrix.view(f"u{matrix.dtype.itemsize}")
    result = np.empty(bits.shape[::-1], bits.dtype)
    for start in range(0, len(bits), 256):
        result[:, start : start + 256] = bits[start : start + 256].T
    return result.view(matrix.dtype)


def _is_spec(leaf: Any) -> bool:
    return isinstance(leaf, ParamSpec)
