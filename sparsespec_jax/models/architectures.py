"""The architectures this decoder runs, and their configurations in Hugging Face's words.

`config_from_hf` accepts what the decoder computes exactly and raises on everything else: a setting
that it does not know how to honour is never dropped.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from sparsespec_jax.models.config import ModelConfig, RopeConfig


@dataclasses.dataclass(frozen=True)
class Architecture:
    """What tells one architecture from another.

    `qkv_bias` None: the config's `attention_bias` decides; the checkpoint then has a bias on the
    output projection too. `head_dim` is the default; None: hidden_size / num_attention_heads.
    """

    model_type: str
    qkv_bias: bool | None = None
    qk_norm: bool = False
    head_dim: int | None = None


ARCHITECTURES = {
    "LlamaForCausalLM": Architecture("llama"),
    "Qwen2ForCausalLM": Architecture("qwen2", qkv_bias=True),
    "Qwen3ForCausalLM": Architecture("qwen3", qk_norm=True, head_dim=128),
}
ROPE_KINDS = ("default", "linear", "llama3", "yarn")


def config_from_hf(
    config: dict[str, Any], generation_config: dict[str, Any] | None = None
) -> ModelConfig:
    """The `ModelConfig` of a `config.json`; eos ids are those of both files, generation's first."""
    name = architecture_name(config)
    architecture = ARCHITECTURES[name]
    _refuse_unsupported(config)
    hidden, heads = _require(config, "hidden_size"), _require(config, "num_attention_heads")
    head_dim = _get(config, "head_dim", architecture.head_dim)
    if head_dim is None:
        if hidden % heads:
            raise ValueError(
                f"config has no head_dim, and hidden_size {hidden} is not a multiple of "
                f"num_attention_heads {heads}"
            )
        head_dim = hidden // heads
    qkv_bias = architecture.qkv_bias
    if qkv_bias is None:
        qkv_bias = bool(_get(config, "attention_bias", False))
    rope = _rope_from_hf(config)
    positions = _require(config, "max_position_embeddings")
    if rope.kind == "yarn":  # model cards enable YaRN without touching the declared maximum
        positions = max(positions, round(rope.original_max_position_embeddings * rope.factor))
    return ModelConfig(
        architecture=name,
        vocab_size=_require(config, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=_require(config, "intermediate_size"),
        num_layers=_require(config, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=_get(config, "num_key_value_heads", heads),
        head_dim=head_dim,
        max_position_embeddings=positions,
        rope=rope,
        rms_norm_eps=_get(config, "rms_norm_eps", 1e-6),
        qkv_bias=qkv_bias,
        qk_norm=architecture.qk_norm,
        tie_word_embeddings=bool(_get(config, "tie_word_embeddings", False)),
        eos_token_ids=_merge_ids(
            (generation_config or {}).get("eos_token_id"), config.get("eos_token_id")
        ),
        bos_token_id=_get(config, "bos_token_id", None),
    )


def config_to_hf(config: ModelConfig, dtype: str | None = None) -> dict[str, Any]:
    """The inverse of `config_from_hf`, in the spelling that every transformers release reads."""
    architecture = ARCHITECTURES[config.architecture]
    eos = list(config.eos_token_ids)
    result = {
        "architectures": [config.architecture],
        "model_type": architecture.model_type,
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
        "rope_scaling": _rope_to_hf(config.rope),
        "tie_word_embeddings": config.tie_word_embeddings,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
    }
    if architecture.qkv_bias is None:
        result["attention_bias"] = config.qkv_bias
    if dtype is not None:
        result["torch_dtype"] = dtype
    return result


def architecture_name(config: dict[str, Any]) -> str:
    """The key of `ARCHITECTURES` that a `config.json` names."""
    names = config.get("architectures") or []
    if not names:
        by_type = {entry.model_type: name for name, entry in ARCHITECTURES.items()}
        names = [by_type.get(config.get("model_type"), f"model_type {config.get('model_type')!r}")]
    if names[0] not in ARCHITECTURES:
        raise ValueError(
            f"unsupported architecture {names[0]}; supported: {', '.join(ARCHITECTURES)}"
        )
    return names[0]


def _refuse_unsupported(config: dict[str, Any]) -> None:
    activation = _get(config, "hidden_act", "silu")
    if activation != "silu":
        raise ValueError(f"unsupported hidden_act {activation!r}; supported: silu")
    if _get(config, "mlp_bias", False):
        raise ValueError("unsupported mlp_bias: this decoder's feed-forward has no biases")
    layer_types = _get(config, "layer_types", [])
    if _get(config, "use_sliding_window", False) or set(layer_types) - {"full_attention"}:
        raise ValueError("unsupported sliding window attention (use_sliding_window, layer_types)")
    quantization = _get(config, "quantization_config", None)
    if quantization:
        method = quantization.get("quant_method", "unknown")
        raise ValueError(
            f"unsupported quantization_config (quant_method {method!r}); "
            "use the unquantised checkpoint or a GGUF file"
        )


def _rope_from_hf(config: dict[str, Any]) -> RopeConfig:
    """Reads `rope_scaling` ("type" or "rope_type") and transformers 5's `rope_parameters`."""
    scaling = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    if any(isinstance(value, dict) for value in scaling.values()):
        raise ValueError(f"unsupported rope_parameters per layer type: {', '.join(scaling)}")
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind not in ROPE_KINDS:
        raise ValueError(f"unsupported rope type {kind!r}; supported: {', '.join(ROPE_KINDS)}")
    partial = scaling.get("partial_rotary_factor") or _get(config, "partial_rotary_factor", 1.0)
    if partial != 1.0:
        raise ValueError(f"unsupported partial_rotary_factor {partial}; supported: 1.0")
    theta = float(scaling.get("rope_theta") or _get(config, "rope_theta", 10_000.0))
    if kind == "default":
        return RopeConfig(theta=theta)

    names = {field.name for field in dataclasses.fields(RopeConfig)} - {"theta", "kind"}
    values = {key: scaling[key] for key in names if scaling.get(key) is not None}
    if kind != "linear":
        values.setdefault(
            "original_max_position_embeddings",
            _get(config, "original_max_position_embeddings", config["max_position_embeddings"]),
        )
    if kind == "yarn" and "factor" not in values:
        original = values["original_max_position_embeddings"]
        values["factor"] = config["max_position_embeddings"] / original
    required = {"linear": ["factor"], "yarn": ["factor"]}.get(
        kind, ["factor", "low_freq_factor", "high_freq_factor"]
    )
    for key in required:
        if key not in values:
            raise ValueError(f"rope type {kind!r} needs {key!r}, got {scaling}")
    return RopeConfig(theta=theta, kind=kind, **values)


def _rope_to_hf(rope: RopeConfig) -> dict[str, Any] | None:
    if rope.kind == "default":
        return None
    values = dataclasses.asdict(rope)
    del values["theta"]
    kind = values.pop("kind")
    read = {
        "linear": {"factor"},
        "llama3": {"factor", "original_max_position_embeddings", "low_freq_factor",
                   "high_freq_factor"},
        "yarn": values.keys() - {"low_freq_factor", "high_freq_factor"},
    }[kind]  # fmt: skip
    return {"rope_type": kind} | {
        key: value for key, value in values.items() if key in read and value is not None
    }


def _merge_ids(*entries: int | list[int] | None) -> tuple[int, ...]:
    """Each entry is an id, a list of ids or None; first come first, without repeats."""
    ids: dict[int, None] = {}
    for entry in entries:
        if entry is not None:
            ids.update(dict.fromkeys(entry if isinstance(entry, list | tuple) else [entry]))
    return tuple(ids)


def _get(config: dict[str, Any], key: str, default: Any) -> Any:
    """`config[key]`, with null meaning absent."""
    value = config.get(key)
    return default if value is None else value


def _require(config: dict[str, Any], key: str) -> Any:
    value = config.get(key)
    if value is None:
        raise ValueError(f"config has no {key!r}")
    return value
