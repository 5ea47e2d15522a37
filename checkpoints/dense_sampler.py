"""Plain batched sampling with a dense KV cache: the check at the end of training.

Prompts are fed token by token in the same loop that generates, so rows of different prompt lengths
need no padding. The engine is the thing to use for anything else.
"""

from __future__ import annotations

import functools
import time

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import add_norm
from sparsespec_jax.models.config import ModelConfig
from sparsespec_jax.models.decoder import (
    add,
    attention_inputs,
    attention_output,
    embed,
    final_norm,
    lm_logits,
    mlp,
)
from sparsespec_jax.models.parameters import Params
from sparsespec_jax.models.rope import rope_tables

CHUNK = 128  # steps per call; between calls, stop when every row has ended


def sample(
    params: Params,
    config: ModelConfig,
    prompts: list[list[int]],
    *,
    length: int,
    temperature: float,
    seed: int = 0,
    deadline: float = float("inf"),
) -> list[list[int]]:
    """What follows each prompt up to and with the end token, at most `length` with the prompt.

    `length` must be a multiple of `CHUNK`. Rows still running at `deadline` (`time.monotonic`) are
    cut there.
    """
    rows = len(prompts)
    tokens = np.zeros((rows, length), np.int32)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = prompt
    starts = jnp.array([len(prompt) for prompt in prompts])
    shape = (rows, config.num_kv_heads, length, config.head_dim)
    empty = functools.partial(jnp.zeros, shape, params["embedding"].dtype)
    cache = [(empty(), empty()) for _ in range(config.num_layers)]
    done = jnp.zeros(rows, bool)
    tokens = jnp.array(tokens)
    key = jax.random.key(seed)
    position = 0
    while position < length - 1 and not done.all() and time.monotonic() < deadline:
        tokens, cache, done = _chunk(
            params, tokens, cache, done, starts, position, key, temperature, config
        )
        position = min(position + CHUNK, length - 1)
    end = config.eos_token_ids[0]
    out = []
    for row, prompt in zip(np.asarray(tokens), prompts, strict=True):
        generated = row[len(prompt) : position + 1].tolist()
        out.append(generated[: generated.index(end) + 1] if end in generated else generated)
    return out


@functools.partial(jax.jit, static_argnames=("config",), donate_argnames=("tokens", "cache"))
def _chunk(params, tokens, cache, done, starts, position, key, temperature, config: ModelConfig):
    length = tokens.shape[1]

    def step(t, carry):
        tokens, cache, done = carry
        current = jax.lax.dynamic_index_in_dim(tokens, t, axis=1, keepdims=False)
        logits, cache = _decode(params, current, cache, t, config)
        drawn = jax.random.categorical(jax.random.fold_in(key, t), logits / temperature)
        given = jax.lax.dynamic_index_in_dim(tokens, t + 1, axis=1, keepdims=False)
        generating = t + 1 >= starts
        following = jnp.where(generating & ~done, drawn, given)
        done = done | (generating & (following == config.eos_token_ids[0]))
        tokens = jax.lax.dynamic_update_index_in_dim(tokens, following, t + 1, axis=1)
        return tokens, cache, done

    last = jnp.minimum(position + CHUNK, length - 1)
    return jax.lax.fori_loop(position, last, step, (tokens, cache, done))


def _decode(params, tokens, cache, position, config: ModelConfig):
    """Logits [rows, vocab] after `tokens` [rows] at `position`, and the cache with them in it."""
    rows, kv, group, dim = len(tokens), config.num_kv_heads, config.group, config.head_dim
    positions = jnp.full(rows, position)
    cos, sin = rope_tables(positions, config.rope, dim)
    visible = jnp.arange(cache[0][0].shape[2]) <= position
    norm = functools.partial(add_norm, eps=config.rms_norm_eps, implementation="xla")
    x = embed(params, tokens)
    appended = []
    for layer, (keys, values) in zip(params["layers"], cache, strict=True):
        x, normed = norm(x, None, layer["attention_norm"])
        q, k, v = attention_inputs(layer, normed, cos, sin, config)
        keys = jax.lax.dynamic_update_index_in_dim(keys, k, position, axis=2)
        values = jax.lax.dynamic_update_index_in_dim(values, v, position, axis=2)
        appended.append((keys, values))
        q = q.reshape(rows, kv, group, dim)
        scores = jnp.einsum("rkgd,rktd->rkgt", q, keys, preferred_element_type=jnp.float32)
        weights = jax.nn.softmax(jnp.where(visible, scores * dim**-0.5, -jnp.inf), axis=-1)
        attended = jnp.einsum("rkgt,rktd->rkgd", weights.astype(values.dtype), values)
        delta = attention_output(layer, attended.reshape(rows, kv * group, dim), config)
        x, normed = norm(x, delta, layer["mlp_norm"])
        x = add(x, mlp(layer, normed))
    return lm_logits(params, final_norm(params, x, config)), appended
