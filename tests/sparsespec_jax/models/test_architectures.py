import math

import jax
import pytest

from sparsespec_jax.models.architectures import config_from_hf, config_to_hf
from sparsespec_jax.models.config import RopeConfig
from sparsespec_jax.models.parameters import describe, map_specs
from tests.sparsespec_jax.models.tiny_models import CASES

QWEN3_8B = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "max_position_embeddings": 40960,
    "max_window_layers": 36,
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWQ_32B = {
    "architectures": ["Qwen2ForCausalLM"],
    "eos_token_id": 151645,
    "hidden_act": "silu",
    "hidden_size": 5120,
    "intermediate_size": 27648,
    "max_position_embeddings": 40960,
    "max_window_layers": 64,
    "num_attention_heads": 40,
    "num_hidden_layers": 64,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 152064,
}
R1_DISTILL_LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 128000,
    "eos_token_id": [128001],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "vocab_size": 128256,
}


@pytest.mark.parametrize(
    ("config", "count", "kv_bytes"),
    [
        (QWEN3_8B, 8_190_735_360, 147_456),
        (QWQ_32B, 32_763_876_352, 262_144),
        (R1_DISTILL_LLAMA_8B, 8_030_261_248, 131_072),
    ],
    ids=["Qwen3-8B", "QwQ-32B", "R1-Distill-Llama-8B"],
)
def test_published_models_have_their_published_size(config, count, kv_bytes):
    model = config_from_hf(config)
    sizes = map_specs(lambda spec: math.prod(spec.shape), describe(model))
    assert sum(jax.tree.leaves(sizes)) == count
    assert model.kv_bytes_per_token("bfloat16") == kv_bytes


def test_qwen3_and_qwen2_and_llama_differ_where_they_should():
    qwen3, qwen2, llama = map(config_from_hf, (QWEN3_8B, QWQ_32B, R1_DISTILL_LLAMA_8B))
    assert (qwen3.qk_norm, qwen3.qkv_bias) == (True, False)
    assert (qwen2.qk_norm, qwen2.qkv_bias) == (False, True)
    assert (llama.qk_norm, llama.qkv_bias) == (False, False)
    assert llama.rope == RopeConfig(
        theta=500_000.0, kind="llama3", factor=8.0, original_max_position_embeddings=8192
    )


@pytest.mark.parametrize("name", CASES)
def test_round_trip_through_hugging_face_names(name):
    config = config_from_hf(CASES[name])
    assert config_from_hf(config_to_hf(config, "bfloat16")) == config


def test_head_dim_defaults():
    assert config_from_hf(_without(QWEN3_8B, "head_dim", num_attention_heads=16)).head_dim == 128
    assert config_from_hf({**QWQ_32B, "head_dim": None}).head_dim == 128
    with pytest.raises(ValueError, match="no head_dim"):
        config_from_hf({**QWQ_32B, "num_attention_heads": 48})


def test_architecture_is_found_by_model_type_alone():
    config = _without(QWQ_32B, "architectures", model_type="qwen2")
    assert config_from_hf(config).architecture == "Qwen2ForCausalLM"


@pytest.mark.parametrize(
    ("ours", "generation", "expected"),
    [
        (7, None, (7,)),
        ([7, 8], None, (7, 8)),
        (7, {"eos_token_id": [8, 7]}, (8, 7)),
        (7, {"eos_token_id": 9}, (9, 7)),
        (None, {}, ()),
    ],
)
def test_eos_ids_are_an_id_or_a_list_in_either_file(ours, generation, expected):
    config = config_from_hf({**QWEN3_8B, "eos_token_id": ours}, generation)
    assert config.eos_token_ids == expected


YARN = {"factor": 4.0, "original_max_position_embeddings": 32768}


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_scaling": {"type": "yarn", **YARN}},
        {"rope_scaling": {"rope_type": "yarn", **YARN}},
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, **YARN}, "rope_theta": None},
        {
            "rope_scaling": {"rope_type": "yarn", "original_max_position_embeddings": 32768},
            "max_position_embeddings": 131072,
        },
        {"rope_scaling": {"type": "yarn", "factor": 4.0}, "max_position_embeddings": 32768},
    ],
    ids=["type", "rope_type", "rope_parameters", "factor from lengths", "original from maximum"],
)
def test_yarn_in_every_spelling(changes):
    config = config_from_hf({**QWEN3_8B, **changes})
    assert config.rope == RopeConfig(
        theta=1e6, kind="yarn", factor=4.0, original_max_position_embeddings=32768
    )
    assert config.max_position_embeddings == 131072


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["MistralForCausalLM"]}, "unsupported architecture MistralForCausalLM"),
        ({"architectures": [], "model_type": "gpt2"}, "unsupported architecture model_type 'gpt2'"),
        ({"architectures": None}, "unsupported architecture model_type None"),
        (
            {"rope_scaling": {"rope_type": "dynamic", "factor": 2}},
            "unsupported rope type 'dynamic'",
        ),
        ({"rope_scaling": {"type": "longrope"}}, "unsupported rope type 'longrope'"),
        ({"rope_scaling": {"type": "linear"}}, "rope type 'linear' needs 'factor'"),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
            "rope type 'llama3' needs 'low_freq_factor'",
        ),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "per layer type"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"use_sliding_window": True}, "sliding window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding window"),
        ({"hidden_act": "gelu"}, "unsupported hidden_act 'gelu'"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quant_method 'fp8'"),
        ({"hidden_size": None}, "config has no 'hidden_size'"),
        ({"max_position_embeddings": None}, "config has no 'max_position_embeddings'"),
        ({"num_key_value_heads": 5}, "multiple of num_kv_heads"),
    ],
)
def test_what_the_decoder_does_not_compute_is_refused_by_name(changes, message):
    with pytest.raises(ValueError, match=message):
        config_from_hf({**QWEN3_8B, **changes})


def _without(config, key, **changes):
    return {name: value for name, value in config.items() if name != key} | changes
