"""Parameters in their shards: loaded there piece by piece, or cut from a whole tree."""

import dataclasses

import jax
import numpy as np
import pytest

from sparsespec_jax.models import huggingface
from sparsespec_jax.models.decoder import forward
from sparsespec_jax.models.loading import load_model
from sparsespec_jax.models.orbax import save_orbax
from sparsespec_jax.models.parameters import check_params
from sparsespec_jax.parallel.model_shards import divisible, place_params
from sparsespec_jax.parallel.sharding import Placement
from tests.sparsespec_jax.models.tiny_models import CASES, tokens, write_checkpoint


@pytest.mark.parametrize("name", ["qwen3", "llama_bias", "llama_mha"])
@pytest.mark.parametrize("vocab", [96, 97])
@pytest.mark.parametrize("devices", [2, 4])
def test_a_checkpoint_is_read_into_its_shards(name, vocab, devices, tmp_path, monkeypatch):
    config = {**CASES[name], "vocab_size": vocab}
    path = write_checkpoint(tmp_path, config)
    whole = load_model(path, progress=False)
    placement = Placement.over(devices)
    expected = place_params(whole.params, whole.config, placement)

    largest = 0
    read = huggingface.HFCheckpoint.read

    def counted(self, tensor, window=()):
        nonlocal largest
        part = read(self, tensor, window)
        if part.ndim > 1:
            largest = max(largest, part.size / np.prod(self.shapes[tensor]))
        return part

    monkeypatch.setattr(huggingface.HFCheckpoint, "read", counted)
    loaded = load_model(path, placement=placement, progress=False)
    assert loaded.config == whole.config
    check_params(loaded.params, divisible(whole.config, devices))
    jax.tree.map(np.testing.assert_array_equal, loaded.params, expected)
    for array, same in zip(*map(jax.tree.leaves, (loaded.params, expected)), strict=True):
        assert array.sharding.is_equivalent_to(same.sharding, array.ndim)
        if array.ndim > 1:
            held = {shard.data.size for shard in array.addressable_shards}
            assert held == {array.size // devices}, "a device holds its share alone"
    assert largest < 0.52, "no tensor is read whole"
    again = place_params(loaded.params, whole.config, placement)
    for array, same in zip(*map(jax.tree.leaves, (again, loaded.params)), strict=True):
        pointers = [
            [shard.data.unsafe_buffer_pointer() for shard in x.addressable_shards]
            for x in (array, same)
        ]
        assert pointers[0] == pointers[1], "what is in its place stays there"


def test_the_divisible_model_is_the_same_function(tmp_path):
    model = load_model(write_checkpoint(tmp_path, CASES["llama_bias"]), progress=False)
    placement = Placement.over(4)
    split = divisible(model.config, 4)
    assert (split.num_kv_heads, split.group) == (4, 1)
    params = place_params(model.params, model.config, placement)
    inputs = tokens(CASES["llama_bias"])
    np.testing.assert_allclose(
        forward(jax.device_get(params), inputs, split),
        forward(model.params, inputs, model.config),
        atol=1e-4,
    )


def test_orbax_restores_into_shards(tmp_path):
    model = load_model(write_checkpoint(tmp_path / "hf", CASES["qwen3"]), progress=False)
    save_orbax(model.params, model.config, tmp_path / "orbax")
    for devices in (2, 4):  # the latter with copies of the KV heads
        placement = Placement.over(devices)
        expected = place_params(model.params, model.config, placement)
        found = load_model(tmp_path / "orbax", placement=placement).params
        jax.tree.map(np.testing.assert_array_equal, found, expected)
        assert found["layers"][0]["qkv"].sharding.spec[1] == "tp"


def test_parameters_that_fit_neither_are_named(tmp_path):
    model = load_model(write_checkpoint(tmp_path, CASES["qwen3"]), progress=False)
    config = dataclasses.replace(model.config, hidden_size=48)
    with pytest.raises(ValueError, match=r"final_norm has shape \(32,\), expected \(48,\)"):
        place_params(model.params, config, Placement.over(2))
