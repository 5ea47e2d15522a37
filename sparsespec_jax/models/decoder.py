"""The decoder: its layer arithmetic as functions on raw arrays, and the flax module around them.

The engine's step calls the functions with its own paged attention between `attention_inputs` and
`attention_output`. `Decoder` runs the same functions with ordinary causal attention: for training,
rescoring and parity tests.
"""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx

from sparsespec_jax.models.config import ModelConfig
from sparsespec_jax.models.parameters import Params, init_params
from sparsespec_jax.models.rope import apply_rope, rope_tables


def embed(params: Params, tokens: jax.Array) -> jax.Array:
    """Token ids [...] to hidden states [..., hidden]."""
    return params["embedding"][tokens]


def attention_inputs(
    layer: Params, x: jax.Array, cos: jax.Array, sin: jax.Array, config: ModelConfig
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Rotated queries [..., heads, head_dim] and keys, and values, [..., kv_heads, head_dim]."""
    x = rms_norm(x, layer["attention_norm"], config.rms_norm_eps)
    qkv = _matmul(x, layer["qkv"], 1)
    if config.qkv_bias:
        qkv = qkv + layer["qkv_bias"]
    group = config.group
    q, k, v = qkv[..., :group, :], qkv[..., group, :], qkv[..., group + 1, :]
    q = q.reshape(*x.shape[:-1], config.num_heads, config.head_dim)
    if config.qk_norm:
        q = rms_norm(q, layer["q_norm"], config.rms_norm_eps)
        k = rms_norm(k, layer["k_norm"], config.rms_norm_eps)
    return apply_rope(q, cos, sin), apply_rope(k, cos, sin), v


def attention_output(layer: Params, attended: jax.Array, config: ModelConfig) -> jax.Array:
    """Project attended values [..., heads, head_dim] back to [..., hidden]."""
    shape = (*attended.shape[:-2], config.num_kv_heads, config.group, config.head_dim)
    return _matmul(attended.reshape(shape), layer["out"], 3)


def mlp(layer: Params, x: jax.Array, config: ModelConfig) -> jax.Array:
    """SwiGLU feed-forward of the normed input, [..., hidden] to [..., hidden]."""
    x = rms_norm(x, layer["mlp_norm"], config.rms_norm_eps)
    gate_up = _matmul(x, layer["gate_up"], 1)
    return _matmul(jax.nn.silu(gate_up[..., 0, :]) * gate_up[..., 1, :], layer["down"], 1)


def final_norm(params: Params, x: jax.Array, config: ModelConfig) -> jax.Array:
    return rms_norm(x, params["final_norm"], config.rms_norm_eps)


def lm_logits(params: Params, x: jax.Array) -> jax.Array:
    """Float32 logits [..., vocab] of final-normed hidden states [..., hidden]."""
    head = params.get("lm_head", params["embedding"])
    return jax.lax.dot_general(
        x,
        head,
        (((x.ndim - 1,), (1,)), ((), ())),
        precision=_precision(x),
        preferred_element_type=jnp.float32,
    )


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """Root-mean-square norm (Zhang & Sennrich, 2019), computed in float32."""
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    return wide.astype(x.dtype) * scale


def _matmul(x: jax.Array, weight: jax.Array, contracted: int) -> jax.Array:
    """Contract the last `contracted` axes of `x` with the first of `weight`."""
    axes = tuple(range(x.ndim - contracted, x.ndim)), tuple(range(contracted))
    return jax.lax.dot_general(x, weight, (axes, ((), ())), precision=_precision(x))


def _precision(x: jax.Array) -> jax.lax.Precision:
    """Float32 is for exactness: never let a GPU round it to TF32."""
    wide = x.dtype == jnp.float32
    return jax.lax.Precision.HIGHEST if wide else jax.lax.Precision.DEFAULT


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

    def block(layer: Params, x: jax.Array) -> jax.Array:
        q, k, v = attention_inputs(layer, x, cos, sin, config)
        with jax.default_matmul_precision("highest" if x.dtype == jnp.float32 else None):
            attended = jax.nn.dot_product_attention(
                q, k, v, is_causal=True, implementation=attention
            )
        x = x + attention_output(layer, attended, config)
        return x + mlp(layer, x, config)

    if remat:
        block = jax.checkpoint(block)
    x = embed(params, tokens)
    for layer in params["layers"]:
        x = block(layer, x)
    return lm_logits(params, final_norm(params, x, config))
