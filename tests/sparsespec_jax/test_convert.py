import json
import subprocess
import sys

import jax
import numpy as np
import pytest

from sparsespec_jax.convert import convert, main
from sparsespec_jax.models.loading import load_model
from sparsespec_jax.models.tokenizer import Tokenizer
from tests.sparsespec_jax.models.test_tokenizer import byte_level
from tests.sparsespec_jax.models.tiny_models import CASES, write_checkpoint


@pytest.fixture
def source(tmp_path):
    path = write_checkpoint(tmp_path / "source", CASES["qwen3"])
    byte_level().save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    (path / "generation_config.json").write_text(json.dumps({"do_sample": True, "top_k": 20}))
    return path


def test_to_orbax_and_back(source, tmp_path):
    convert(source, tmp_path / "orbax", progress=False)
    convert(tmp_path / "orbax", tmp_path / "hf", to="hf", progress=False)
    paths = source, tmp_path / "orbax", tmp_path / "hf"
    models = [load_model(path, progress=False) for path in paths]
    for model in models[1:]:
        jax.tree.map(np.testing.assert_array_equal, model.params, models[0].params)
        assert model.config == models[0].config
        assert model.generation_defaults == {"top_k": 20}
        assert Tokenizer.load(model.path).eos_token_id == 1


def test_dtype(source, tmp_path):
    main([str(source), str(tmp_path / "out"), "--to", "hf", "--dtype", "bfloat16", "--quiet"])
    assert load_model(tmp_path / "out", progress=False).params["embedding"].dtype.name == "bfloat16"


def test_gguf_with_its_tokenizer(tmp_path):
    pytest.importorskip("gguf")
    from tests.sparsespec_jax.models.test_gguf import write_gguf

    path = write_gguf(tmp_path / "model.gguf", CASES["llama"])
    convert(path, tmp_path / "hf", to="hf", progress=False)
    assert load_model(tmp_path / "hf", progress=False).config.eos_token_ids == (0, 1)
    ours, theirs = Tokenizer.load(tmp_path / "hf"), Tokenizer.load(path)
    assert ours.encode("ab c<note>") == theirs.encode("ab c<note>")
    assert ours.chat_template == theirs.chat_template


def test_overwrite_replaces_the_checkpoint_and_nothing_else(source, tmp_path):
    destination = tmp_path / "out"
    convert(source, destination, progress=False)
    (destination / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="is not empty; pass --overwrite"):
        convert(source, destination, to="hf", progress=False)
    convert(source, destination, to="hf", overwrite=True, progress=False)
    assert not (destination / "params").exists()
    convert(source, destination, overwrite=True, progress=False)
    assert not (destination / "model.safetensors").exists()
    assert (destination / "notes.txt").read_text() == "mine"


def test_faults_leave_the_destination_alone(source, tmp_path):
    with pytest.raises(ValueError, match="the same directory"):
        convert(source, source, overwrite=True)
    (tmp_path / "file").write_text("x")
    with pytest.raises(ValueError, match="file is a file"):
        convert(source, tmp_path / "file")
    (source / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"no \*.safetensors"):
        convert(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_command_line(source, tmp_path):
    command = [sys.executable, "-m", "sparsespec_jax.convert"]
    done = subprocess.run([*command, source, tmp_path / "out"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "loading" in done.stderr
    command += [tmp_path / "missing", tmp_path / "b"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("error: no model at ")
