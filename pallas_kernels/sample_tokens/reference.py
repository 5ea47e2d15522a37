"""XLA reference of the op: what every implementation must compute, row by row.

A sample row's token is a function of its own logits, arguments and history alone.
"""

import jax
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.sample_tokens.args import Best, SampleArgs, TokenScores
from pallas_kernels.sample_tokens.filters import filter_logits
from pallas_kernels.sample_tokens.noise import gumbel_noise


def process_logits(
    logits: Array,
    args: SampleArgs,
    history: Array | None,
    *,
    filters: bool,
    penalties: bool,
    vocab_start: int | Array = 0,
) -> Array:
    """Bias, penalties, the min-length mask, temperature, then filters: float32 [S, V]."""
    logits = _add_sparse(logits, *sparse_changes(args), vocab_start)
    if penalties:
        logits = _penalise(logits, args, history, vocab_start)
    logits = logits / divisor(args)[:, None]
    if filters:
        logits = filter_logits(logits, args.top_k, args.top_p, args.min_p)
    return logits


def penalised_logits(
    logits: Array, args: SampleArgs, history: Array, vocab_start: int | Array = 0
) -> Array:
    """The part of `process_logits` before temperature and filters."""
    logits = _add_sparse(logits, *sparse_changes(args), vocab_start)
    return _penalise(logits, args, history, vocab_start)


def divisor(args: SampleArgs) -> Array:
    """The temperature; 1 in greedy rows."""
    return jnp.where(args.temperature > 0, args.temperature, 1)


def best_tokens(
    logits: Array,
    args: SampleArgs,
    history: Array | None,
    *,
    filters: bool,
    penalties: bool,
    vocab_start: int | Array = 0,
) -> Best:
    """argmax(processed logits + Gumbel noise), without noise where temperature is 0."""
    scores = process_logits(
        logits, args, history, filters=filters, penalties=penalties, vocab_start=vocab_start
    )
    noise = gumbel_noise(args.seed, args.position, logits.shape[-1], vocab_start=vocab_start)
    noisy = scores + jnp.where(args.temperature[:, None] > 0, noise, 0)
    at = jnp.argmax(noisy, -1).astype(jnp.int32)
    score = jnp.take_along_axis(noisy, at[:, None], -1)[:, 0]
    live = args.position >= 0
    return Best(
        jnp.where(live, at + vocab_start, 0).astype(jnp.int32),
        jnp.where(live, score, -jnp.inf),
        jnp.where(live, logits.max(-1), -jnp.inf),
    )


def sampling_logprobs(
    logits: Array, args: SampleArgs, history: Array | None, *, filters: bool, penalties: bool
) -> Array:
    """log of the distribution `sample_tokens` draws from: float32 [S, V].

    A greedy row is one-hot: 0 at its argmax, -inf elsewhere.
    """
    scores = process_logits(logits, args, history, filters=filters, penalties=penalties)
    best = jnp.argmax(scores, -1, keepdims=True)
    one_hot = jnp.where(_ids(logits) == best, 0.0, -jnp.inf)
    return jnp.where(args.temperature[:, None] > 0, jax.nn.log_softmax(scores), one_hot)


def token_scores(
    logits: Array,
    tokens: Array,
    args: SampleArgs,
    history: Array | None,
    *,
    top_n: int,
    penalties: bool,
    vocab_start: int | Array = 0,
) -> TokenScores:
    """What the log-probabilities of `tokens` and of the top_n most likely ids derive from."""
    processed = process_logits(
        logits, args, history, filters=False, penalties=penalties, vocab_start=vocab_start
    )
    scores = jnp.where(args.raw_logprobs[:, None] != 0, logits, processed)
    local = tokens - vocab_start
    inside = (local >= 0) & (local < logits.shape[-1])
    chosen = jnp.take_along_axis(scores, jnp.where(inside, local, 0)[:, None], -1)[:, 0]
    chosen = jnp.where(inside, chosen, -jnp.inf)
    ids, top = jnp.zeros((len(tokens), 0), jnp.int32), jnp.zeros((len(tokens), 0))
    if top_n:
        top, ids = lax.top_k(scores, min(top_n, logits.shape[-1]))
        ids = (ids + vocab_start).astype(jnp.int32)
    return TokenScores(chosen, jax.nn.logsumexp(scores, axis=-1), ids, top)


def finite_rows(logits: Array) -> Array:
    """Whether a row of float32 [S, V] can be sampled: no NaN, no +inf, not all -inf: bool [S]."""
    return jnp.isfinite(logits.max(-1))  # the maximum is NaN if any entry is


def sparse_changes(args: SampleArgs) -> tuple[Array, Array]:
    """What to add to which ids, [S, N + W] each: the biases, and -inf to ids withheld for now.

    -inf survives the penalties, so the mask may come before them.
    """
    early = (args.position < args.min_length)[:, None]
    withheld = jnp.where(early, args.withheld_ids, -1)
    ids = jnp.concatenate([args.bias_ids, withheld], -1)
    values = jnp.concatenate([args.bias_values, jnp.full(withheld.shape, -jnp.inf)], -1)
    return ids, values


def _add_sparse(logits: Array, ids: Array, values: Array, vocab_start: int | Array) -> Array:
    """One small scatter; padding and the ids of other shards touch nothing."""
    local = ids - vocab_start
    local = _drop_if((ids < 0) | (local < 0), local, logits)
    return logits.at[_rows(ids), local].add(values, mode="drop")


def _penalise(logits: Array, args: SampleArgs, history: Array, vocab_start: int | Array) -> Array:
    """Repetition over the whole history, then frequency and presence over its output part."""
    place = jnp.arange(history.shape[-1])
    before = place < args.position[:, None]
    output = before & (place >= args.prompt_length[:, None])
    local = history - vocab_start
    before, output = before & (local >= 0), output & (local >= 0)
    seen = _count(local, before, logits) > 0
    emitted = _count(local, output, logits)
    repetition = args.repetition[:, None]
    repeated = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = jnp.where(seen, repeated, logits)
    return logits - (args.frequency[:, None] * emitted + args.presence[:, None] * (emitted > 0))


def _count(history: Array, mask: Array, logits: Array) -> Array:
    """How often each id occurs in the masked history [S, context]: int32 [S, V]."""
    ids = _drop_if(~mask, history, logits)
    return jnp.zeros(logits.shape, jnp.int32).at[_rows(ids), ids].add(1, mode="drop")


def _drop_if(mask: Array, ids: Array, logits: Array) -> Array:
    """Masked ids replaced by one past the vocabulary: negative indices would wrap around."""
    return jnp.where(mask, logits.shape[-1], ids)


def _rows(ids: Array) -> Array:
    return jnp.arange(ids.shape[0])[:, None]


def _ids(logits: Array) -> Array:
    return lax.broadcasted_iota(jnp.int32, (1, logits.shape[-1]), 1)
