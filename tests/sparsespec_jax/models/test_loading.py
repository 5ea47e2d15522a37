import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from sparsespec_jax.models import hub
from sparsespec_jax.models.architectures import config_from_hf
from sparsespec_jax.models.huggingface import save_hf
from sparsespec_jax.models.loading import load_config, load_model
from sparsespec_jax.models.parameters import check_params
from sparsespec_jax.parallel.sharding import Placement
from tests.sparsespec_jax.models.tiny_models import CASES, tensors, write_checkpoint


def _load(path, **options):
    return load_model(path, progress=False, **options)


def _rewrite(path, change):
    """Apply `change` to the tensors of a checkpoint."""
    file = path / "model.safetensors"
    content = load_file(file)
    change(content)
    save_file(content, file)


def _assert_same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.mark.parametrize("name", CASES)
def test_every_parameter_comes_from_its_tensors(name, tmp_path):
    """Entry by entry: head h of q, k and v, gate and up, in our layout."""
    model, raw = _load(write_checkpoint(tmp_path, CASES[name])), tensors(CASES[name])
    config = model.config
    check_params(model.params, config)
    prefix, layer = "model.layers.1.", model.params["layers"][1]
    group, dim = config.group, config.head_dim
    for head in range(config.num_heads):
        kv, inner = divmod(head, group)
        rows = slice(head * dim, (head + 1) * dim)
        q = raw[f"{prefix}self_attn.q_proj.weight"][rows]
        np.testing.assert_array_equal(layer["qkv"][:, kv, inner], q.T)
        out = raw[f"{prefix}self_attn.o_proj.weight"][:, rows]
        np.testing.assert_array_equal(layer["out"][kv, inner], out.T)
        if config.qkv_bias:
            bias = raw[f"{prefix}self_attn.q_proj.bias"][rows]
            np.testing.assert_array_equal(layer["qkv_bias"][kv, inner], bias)
    for kv in range(config.num_kv_heads):
        rows = slice(kv * dim, (kv + 1) * dim)
        for offset, letter in enumerate("kv"):
            weight = raw[f"{prefix}self_attn.{letter}_proj.weight"][rows]
            np.testing.assert_array_equal(layer["qkv"][:, kv, group + offset], weight.T)
    np.testing.assert_array_equal(layer["gate_up"][:, 0], raw[f"{prefix}mlp.gate_proj.weight"].T)
    np.testing.assert_array_equal(layer["gate_up"][:, 1], raw[f"{prefix}mlp.up_proj.weight"].T)
    np.testing.assert_array_equal(layer["down"], raw[f"{prefix}mlp.down_proj.weight"].T)
    np.testing.assert_array_equal(model.params["embedding"], raw["model.embed_tokens.weight"])


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("shard_bytes", [10**9, 20_000], ids=["one file", "sharded"])
def test_save_hf_round_trip(name, shard_bytes, tmp_path):
    original = _load(write_checkpoint(tmp_path / "a", CASES[name]))
    save_hf(original.params, original.config, tmp_path / "b", shard_bytes=shard_bytes)
    assert (tmp_path / "b" / "model.safetensors.index.json").exists() == (shard_bytes == 20_000)
    again = _load(tmp_path / "b")
    save_hf(again.params, again.config, tmp_path / "b")  # over what is there, sharded or not
    assert not (tmp_path / "b" / "model.safetensors.index.json").exists()
    again = _load(tmp_path / "b")
    assert again.config == original.config
    _assert_same(again.params, original.params)
    saved = load_file(tmp_path / "b" / "model.safetensors")
    expected = tensors(CASES[name])
    assert saved.keys() == expected.keys()
    for tensor, array in expected.items():
        np.testing.assert_array_equal(saved[tensor], array)


def test_the_index_lists_every_tensor_and_the_total_size(tmp_path):
    model = _load(write_checkpoint(tmp_path / "a", CASES["llama"]))
    save_hf(model.params, model.config, tmp_path / "b", shard_bytes=20_000)
    index = json.loads((tmp_path / "b" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == tensors(CASES["llama"]).keys()
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in jax.tree.leaves(model.params))


def test_saved_files_are_complete_and_as_readable_as_any(tmp_path):
    model = _load(write_checkpoint(tmp_path / "a", CASES["llama"]))
    save_hf(model.params, model.config, tmp_path / "b")
    assert {path.name for path in (tmp_path / "b").iterdir()} == {
        "config.json",
        "model.safetensors",
    }
    (tmp_path / "any").touch()
    assert {path.stat().st_mode for path in (tmp_path / "b").iterdir()} == {
        (tmp_path / "any").stat().st_mode
    }


def test_save_hf_refuses_parameters_of_another_model(tmp_path):
    model = _load(write_checkpoint(tmp_path, CASES["llama"]))
    with pytest.raises(ValueError, match=r"layers.0.q_norm is missing"):
        save_hf(model.params, config_from_hf(CASES["qwen3_tied"]), tmp_path)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch's and transformers' own
@pytest.mark.parametrize("name", ["qwen3", "qwen2_yarn", "llama_llama3", "llama_bias"])
def test_transformers_reads_what_save_hf_writes(name, tmp_path):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from tests.sparsespec_jax.models.make_reference_logits import transformers_logits

    original = write_checkpoint(tmp_path / "a", CASES[name])
    model = _load(original)
    save_hf(model.params, model.config, tmp_path / "b", shard_bytes=20_000)
    ids = np.arange(40)[None]
    np.testing.assert_array_equal(
        transformers_logits(original, ids), transformers_logits(tmp_path / "b", ids)
    )


@pytest.mark.parametrize("key", ["torch_dtype", "dtype"])
def test_auto_dtype_is_the_checkpoints(key, tmp_path):
    config = {k: v for k, v in CASES["qwen3"].items() if k != "torch_dtype"} | {key: "bfloat16"}
    path = write_checkpoint(tmp_path, config, dtype=ml_dtypes.bfloat16)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(_load(path).params)} == {"bfloat16"}
    wide = _load(path, dtype="float32").params
    _assert_same(jax.tree.map(lambda x: x.astype(jnp.bfloat16), wide), _load(path).params)


def test_auto_dtype_without_a_declared_one_is_the_stored_one(tmp_path):
    config = {k: v for k, v in CASES["llama"].items() if k != "torch_dtype"}
    path = write_checkpoint(tmp_path, config, dtype=np.float16)
    assert _load(path).params["embedding"].dtype == jnp.float16


def test_bfloat16_survives_save_hf(tmp_path):
    path = write_checkpoint(tmp_path / "a", CASES["qwen2"])
    model = _load(path, dtype="bfloat16")
    save_hf(model.params, model.config, tmp_path / "b")
    again = _load(tmp_path / "b")
    assert again.params["embedding"].dtype == jnp.bfloat16
    _assert_same(again.params, model.params)


def test_unknown_dtype(tmp_path):
    path = write_checkpoint(tmp_path, CASES["llama"])
    with pytest.raises(ValueError, match=r"dtype must be auto or one of float32.*got 'int8'"):
        _load(path, dtype="int8")


def test_parameters_land_in_their_shardings(tmp_path):
    placement = Placement(jax.make_mesh((1,), ("model",)), axis="model")
    params = _load(write_checkpoint(tmp_path, CASES["llama"]), placement=placement).params
    assert params["layers"][0]["qkv"].sharding.spec == jax.P(None, "model", None, None)
    assert params["final_norm"].sharding.spec == jax.P(None)


def test_generation_defaults_and_eos(tmp_path):
    path = write_checkpoint(tmp_path, CASES["qwen3"])
    assert _load(path).generation_defaults == {}
    generation = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "eos_token_id": [5, 2]}
    (path / "generation_config.json").write_text(json.dumps({**generation, "do_sample": True}))
    model = _load(path)
    assert model.generation_defaults == {"temperature": 0.6, "top_k": 20, "top_p": 0.95}
    assert model.config.eos_token_ids == (5, 2)
    assert model.path == path
    (path / "generation_config.json").write_text(json.dumps(generation))
    assert _load(path).generation_defaults == {}


def test_load_config_needs_no_weights(tmp_path):
    path = write_checkpoint(tmp_path, CASES["qwen3"])
    (path / "model.safetensors").unlink()
    assert load_config(str(path)) == config_from_hf(CASES["qwen3"])


def test_a_tied_head_and_rotary_buffers_are_ignored(tmp_path):
    path = write_checkpoint(tmp_path, CASES["qwen3_tied"])
    before = _load(path).params

    def change(content):
        content["lm_head.weight"] = content["model.embed_tokens.weight"].copy()
        content["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(8, np.float32)

    _rewrite(path, change)
    _assert_same(_load(path).params, before)


def test_every_faulty_tensor_is_named(tmp_path):
    path = write_checkpoint(tmp_path, CASES["qwen3"])

    def change(content):
        del content["model.layers.1.self_attn.q_norm.weight"]
        content["model.layers.0.mlp.down_proj.weight"] = np.ones((32, 55), np.float32)
        content["model.layers.2.input_layernorm.weight"] = np.ones(32, np.float32)
        content["model.layers.0.self_attn.q_proj.bias"] = np.ones(96, np.float32)

    _rewrite(path, change)
    with pytest.raises(ValueError) as error:
        _load(path)
    for problem in (
        "model.layers.1.self_attn.q_norm.weight is missing",
        "model.layers.0.mlp.down_proj.weight has shape (32, 55), expected (32, 56)",
        "model.layers.2.input_layernorm.weight is unexpected",
        "model.layers.0.self_attn.q_proj.bias is unexpected",
    ):
        assert problem in str(error.value)


def test_an_untied_head_must_be_there(tmp_path):
    path = write_checkpoint(tmp_path, CASES["llama"])
    _rewrite(path, lambda content: content.pop("lm_head.weight"))
    with pytest.raises(ValueError, match=r"lm_head.weight is missing"):
        _load(path)


def test_an_output_bias_must_be_zero(tmp_path):
    path = write_checkpoint(tmp_path, CASES["llama_bias"])
    name = "model.layers.1.self_attn.o_proj.bias"
    _rewrite(path, lambda content: content.update({name: np.ones(32, np.float32)}))
    with pytest.raises(ValueError, match=f"{name} is not zero"):
        _load(path)
    _rewrite(path, lambda content: content.pop(name))
    _load(path)


def test_a_quantised_tensor_is_named(tmp_path):
    path = write_checkpoint(tmp_path, CASES["llama"])
    name = "model.layers.0.mlp.up_proj.weight"
    _rewrite(path, lambda content: content.update({name: content[name].astype(np.int8)}))
    with pytest.raises(ValueError, match=f"{name} .* unsupported dtype I8"):
        _load(path)


def test_missing_files_are_named(tmp_path):
    path = write_checkpoint(tmp_path / "model", CASES["llama"])
    (path / "model.safetensors").rename(path / "pytorch_model.bin")
    with pytest.raises(FileNotFoundError, match=r"no \*.safetensors.*pytorch_model.bin: convert"):
        _load(path)
    (path / "pytorch_model.bin").unlink()
    with pytest.raises(FileNotFoundError, match=r"no \*.safetensors file$"):
        _load(path)
    (path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config.json is not valid JSON"):
        _load(path)
    (path / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"has no config.json"):
        _load(path)


def test_a_missing_shard_is_named(tmp_path):
    model = _load(write_checkpoint(tmp_path / "a", CASES["llama"]))
    save_hf(model.params, model.config, tmp_path / "b", shard_bytes=20_000)
    shard = sorted((tmp_path / "b").glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(FileNotFoundError, match=f"no {shard.name}, which model.safetensors.index"):
        _load(tmp_path / "b")


def test_a_missing_path_is_not_looked_up_on_the_hub(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.snapshot_download", None)
    for source in (tmp_path / "a", str(tmp_path / "a"), "./model", "a/b/c", "model.gguf"):
        with pytest.raises(FileNotFoundError, match="no such file or directory"):
            load_config(source)


def test_a_hub_id_that_cannot_be_had_says_why(monkeypatch):
    def fail(name, allow_patterns):
        raise ConnectionError(f"{name} is out of reach")

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    with pytest.raises(FileNotFoundError, match=r"'org/model'.*ConnectionError: org/model is out"):
        _load("org/model")


def test_a_hub_id_is_downloaded_in_part(tmp_path, monkeypatch):
    path, asked = write_checkpoint(tmp_path, CASES["llama"]), []

    def download(name, allow_patterns):
        asked.append((name, allow_patterns))
        return str(path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    load_config("org/model")
    _load("org/model")
    assert asked[0] == ("org/model", list(hub.CONFIG_FILES))
    assert set(asked[1][1]) == {*hub.CONFIG_FILES, *hub.TOKENIZER_FILES, *hub.WEIGHT_FILES}


def test_a_file_of_another_kind(tmp_path):
    (tmp_path / "model.bin").write_bytes(b"x")
    with pytest.raises(ValueError, match=r"neither a directory nor a \.gguf file"):
        _load(tmp_path / "model.bin")
