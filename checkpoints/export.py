"""Qwen3 checkpoints in Hugging Face's layout, from and to the decoder's fused parameters."""

from __future__ import annotations

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file, save_file

from sparsespec_jax.models.config import ModelConfig
from sparsespec_jax.models.parameters import Params


def export_hf(params: Params, config: ModelConfig, directory: Path) -> None:
    """Write config.json and model.safetensors (bfloat16)."""
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: np.ascontiguousarray(np.asarray(array).astype(jnp.bfloat16))
        for name, array in to_hf(params, config).items()
    }
    temporary = directory / "model.safetensors.part"
    save_file(tensors, temporary, metadata={"format": "pt"})
    temporary.chmod(0o644)
    temporary.replace(directory / "model.safetensors")  # a reader never sees half a file
    text = json.dumps(hf_config(config), indent=2) + "\n"
    (directory / "config.json").write_text(text)


def to_hf(params: Params, config: ModelConfig) -> dict[str, np.ndarray]:
    """Tensors by Hugging Face's names; projections are [out, in]."""
    hidden, group = config.hidden_size, config.group
    tensors = {
        "model.embed_tokens.weight": params["embedding"],
        "model.norm.weight": params["final_norm"],
    }
    for index, layer in enumerate(params["layers"]):
        qkv = np.asarray(layer["qkv"])
        split = {"q": qkv[:, :, :group], "k": qkv[:, :, group], "v": qkv[:, :, group + 1]}
        named = {f"self_attn.{name}_proj": w.reshape(hidden, -1).T for name, w in split.items()}
        named |= {
            "self_attn.o_proj": np.asarray(layer["out"]).reshape(-1, hidden).T,
            "self_attn.q_norm": layer["q_norm"],
            "self_attn.k_norm": layer["k_norm"],
            "mlp.gate_proj": np.asarray(layer["gate_up"])[:, 0].T,
            "mlp.up_proj": np.asarray(layer["gate_up"])[:, 1].T,
            "mlp.down_proj": np.asarray(layer["down"]).T,
            "input_layernorm": layer["attention_norm"],
            "post_attention_layernorm": layer["mlp_norm"],
        }
        tensors |= {f"model.layers.{index}.{name}.weight": w for name, w in named.items()}
    return tensors


def import_hf(directory: Path, config: ModelConfig) -> Params:
    """The inverse of `export_hf`, as float32 numpy arrays."""
    tensors = load_file(directory / "model.safetensors")
    tensors = {name: tensor.astype(np.float32) for name, tensor in tensors.items()}
    kv, group, dim = config.num_kv_heads, config.group, config.head_dim

    def layer(index: int) -> Params:
        def weight(name: str) -> np.ndarray:
            return tensors[f"model.layers.{index}.{name}.weight"]

        def heads(name: str, count: int) -> np.ndarray:
            return weight(f"self_attn.{name}_proj").T.reshape(-1, kv, count, dim)

        gate_up = [weight("mlp.gate_proj").T, weight("mlp.up_proj").T]
        return {
            "attention_norm": weight("input_layernorm"),
            "qkv": np.concatenate([heads("q", group), heads("k", 1), heads("v", 1)], axis=2),
            "q_norm": weight("self_attn.q_norm"),
            "k_norm": weight("self_attn.k_norm"),
            "out": weight("self_attn.o_proj").T.reshape(kv, group, dim, -1),
            "mlp_norm": weight("post_attention_layernorm"),
            "gate_up": np.stack(gate_up, axis=1),
            "down": weight("mlp.down_proj").T,
        }

    return {
        "embedding": tensors["model.embed_tokens.weight"],
        "layers": [layer(index) for index in range(config.num_layers)],
        "final_norm": tensors["model.norm.weight"],
    }


def hf_config(config: ModelConfig) -> dict:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope.theta,
        "rope_scaling": None,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": True,
        "eos_token_id": config.eos_token_ids[0],
        "initializer_range": 0.02,
        "use_cache": True,
        "use_sliding_window": False,
        "torch_dtype": "bfloat16",
    }
