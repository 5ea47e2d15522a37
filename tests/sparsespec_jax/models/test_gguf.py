import sys

import jax
import numpy as np
import pytest

gguf = pytest.importorskip("gguf")

from sparsespec_jax.models.loading import load_config, load_model  # noqa: E402
from sparsespec_jax.models.rope import rope_frequencies  # noqa: E402
from sparsespec_jax.models.tokenizer import Tokenizer  # noqa: E402
from tests.sparsespec_jax.models.tiny_models import CASES, tensors, write_checkpoint  # noqa: E402

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
VOCABULARY = ["<|end|>", "<|start|>", "<note>", "a", "b", "c", "Ġ", "ab", "Ġc", "Ċ"]


def write_gguf(path, config, *, quantize=None, extra=None, metadata=None, tokenizer=True):
    """A GGUF file of `tensors(config)`, laid out as llama.cpp's converter does."""
    kind = config["model_type"]
    writer = gguf.GGUFWriter(path, kind)
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    dim = config.get("head_dim", config["hidden_size"] // heads)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(dim)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    for key, value in (metadata or {}).items():
        add = {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32}
        add[type(value)](key, value)
    if tokenizer:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("smollm")
        writer.add_token_list(VOCABULARY)
        writer.add_token_types([3, 3, 4] + [1] * (len(VOCABULARY) - 3))
        writer.add_token_merges(["a b", "Ġ c"])
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(0)
        writer.add_eot_token_id(1)
        writer.add_chat_template("{% for m in messages %}<|start|>{{ m.content }}{% endfor %}")
    for name, array in (tensors(config) | (extra or {})).items():
        *middle, suffix = name.removeprefix("model.layers.").split(".")
        if name.startswith("model.layers."):
            inner = ".".join(middle[1:])
            if kind == "llama" and inner in ("self_attn.q_proj", "self_attn.k_proj"):
                count = heads if inner == "self_attn.q_proj" else kv_heads
                pairs = array.reshape(count, 2, dim // 2, *array.shape[1:])
                array = np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(array.shape)
            name = f"blk.{middle[0]}.{_NAMES[inner]}.{suffix}"
        else:
            stem = ".".join(middle)
            name = f"{_NAMES.get(stem, stem)}.{suffix}"
        if quantize and array.ndim == 2:
            blocks = gguf.quantize(array, quantize)
            writer.add_tensor(name, blocks, raw_dtype=quantize)
        else:
            writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _load(path, **options):
    return load_model(path, progress=False, **options)


@pytest.mark.parametrize(
    "name", ["llama", "llama_mha", "llama_bias", "qwen2", "qwen3", "qwen3_tied"]
)
def test_float32_file_equals_the_hugging_face_checkpoint(name, tmp_path):
    ours = _load(write_gguf(tmp_path / "model.gguf", CASES[name]))
    theirs = _load(write_checkpoint(tmp_path / "hf", CASES[name]))
    jax.tree.map(np.testing.assert_array_equal, ours.params, theirs.params)
    for field in ("architecture", "head_dim", "rope", "rms_norm_eps", "tie_word_embeddings"):
        assert getattr(ours.config, field) == getattr(theirs.config, field)
    assert ours.config.eos_token_ids == (0, 1)
    assert ours.params["embedding"].dtype == np.float32


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1"])
def test_quantised_file(kind, tmp_path):
    config = {**CASES["llama"], "intermediate_size": 64}
    kind = gguf.GGMLQuantizationType[kind]
    path = write_gguf(tmp_path / "model.gguf", config, quantize=kind)
    assert _load(path).params["embedding"].dtype == jax.numpy.bfloat16
    params, raw = _load(path, dtype="float32").params, tensors(config)

    def rounded(name):
        return gguf.dequantize(gguf.quantize(raw[name], kind), kind)

    np.testing.assert_array_equal(params["embedding"], rounded("model.embed_tokens.weight"))
    down = rounded("model.layers.1.mlp.down_proj.weight")
    np.testing.assert_array_equal(params["layers"][1]["down"], down.T)
    q = rounded("model.layers.1.self_attn.q_proj.weight")  # rows move, and are rounded on their own
    np.testing.assert_array_equal(params["layers"][1]["qkv"][:, 0, 0], q[:8].T)


def test_scaled_rope(tmp_path):
    metadata = {
        "qwen3.rope.scaling.type": "yarn",
        "qwen3.rope.scaling.factor": 4.0,
        "qwen3.rope.scaling.original_context_length": 32,
    }
    path = write_gguf(tmp_path / "yarn.gguf", CASES["qwen3_yarn"], metadata=metadata)
    expected = load_config(write_checkpoint(tmp_path / "hf", CASES["qwen3_yarn"]))
    assert load_config(path).rope == expected.rope
    metadata["qwen3.rope.scaling.type"] = "longrope"
    path = write_gguf(tmp_path / "longrope.gguf", CASES["qwen3_yarn"], metadata=metadata)
    with pytest.raises(ValueError, match="unsupported rope type 'longrope'"):
        load_config(path)


def test_llama3_scaling_is_recognised_by_its_divisors(tmp_path):
    scaling = {**CASES["llama_llama3"]["rope_scaling"], "original_max_position_embeddings": 8192}
    config = {**CASES["llama_llama3"], "rope_scaling": scaling, "head_dim": 64}
    expected = load_config(write_checkpoint(tmp_path / "hf", config)).rope
    plain, _ = rope_frequencies(type(expected)(theta=expected.theta), 64)
    divisors = plain / rope_frequencies(expected, 64)[0]
    extra = {"rope_freqs.weight": divisors.astype(np.float32)}
    path = write_gguf(tmp_path / "llama3.gguf", config, extra=extra)
    assert load_config(path).rope == expected
    extra["rope_freqs.weight"] = np.linspace(1, 8, 32, dtype=np.float32)
    with pytest.raises(ValueError, match=r"rope_freqs.weight is not Llama 3's"):
        load_config(write_gguf(tmp_path / "other.gguf", config, extra=extra))


def test_tokenizer(tmp_path):
    tokenizer = Tokenizer.load(write_gguf(tmp_path / "model.gguf", CASES["llama"]))
    ids = tokenizer.encode("ab c<note>\n<|end|>")
    assert [VOCABULARY[i] for i in ids] == ["ab", "Ġc", "<note>", "Ċ", "<|end|>"]
    assert tokenizer.decode(ids) == "ab c<note>\n"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 0, None)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "a"}]) == "<|start|>a"


def test_faults_are_named(tmp_path, monkeypatch):
    config = CASES["llama"]
    other = write_gguf(tmp_path / "a.gguf", {**config, "model_type": "gemma"})
    with pytest.raises(ValueError, match="unsupported GGUF architecture 'gemma'; supported: llama"):
        load_config(other)
    extra = {"model.layers.0.self_attn.q_norm.weight": np.ones(8, np.float32)}
    unexpected = write_gguf(tmp_path / "b.gguf", config, extra=extra)
    with pytest.raises(ValueError, match=r"layers.0.self_attn.q_norm.weight is unexpected"):
        _load(unexpected)
    with pytest.raises(ValueError, match="tokenizer model None"):
        Tokenizer.load(write_gguf(tmp_path / "c.gguf", config, tokenizer=False))
    (tmp_path / "d.gguf").write_bytes(b"not a gguf file at all, but long enough to be one")
    with pytest.raises(ValueError, match="not a readable GGUF file"):
        load_config(tmp_path / "d.gguf")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ImportError, match=r"pip install sparsespec-jax\[gguf\]"):
        load_config(other)
