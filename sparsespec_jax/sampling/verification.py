"""Which drafts a verify pass keeps, and where a request ends.

A cycle drafts n_drafts <= k tokens x_0 .. x_{n-1} with sparse attention; the verify pass gives the
exact distribution p_i of each of those positions and of the one after them. Whatever the drafts
are, the emitted tokens are distributed as if drawn one by one from p: drafts decide only how many
come out of a cycle. A cycle emits accepted + 1 tokens; the last one is the target's own (recovered
where a draft failed, bonus where none did). "Accepted" never counts it.

R verify rows, k drafts, vocabulary V.
"""

import jax.numpy as jnp
from jax import Array

from pallas_kernels.sample_tokens import (
    ACCEPT_STREAM,
    RESIDUAL_STREAM,
    gumbel_noise,
    uniform_noise,
)

RUNNING, STOPPED, LENGTH = 0, 1, 2


def accept_coupled(drafts: Array, n_drafts: Array, sampled: Array) -> tuple[Array, Array]:
    """Accepts drafts while they equal the target's own tokens.

    The target samples each position with the noise its draft was sampled with (a Gumbel coupling),
    so the two often agree, and the emitted tokens are exactly those that plain decoding samples.

    Args:
      drafts: int32 [R, k].
      n_drafts: int32 [R]; drafts[:, n_drafts:] are ignored.
      sampled: int32 [R, k + 1]; the target's token at each draft position and after the last one.

    Returns:
      accepted int32 [R], and tokens int32 [R, k + 1], of which the first accepted + 1 are emitted.
    """
    return _leading(drafts == sampled[:, :-1], n_drafts), sampled


def accept_rejection(
    drafts: Array,
    n_drafts: Array,
    target_logp: Array,
    draft_logp: Array | None,
    seeds: Array,
    starts: Array,
) -> tuple[Array, Array]:
    """Speculative sampling (Leviathan et al. 2023; Chen et al. 2023).

    Accepts draft x with probability min(1, p(x) / q(x)). The first position that fails draws from
    norm(max(p - q, 0)) instead; if none fails, the next position draws from p.

    Args:
      drafts: int32 [R, k].
      n_drafts: int32 [R]; drafts[:, n_drafts:] are ignored.
      target_logp: float32 [R, k + 1, V]; log p after all processing, filters included.
      draft_logp: float32 [R, k, V]; log q that each draft was drawn from; None if drafts were not
        drawn at random (q one-hot).
      seeds: uint32 [R, 2].
      starts: int32 [R]; position of the first draft token.

    Returns:
      accepted int32 [R], and tokens int32 [R, k + 1], of which the first accepted + 1 are emitted.
    """
    k, vocab_size = drafts.shape[1], target_logp.shape[-1]
    if draft_logp is None:
        draft_logp = jnp.where(drafts[..., None] == jnp.arange(vocab_size), 0.0, -jnp.inf)

    log_p, log_q = _of(drafts, target_logp[:, :k]), _of(drafts, draft_logp)
    u = _uniforms(seeds, starts, k)
    possible = log_q > -jnp.inf  # a draft q cannot produce is never kept
    accepted = _leading(possible & (u <= jnp.exp(log_p - log_q)), n_drafts)

    p = jnp.exp(_row(target_logp, accepted))
    q = jnp.exp(_row(draft_logp, jnp.minimum(accepted, k - 1)))
    residual = jnp.where((accepted < n_drafts)[:, None], jnp.maximum(p - q, 0), p)
    residual = jnp.where(residual.sum(-1, keepdims=True) > 0, residual, p)  # p == q but rounding
    noise = gumbel_noise(seeds, starts + accepted, vocab_size, stream=RESIDUAL_STREAM)
    last = jnp.argmax(jnp.log(residual) + noise, -1).astype(jnp.int32)

    padded = jnp.pad(drafts, ((0, 0), (0, 1)))
    return accepted, jnp.where(jnp.arange(k + 1) < accepted[:, None], padded, last[:, None])


def truncate(
    tokens: Array,
    emitted: Array,
    stop_ids: Array,
    length: Array,
    max_length: Array,
    min_length: Array,
) -> tuple[Array, Array, Array]:
    """Ends each request at its first stop id, which it keeps, or at its maximum length.

    Args:
      tokens: int32 [R, Q]; the first `emitted` of each row are new.
      emitted: int32 [R].
      stop_ids: int32 [R, M], padded with -1.
      length: int32 [R]; tokens of the request, prompt included, before these.
      max_length: int32 [R]; length at which the request ends.
      min_length: int32 [R]; stop ids at positions below it do not count.

    Returns:
      emitted int32 [R], now cut; finished bool [R]; reason int32 [R]: RUNNING, STOPPED or LENGTH,
      STOPPED if both hold.
    """
    index = jnp.arange(tokens.shape[1])
    emitted = jnp.clip(emitted, 0, jnp.maximum(max_length - length, 0))
    stop_ids = stop_ids[:, None, :]
    is_stop = ((tokens[..., None] == stop_ids) & (stop_ids >= 0)).any(-1)
    is_stop &= (index < emitted[:, None]) & (length[:, None] + index >= min_length[:, None])
    stopped = is_stop.any(-1)
    emitted = jnp.where(stopped, jnp.argmax(is_stop, -1) + 1, emitted).astype(jnp.int32)
    full = length + emitted >= max_length
    reason = jnp.where(stopped, STOPPED, jnp.where(full, LENGTH, RUNNING)).astype(jnp.int32)
    return emitted, reason != RUNNING, reason


def _leading(kept: Array, n_drafts: Array) -> Array:
    """How many of the first n_drafts entries of bool [R, k] hold before one does not: int32 [R]."""
    kept &= jnp.arange(kept.shape[1]) < n_drafts[:, None]
    return jnp.cumprod(kept, -1, dtype=jnp.int32).sum(-1, dtype=jnp.int32)


def _of(tokens: Array, logp: Array) -> Array:
    """logp [R, k, V] at tokens [R, k]."""
    return jnp.take_along_axis(logp, tokens[..., None], -1)[..., 0]


def _row(logp: Array, index: Array) -> Array:
    """logp [R, n, V] at one position index [R] of each row: [R, V]."""
    return jnp.take_along_axis(logp, index[:, None, None], 1)[:, 0]


def _uniforms(seeds: Array, starts: Array, k: int) -> Array:
    """One uniform number per draft position: float32 [R, k]."""
    positions = (starts[:, None] + jnp.arange(k)).reshape(-1)
    return uniform_noise(jnp.repeat(seeds, k, 0), positions, ACCEPT_STREAM).reshape(-1, k)
