"""Logits equal to transformers' for every architecture, within float32 rounding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparsespec_jax.models.decoder import Decoder, forward
from sparsespec_jax.models.loading import load_model
from tests.sparsespec_jax.models.tiny_models import CASES, REFERENCE, tokens, write_checkpoint

TOLERANCE = 5e-5


def _logits(path, ids):
    model = load_model(path, progress=False)
    return np.asarray(jax.jit(forward, static_argnums=2)(model.params, ids, model.config))


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_the_stored_reference(name, tmp_path):
    """Every eighth position of 80, so past the original context (32) of llama3 and yarn scaling."""
    path = write_checkpoint(tmp_path, CASES[name])
    logits = _logits(path, jnp.asarray(tokens(CASES[name])))[:, 1::8]
    with np.load(REFERENCE) as reference:
        np.testing.assert_allclose(logits, reference[name], atol=TOLERANCE, rtol=0)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch's and transformers' own
@pytest.mark.parametrize("name", CASES)
def test_logits_equal_transformers(name, tmp_path):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from tests.sparsespec_jax.models.make_reference_logits import transformers_logits

    path, ids = write_checkpoint(tmp_path, CASES[name]), tokens(CASES[name])
    difference = np.abs(_logits(path, jnp.asarray(ids)) - transformers_logits(path, ids))
    assert difference.max() < TOLERANCE


def test_module_and_function_agree(tmp_path):
    model = load_model(write_checkpoint(tmp_path, CASES["qwen3"]), progress=False)
    ids = jnp.asarray(tokens(CASES["qwen3"]))[:, :8]
    module = Decoder(model.config, model.params)
    np.testing.assert_array_equal(module(ids), forward(model.params, ids, model.config))
