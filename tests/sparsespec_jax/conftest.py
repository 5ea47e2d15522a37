"""A tiny random model, for every test that needs one, and how long hypothesis may take."""

from __future__ import annotations

import hypothesis
import jax
import pytest

from sparsespec_jax.models.config import ModelConfig
from sparsespec_jax.models.parameters import Params, init_params

hypothesis.settings.register_profile("sparsespec", deadline=None, print_blob=True)
hypothesis.settings.load_profile("sparsespec")


@pytest.fixture(scope="session")
def tiny_model() -> ModelConfig:
    return ModelConfig(
        architecture="llama",
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        max_position_embeddings=8192,
        eos_token_ids=(95, 96),
    )


@pytest.fixture(scope="session")
def tiny_params(tiny_model: ModelConfig) -> Params:
    return init_params(tiny_model, jax.random.key(0))
