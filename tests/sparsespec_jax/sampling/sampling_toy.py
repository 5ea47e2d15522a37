"""A whole generation loop in a few lines, around models that are tables of logits.

The "model" gives the logits after a token as a row of a table [V, V]; draft and target have a table
each. Everything else is what the engine does: a device-resident history per batch row, k draft
steps and one verify step per cycle, the same processing for both. All rows run in lock-step.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.sample_tokens import sample_tokens, sampling_logprobs, token_logprobs
from sparsespec_jax.sampling import (
    RowSampling,
    accept_coupled,
    accept_rejection,
    pack_row,
    sample_args,
    sample_history,
    truncate,
    unpack_rows,
)

CONTEXT = 40  # one width for all tests: shapes decide what compiles again
SWITCHES = {"filters": True, "penalties": True}


class Run(NamedTuple):
    """Everything that lives on the device; R rows."""

    state: RowSampling
    tokens: jax.Array  # int32 [R, CONTEXT]
    logprobs: jax.Array  # float32 [R, CONTEXT]
    length: jax.Array  # int32 [R]
    max_length: jax.Array  # int32 [R]
    reason: jax.Array  # int32 [R]
    accepted: jax.Array  # int32 [R]; drafts kept so far


def random_tables(vocab, seed=0, scale=1.5, draft_error=0.7):
    """Target and draft tables that agree often, but not always."""
    rng = np.random.default_rng(seed)
    target = rng.normal(size=(vocab, vocab)) * scale
    draft = target + rng.normal(size=(vocab, vocab)) * draft_error
    return jnp.asarray(target, jnp.float32), jnp.asarray(draft, jnp.float32)


def generate(
    target,
    draft,
    params,
    prompt,
    seeds,
    *,
    k=4,
    n_new=12,
    eos_ids=(),
    verification="coupled",
    proposals="sampled",
):
    """Generates n_new tokens (or fewer, on a stop id) after `prompt` for every seed, by cycles.

    k=0 is plain decoding. proposals="deterministic" drafts the argmax of the draft table.

    Returns:
      tokens emitted: list of lists; finish reasons; logprobs of the emitted tokens, list of lists;
      drafts accepted over all cycles, by row.
    """
    start = len(prompt)
    assert start + n_new + k + 1 <= CONTEXT
    words = np.stack([pack_row(params, seed, start, eos_ids) for seed in seeds])
    run = _start(words, np.asarray(prompt, np.int32), start + n_new)
    while not np.asarray(run.reason).all():
        run = _cycle(run, target, draft, k, verification, proposals)
    run = jax.tree.map(np.asarray, run)
    emitted = [slice(start, stop) for stop in run.length]
    tokens = [row[new].tolist() for row, new in zip(run.tokens, emitted, strict=True)]
    logprobs = [row[new].tolist() for row, new in zip(run.logprobs, emitted, strict=True)]
    return tokens, run.reason.tolist(), logprobs, run.accepted


@jax.jit
def _start(words, prompt, max_length):
    rows = len(words)
    tokens = jnp.zeros((rows, CONTEXT), jnp.int32).at[:, : len(prompt)].set(prompt)
    none = jnp.zeros(rows, jnp.int32)
    return Run(
        state=unpack_rows(words),
        tokens=tokens,
        logprobs=jnp.zeros(tokens.shape),
        length=none + len(prompt),
        max_length=none + max_length,
        reason=none,
        accepted=none,
    )


@functools.partial(jax.jit, static_argnames=("k", "verification", "proposals"))
def _cycle(run, target, draft, k, verification, proposals):
    """k draft steps and one verify step of every row."""
    row = jnp.arange(len(run.length))

    def draft_step(tokens, j):
        position = run.length - 1 + j
        logits = draft[tokens[row, position]]
        inputs = logits, sample_args(run.state, row, position), sample_history(tokens, row)
        if proposals == "deterministic":
            token, logp = jnp.argmax(logits, -1).astype(jnp.int32), None
        else:
            token = sample_tokens(*inputs, **SWITCHES)
            rejection = verification == "rejection"
            logp = sampling_logprobs(*inputs, **SWITCHES) if rejection else None
        return tokens.at[row, position + 1].set(token), logp

    tokens, draft_logp = jax.lax.scan(draft_step, run.tokens, jnp.arange(k))

    place = run.length[:, None] + jnp.arange(k + 1)  # of the tokens this cycle may emit
    rows, positions = jnp.repeat(row, k + 1), place.reshape(-1) - 1
    logits = target[tokens[rows, positions]]
    args, history = sample_args(run.state, rows, positions), sample_history(tokens, rows)
    drafts, n_drafts = tokens[row[:, None], place[:, :k]], jnp.full(len(row), k)
    if verification == "coupled":
        sampled = sample_tokens(logits, args, history, **SWITCHES)
        accepted, new = accept_coupled(drafts, n_drafts, sampled.reshape(-1, k + 1))
    else:
        p = sampling_logprobs(logits, args, history, **SWITCHES).reshape(len(row), k + 1, -1)
        q = None if draft_logp is None else jnp.swapaxes(draft_logp, 0, 1)
        accepted, new = accept_rejection(drafts, n_drafts, p, q, run.state.seed, run.length)

    running = run.reason == 0
    emitted, _, reason = truncate(
        new,
        jnp.where(running, accepted + 1, 0),
        run.state.stop_ids,
        run.length,
        run.max_length,
        run.state.min_length,
    )
    logp, _, _ = token_logprobs(logits, new.reshape(-1), args, history, penalties=True)
    place = jnp.where(jnp.arange(k + 1) < emitted[:, None], place, CONTEXT)  # dropped
    put = lambda old, values: old.at[row[:, None], place].set(values, mode="drop")  # noqa: E731
    return run._replace(
        tokens=put(tokens, new),
        logprobs=put(run.logprobs, logp.reshape(new.shape)),
        length=run.length + emitted,
        reason=jnp.where(running, reason, run.reason),
        accepted=run.accepted + jnp.minimum(accepted, emitted) * running,
    )
