"""A real model, end to end: GGUF weights, tokenizer, chat template, decoder."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparsespec_jax.models.decoder import forward
from sparsespec_jax.models.huggingface import save_hf
from sparsespec_jax.models.loading import load_model
from sparsespec_jax.models.tokenizer import StreamDecoder, Tokenizer
from tests.smollm2 import smollm2_path

pytestmark = [pytest.mark.network, pytest.mark.slow]


@pytest.fixture(scope="module")
def model():
    pytest.importorskip("gguf")
    return load_model(smollm2_path(), dtype="float32", progress=False)


@pytest.fixture(scope="module")
def tokenizer(model):
    return Tokenizer.load(model.path)


def test_it_knows_the_capital_of_france(model, tokenizer):
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}]
    )
    ids = tokenizer.encode(prompt, add_special_tokens=False)
    assert tokenizer.decode(ids, skip_special_tokens=False) == prompt
    step, decoder, answer = jax.jit(forward, static_argnums=2), StreamDecoder(tokenizer), ""
    for _ in range(12):
        padded = jnp.asarray(ids + [0] * (64 - len(ids)))[None]
        logits = step(model.params, padded, model.config)
        token = int(jnp.argmax(logits[0, len(ids) - 1]))
        if token in model.config.eos_token_ids:
            break
        ids.append(token)
        answer += decoder.push([token])
    assert answer + decoder.flush() == "The capital of France is Paris."


def test_long_text_round_trips(tokenizer):
    text = "def f(x):\n\treturn x**2  # 12345 éàü 猫 😀 \u200b\n\n<|im_end|>" * 20
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


@pytest.mark.filterwarnings("ignore")  # torch's and transformers' own
def test_thirty_layers_agree_with_transformers(model, tokenizer, tmp_path):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from tests.sparsespec_jax.models.make_reference_logits import transformers_logits

    save_hf(model.params, model.config, tmp_path)
    ids = np.array([tokenizer.encode("The quick brown fox jumps over the lazy dog.")])
    ours = forward(model.params, jnp.asarray(ids), model.config)
    np.testing.assert_allclose(ours, transformers_logits(tmp_path, ids), atol=2e-3, rtol=0)
