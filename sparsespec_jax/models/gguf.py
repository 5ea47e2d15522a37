"""GGUF files, through the `gguf` library: metadata as a config.json, tensors dequantised."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np

from sparsespec_jax.models.architectures import config_from_hf
from sparsespec_jax.models.config import RopeConfig
from sparsespec_jax.models.rope import rope_frequencies

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_FACTORS = "rope_freqs.weight"  # llama3 scaling, as one divisor per frequency
_PLAIN_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


class GGUFCheckpoint:
    """A GGUF file whose tensors are dequantised one at a time, under their Hugging Face names."""

    def __init__(self, path: Path):
        self.path = path
        self.generation_config: dict[str, Any] = {}
        reader = open_gguf(path)
        self._tensors = {_hf_name(tensor.name): tensor for tensor in reader.tensors}
        factors = self._tensors.pop(_ROPE_FACTORS, None)
        raw = _config(read_metadata(reader), self._tensors)
        if factors is not None:
            raw["rope_scaling"] = _llama3_scaling(np.array(factors.data), raw)
        self.config = config_from_hf(raw)
        self._interleaved = raw["model_type"] == "llama"

    def open(self) -> None:
        self.shapes = {
            name: tuple(int(size) for size in reversed(tensor.shape))
            for name, tensor in self._tensors.items()
        }
        kinds = {
            tensor.tensor_type.name for tensor in self._tensors.values() if len(tensor.shape) > 1
        }
        plain = len(kinds) == 1 and _PLAIN_DTYPES.get(kinds.pop())
        self.dtype = plain or "bfloat16"

    def read(self, tensor: str, window: tuple[slice, ...] = ()) -> np.ndarray:
        """A tensor, or the part of it in `window`."""
        from gguf import dequantize

        entry = self._tensors[tensor]
        try:
            array = np.array(dequantize(entry.data, entry.tensor_type), np.float32)
        except NotImplementedError as error:
            raise ValueError(
                f"{entry.name} in {self.path} has unsupported type {entry.tensor_type.name}"
            ) from error
        array = array.reshape(self.shapes[tensor])
        heads = {"q_proj": self.config.num_heads, "k_proj": self.config.num_kv_heads}
        projection = tensor.split(".")[-2]
        if self._interleaved and projection in heads:
            array = _rotate_half_layout(array, heads[projection])
        return array[window]


def open_gguf(path: Path) -> Any:
    """A `gguf.GGUFReader`, or an error that says what is wrong with the file."""
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise ImportError(
            "reading GGUF files needs the gguf package: pip install sparsespec-jax[gguf]"
        ) from error
    try:
        return GGUFReader(path)
    except (ValueError, IndexError) as error:
        raise ValueError(f"{path} is not a readable GGUF file: {error}") from error


def read_metadata(reader: Any) -> dict[str, Any]:
    return {key: field.contents() for key, field in reader.fields.items()}


def _config(metadata: dict[str, Any], tensors: dict[str, Any]) -> dict[str, Any]:
    """The metadata in the words of a config.json."""
    kind = metadata.get("general.architecture")
    if kind not in _ARCHITECTURES:
        raise ValueError(
            f"unsupported GGUF architecture {kind!r}; supported: {', '.join(_ARCHITECTURES)}"
        )
    if metadata.get("split.count", 1) > 1:
        raise ValueError("this GGUF file is one part of several: merge them with gguf-split first")
    if "model.embed_tokens.weight" not in tensors:
        raise ValueError("the GGUF file has no tensor token_embd.weight")

    def get(key: str, default: Any = None) -> Any:
        return metadata.get(f"{kind}.{key}", default)

    eos = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    epsilon = get("attention.layer_norm_rms_epsilon", 1e-6)
    return {
        "architectures": [_ARCHITECTURES[kind]],
        "model_type": kind,
        "vocab_size": int(tensors["model.embed_tokens.weight"].shape[1]),
        "hidden_size": get("embedding_length"),
        "intermediate_size": get("feed_forward_length"),
        "num_hidden_layers": get("block_count"),
        "num_attention_heads": get("attention.head_count"),
        "num_key_value_heads": get("attention.head_count_kv"),
        "head_dim": get("attention.key_length"),
        "max_position_embeddings": get("context_length"),
        "rms_norm_eps": float(str(np.float32(epsilon))),  # 1e-05, not 9.99999974e-06
        "rope_theta": get("rope.freq_base", 10_000.0),
        "rope_scaling": _scaling(get),
        "attention_bias": "model.layers.0.self_attn.q_proj.bias" in tensors,
        "tie_word_embeddings": "lm_head.weight" not in tensors,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": [token for token in eos if token is not None],
    }


def _scaling(get: Any) -> dict[str, Any] | None:
    kind = get("rope.scaling.type", "none")
    if kind == "none":
        return None
    if get("rope.scaling.attn_factor", 1.0) != 1.0:
        raise ValueError("unsupported GGUF setting rope.scaling.attn_factor")
    return {
        "rope_type": kind,
        "factor": get("rope.scaling.factor"),
        "original_max_position_embeddings": get("rope.scaling.original_context_length"),
    }


def _llama3_scaling(divisors: np.ndarray, raw: dict[str, Any]) -> dict[str, Any]:
    """The llama3 scaling that gives these divisors: GGUF does not store its parameters."""
    scaling = {
        "factor": float(divisors.max()),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    theta = raw["rope_theta"]
    plain, _ = rope_frequencies(RopeConfig(theta), 2 * divisors.size)
    scaled, _ = rope_frequencies(RopeConfig(theta, "llama3", **scaling), 2 * divisors.size)
    if not np.allclose(scaled * divisors, plain, rtol=1e-4):
        raise ValueError(f"{_ROPE_FACTORS} is not Llama 3's RoPE scaling: unsupported")
    return {"rope_type": "llama3", **scaling}


def _hf_name(name: str) -> str:
    """A tensor's Hugging Face name; one that has none keeps its own."""
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if match and match[2] in _LAYER:
        return f"model.layers.{match[1]}.{_LAYER[match[2]]}.{match[3]}"
    return _TOP.get(name, name)


def _rotate_half_layout(array: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q or k, from channels paired as (0, 1), (2, 3)... to (0, d/2), (1, d/2 + 1)..."""
    rows = array.reshape(heads, -1, 2, *array.shape[1:])
    return rows.swapaxes(1, 2).reshape(array.shape)
