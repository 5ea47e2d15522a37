import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparsespec_jax.models.loading import load_config, load_model
from sparsespec_jax.models.orbax import save_orbax
from sparsespec_jax.parallel.sharding import Placement
from tests.sparsespec_jax.models.tiny_models import CASES, write_checkpoint


@pytest.fixture
def model(tmp_path):
    return load_model(write_checkpoint(tmp_path / "hf", CASES["qwen3_bias"]), progress=False)


def test_round_trip(model, tmp_path):
    generation = {"do_sample": True, "temperature": 0.6, "eos_token_id": [2, 9]}
    save_orbax(model.params, model.config, tmp_path / "orbax", generation_config=generation)
    again = load_model(tmp_path / "orbax")
    jax.tree.map(np.testing.assert_array_equal, again.params, model.params)
    assert again.generation_defaults == {"temperature": 0.6}
    assert again.config.eos_token_ids == (2, 9)
    assert load_config(tmp_path / "orbax") == again.config


def test_bfloat16_is_kept_and_cast(model, tmp_path):
    narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16), model.params)
    save_orbax(narrow, model.config, tmp_path / "orbax")
    again = load_model(tmp_path / "orbax").params
    assert again["embedding"].dtype == jnp.bfloat16
    jax.tree.map(np.testing.assert_array_equal, again, narrow)
    wide = load_model(tmp_path / "orbax", dtype="float32").params
    assert wide["embedding"].dtype == jnp.float32
    jax.tree.map(np.testing.assert_array_equal, wide, narrow)


def test_restored_into_shardings(model, tmp_path):
    save_orbax(model.params, model.config, tmp_path / "orbax")
    placement = Placement(jax.make_mesh((1,), ("model",)), axis="model")
    params = load_model(tmp_path / "orbax", placement=placement).params
    assert params["layers"][1]["gate_up"].sharding.spec == jax.P(None, None, "model")
    jax.tree.map(np.testing.assert_array_equal, params, model.params)


def test_faults_are_named(model, tmp_path):
    params = {**model.params, "layers": [model.params["layers"][0], {}]}
    with pytest.raises(ValueError, match=r"layers.1.qkv is missing"):
        save_orbax(params, model.config, tmp_path / "orbax")
    save_orbax(model.params, model.config, tmp_path / "orbax")
    config = tmp_path / "orbax" / "config.json"
    config.write_text(
        config.read_text().replace('"intermediate_size": 56', '"intermediate_size": 60')
    )
    with pytest.raises(
        ValueError, match=r"layers.0.down has shape \(56, 32\), expected \(60, 32\)"
    ):
        load_model(tmp_path / "orbax")
    config.write_text(config.read_text().replace("Qwen3ForCausalLM", "GPT2LMHeadModel"))
    with pytest.raises(ValueError, match="unsupported architecture GPT2LMHeadModel"):
        load_model(tmp_path / "orbax")
