"""Tiny random checkpoints, one per architecture and rope kind, the same on every machine."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

REFERENCE = Path(__file__).parent / "data" / "reference_logits.npz"
LENGTH = 80

_BASE = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


def _config(architecture: str, **changes: Any) -> dict[str, Any]:
    model_type = architecture.removesuffix("ForCausalLM").lower()
    return {"architectures": [architecture], "model_type": model_type, **_BASE, **changes}


# head_dim 24 is not hidden_size / num_attention_heads (8).
CASES = {
    "qwen3": _config("Qwen3ForCausalLM", head_dim=24, rope_theta=1e6),
    "qwen3_tied": _config("Qwen3ForCausalLM", head_dim=16, tie_word_embeddings=True),
    "qwen3_yarn": _config("Qwen3ForCausalLM", head_dim=16, rope_theta=1e6, rope_scaling=_YARN),
    "qwen3_bias": _config("Qwen3ForCausalLM", head_dim=16, attention_bias=True),
    "qwen2": _config("Qwen2ForCausalLM"),
    "qwen2_yarn": _config(
        "Qwen2ForCausalLM",
        tie_word_embeddings=True,
        rope_scaling={
            **_YARN,
            "beta_fast": 16.0,
            "beta_slow": 2.0,
            "mscale": 0.7,
            "mscale_all_dim": 1.1,
            "truncate": False,
        },
    ),
    "llama": _config("LlamaForCausalLM"),
    "llama_mha": _config("LlamaForCausalLM", num_key_value_heads=4, tie_word_embeddings=True),
    "llama_llama3": _config(
        "LlamaForCausalLM", head_dim=16, rope_theta=5e5, rope_scaling=_LLAMA3, eos_token_id=[2, 3]
    ),
    "llama_linear": _config(
        "LlamaForCausalLM", head_dim=16, rope_scaling={"type": "linear", "factor": 4.0}
    ),
    "llama_bias": _config("LlamaForCausalLM", attention_bias=True),
}


def tensors(config: dict[str, Any], *, dtype: Any = np.float32) -> dict[str, np.ndarray]:
    """Random weights by Hugging Face name; each depends on its own name and shape alone."""
    hidden, ffn = config["hidden_size"], config["intermediate_size"]
    dim = config.get("head_dim", hidden // config["num_attention_heads"])
    q, kv = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    qwen2, qwen3 = (config["model_type"] == name for name in ("qwen2", "qwen3"))
    shapes = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
    }
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    for index in range(config["num_hidden_layers"]):
        layer = {
            "input_layernorm.weight": (hidden,),
            "self_attn.q_proj.weight": (q, hidden),
            "self_attn.k_proj.weight": (kv, hidden),
            "self_attn.v_proj.weight": (kv, hidden),
            "self_attn.o_proj.weight": (hidden, q),
            "post_attention_layernorm.weight": (hidden,),
            "mlp.gate_proj.weight": (ffn, hidden),
            "mlp.up_proj.weight": (ffn, hidden),
            "mlp.down_proj.weight": (hidden, ffn),
        }
        if qwen2 or config.get("attention_bias"):
            layer |= {f"self_attn.{n}_proj.bias": (s,) for n, s in (("q", q), ("k", kv), ("v", kv))}
        if config.get("attention_bias"):
            layer["self_attn.o_proj.bias"] = (hidden,)
        if qwen3:
            layer |= {"self_attn.q_norm.weight": (dim,), "self_attn.k_norm.weight": (dim,)}
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    return {name: _random(name, shape).astype(dtype) for name, shape in shapes.items()}


def write_checkpoint(directory: Path, config: dict[str, Any], **options: Any) -> Path:
    """A checkpoint directory of `config` with `tensors(config, **options)`."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors(config, **options), directory / "model.safetensors", {"format": "pt"})
    return directory


def tokens(config: dict[str, Any]) -> np.ndarray:
    """[2, LENGTH], beyond the original context of the scaled cases."""
    return np.random.RandomState(0).randint(config["vocab_size"], size=(2, LENGTH))


def _random(name: str, shape: tuple[int, ...]) -> np.ndarray:
    if name.endswith("o_proj.bias"):
        return np.zeros(shape)
    noise = np.random.RandomState(zlib.crc32(name.encode())).standard_normal(shape)
    if name.endswith("norm.weight"):
        return 1 + 0.2 * noise
    return noise * (0.5 if len(shape) == 1 else 1.3 * shape[-1] ** -0.5)
