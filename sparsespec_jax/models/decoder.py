"""The decoder: its layer arithmetic as functions on raw arrays, and the flax module around them.

A layer is two branches; each takes the norm of the residual stream and returns what to add to it.
What a branch and `project_qkv` return is in parts [S, ...] that the next op sums (`matmul_parts`).
The engine's step calls the branches with its own kernels: `add_norm` before each, and between
`project_qkv` and `attention_output` `append_kv` and paged attention. `Decoder` runs the same
functions with `attention_inputs` and ordinary causal attention: for training, rescoring and parity
tests.
"""

from __future__ import annotations

import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from pallas_kernels import add_norm, matmul, matmul_parts
from pallas_kernels.add_norm.reference import add
from pallas_kernels.append_kv.reference import rms_norm, rotate
from pallas_kernels.dispatch import Implementation
from pallas_kernels.matmul import reference as xla
from sparsespec_jax.models.config import ModelConfig
from sparsespec_jax.models.parameters import Params, init_params
from sparsespec_jax.models.rope import rope_tables


def embed(params: Params, tokens: jax.Array) -> jax.Array:
    """Token ids [...] to hidden states [..., hidden]."""
    return params["embedding"][tokens]


def embed_part(params: Params, tokens: jax.Array, vocab_start: jax.Array) -> jax.Array:
    """`embed` with a shard of the vocabulary, whose first id is `vocab_start`; 0 for other ids."""
    local = tokens - vocab_start
    inside = (local >= 0) & (local < len(params["embedding"]))
    return jnp.where(inside[..., None], params["embedding"][jnp.where(inside, local, 0)], 0)


def project_qkv(
    layer: Params, normed: jax.Array, *, implementation: Implementation = "xla"
) -> jax.Array:
    """Queries, keys and values of normed states [..., hidden], as parts
    [S, ..., kv_heads, group + 2, head_dim].

    Bias, head norms and rotation are still to come: see `head_params`.
    """
    return matmul_parts(normed, layer["qkv"], implementation=implementation)


def head_params(layer: Params, config: ModelConfig) -> dict[str, Any]:
    """What `append_kv` and `rotate` take besides the projection: None where a model has none."""
    return {
        "bias": layer["qkv_bias"] if config.qkv_bias else None,
        "q_norm": layer["q_norm"] if config.qk_norm else None,
        "k_norm": layer["k_norm"] if config.qk_norm else None,
        "eps": config.rms_norm_eps,
    }


def attention_inputs(
    layer: Params, normed: jax.Array, cos: jax.Array, sin: jax.Array, config: ModelConfig
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Rotated queries [..., heads, head_dim] and keys, and values, [..., kv_heads, head_dim]."""
    return rotate(xla.add_parts(project_qkv(layer, normed)), cos, sin, **head_params(layer, config))


def attention_output(
    layer: Params,
    attended: jax.Array,
    config: ModelConfig,
    *,
    implementation: Implementation = "xla",
) -> jax.Array:
    """Project attended values [..., heads, head_dim] back to parts [S, ..., hidden]."""
    shape = (*attended.shape[:-2], config.num_kv_heads, config.group, config.head_dim)
    attended = attended.reshape(shape)
    return matmul_parts(attended, layer["out"], contracted=3, implementation=implementation)


def mlp(layer: Params, normed: jax.Array, *, implementation: Implementation = "xla") -> jax.Array:
    """SwiGLU feed-forward of normed states [..., hidden], to parts [S, ..., hidden]."""
    gate_up = matmul(normed, layer["gate_up"], implementation=implementation)
    activated = jax.nn.silu(gate_up[..., 0, :]) * gate_up[..., 1, :]
    return matmul_parts(activated, layer["down"], implementation=implementation)


def final_norm(params: Params, x: jax.Array, config: ModelConfig) -> jax.Array:
    return rms_norm(x, params["final_norm"], config.rms_norm_eps)


def lm_logits(params: Params, x: jax.Array) -> jax.Array:
    """Float32 logits [..., vocab] of final-normed hidden states [..., hidden]."""
    head = params.get("lm_head", params["embedding"])
    return jax.lax.dot_general(
        x,
        head,
        (((x.ndim - 1,), (1,)), ((), ())),
        precision=xla.precision(x),
        preferred_element_type=jnp.float32,
    )


class Decoder(nnx.Module):
    """A causal language model whose parameters are the tree of `models/parameters.py`.

    `params` holds the tree as `nnx.Param` leaves; `raw()` returns it as plain arrays, which is what
    checkpoints store and the engine takes.
    """

    def __init__(
        self, config: ModelConfig, params: Params | None = None, *, rngs: nnx.Rngs | None = None
    ):
        if (params is None) == (rngs is None):
            raise ValueError("Decoder takes either params (existing) or rngs (random), not both")
        self.config = config
        if params is None:
            params = init_params(config, rngs.params())
        self.params = nnx.data(jax.tree.map(nnx.Param, params))

    def raw(self) -> Params:
        return jax.tree.map(
            lambda param: param[...], self.params, is_leaf=lambda leaf: isinstance(leaf, nnx.Param)
        )

    def __call__(
        self,
        tokens: jax.Array,
        *,
        attention: Literal["xla", "cudnn"] | None = None,
        remat: bool = False,
    ) -> jax.Array:
        """Float32 logits [batch, length, vocab] of `tokens` [batch, length], from position 0.

        `attention` picks the implementation of `jax.nn.dot_product_attention`. With `remat` the
        layers' activations are computed again in the backward pass.
        """
        return forward(self.raw(), tokens, self.config, attention=attention, remat=remat)


def forward(
    params: Params,
    tokens: jax.Array,
    config: ModelConfig,
    *,
    attention: Literal["xla", "cudnn"] | None = None,
    remat: bool = False,
) -> jax.Array:
    """`Decoder.__call__` on raw parameters."""
    cos, sin = rope_tables(jnp.arange(tokens.shape[-1])[None], config.rope, config.head_dim)
    norm = functools.partial(add_norm, eps=config.rms_norm_eps, implementation="xla")

    def block(layer: Params, x: jax.Array) -> jax.Array:
        x, normed = norm(x, None, layer["attention_norm"])
        q, k, v = attention_inputs(layer, normed, cos, sin, config)
        with jax.default_matmul_precision("highest" if x.dtype == jnp.float32 else None):
            attended = jax.nn.dot_product_attention(
                q, k, v, is_causal=True, implementation=attention
            )
        x, normed = norm(x, attention_output(layer, attended, config), layer["mlp_norm"])
        return add(x, mlp(layer, normed))

    if remat:
        block = jax.checkpoint(block)
    x = embed(params, tokens)
    for layer in params["layers"]:
        x = block(layer, x)
    return lm_logits(params, final_norm(params, x, config))
