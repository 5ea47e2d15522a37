"""Choosing a token from each row of logits: the contract, and which implementation runs.

Shapes: S sample rows, vocabulary V, history width C. Everything is per row, so a result depends on
neither the other rows nor their number. Static switches keep the common case cheap: rows with
neutral parameters get the same result with a switch on or off.
- `filters`: some row uses top_k, top_p or min_p.
- `penalties`: some row uses repetition, frequency or presence; needs `history` int32 [S, C], whose
  entries below `args.position` are the tokens before the one being sampled.
Rows whose `args.position` is negative are skipped, at next to no cost.

The Pallas kernel scores like the reference, operation by operation, so both take the same token
from the same logits. They may differ on whether top_p keeps the least likely of the tokens it
keeps, where the sum of probabilities meets top_p within float32 rounding: it has another order.
"""

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.dispatch import Implementation, check, resolve
from pallas_kernels.sample_tokens import reference
from pallas_kernels.sample_tokens.args import Best, SampleArgs, Sampled, TokenScores
from pallas_kernels.sample_tokens.changes import Changes


def sample(
    logits: Array,
    args: SampleArgs,
    history: Array | None = None,
    *,
    filters: bool = True,
    penalties: bool = False,
    implementation: Implementation = "auto",
    interpret: bool | None = None,
) -> Sampled:
    """`sample_tokens` and `finite_rows` in one pass over the logits; arguments as of the former."""
    _check(logits, history, penalties)
    pallas, interpret = resolve(implementation, interpret)
    if logits.shape[0] == 0:
        return Sampled(jnp.zeros((0,), jnp.int32), jnp.zeros((0,), bool))
    if pallas:
        best = _pallas_best(logits, args, history, 0, filters, penalties, interpret)
    else:
        best = reference.best_tokens(logits, args, history, filters=filters, penalties=penalties)
    return Sampled(best.token, jnp.isfinite(best.peak))


def sample_tokens(
    logits: Array,
    args: SampleArgs,
    history: Array | None = None,
    *,
    filters: bool = True,
    penalties: bool = False,
    implementation: Implementation = "auto",
    interpret: bool | None = None,
) -> Array:
    """The token of each row: argmax(processed logits + Gumbel noise of (seed, position, id)).

    By the Gumbel-max trick (Gumbel 1954; Maddison et al. 2014) it is a sample of the softmax of the
    processed logits, and a function of logits, parameters, seed and position alone. Rows with
    temperature 0 take the argmax without noise. The lowest id wins a tie.

    Args:
      logits: float32 [S, V], as the model computed them.
      args: the rows' parameters.
      history: int32 [S, C], needed with penalties only.

    Returns:
      int32 [S]; arbitrary ids where `finite_rows` is False.
    """
    return sample(
        logits,
        args,
        history,
        filters=filters,
        penalties=penalties,
        implementation=implementation,
        interpret=interpret,
    ).token


def best_in_shard(
    logits: Array,
    args: SampleArgs,
    vocab_start: int | Array,
    history: Array | None = None,
    *,
    penalties: bool = False,
    implementation: Implementation = "auto",
    interpret: bool | None = None,
) -> Best:
    """The best token of a shard of the vocabulary, without filters.

    Args:
      logits: float32 [S, V / shards].
      args: as for `sample_tokens`; its ids and those of `history` are of the whole vocabulary.
      vocab_start: id of the shard's first token.

    Returns:
      What `merge_shards` makes `sample`'s result of, 12 bytes a row.
    """
    _check(logits, history, penalties)
    pallas, interpret = resolve(implementation, interpret)
    if pallas:
        return _pallas_best(logits, args, history, vocab_start, False, penalties, interpret)
    return reference.best_tokens(
        logits, args, history, filters=False, penalties=penalties, vocab_start=vocab_start
    )


def merge_shards(best: Best) -> Sampled:
    """From `best_in_shard` of every shard, stacked in the order of their ids: [shards, S] each."""
    shard = jnp.argmax(best.score, 0)[None]
    token = jnp.take_along_axis(best.token, shard, 0)[0]
    return Sampled(token, jnp.isfinite(best.peak.max(0)))


def process_logits(
    logits: Array,
    args: SampleArgs,
    history: Array | None = None,
    *,
    filters: bool = True,
    penalties: bool = False,
) -> Array:
    """The logits after bias, repetition, frequency and presence, mask, temperature and filters.

    Args as for `sample_tokens`. Greedy rows are divided by 1 and filtered like the others, which
    cannot change their argmax.

    Returns:
      float32 [S, V]; -inf where a token cannot be sampled.
    """
    _check(logits, history, penalties)
    return reference.process_logits(logits, args, history, filters=filters, penalties=penalties)


def sampling_logprobs(
    logits: Array,
    args: SampleArgs,
    history: Array | None = None,
    *,
    filters: bool = True,
    penalties: bool = False,
) -> Array:
    """The log of the distribution that `sample_tokens` draws from, float32 [S, V].

    Args as for `sample_tokens`. Greedy rows are one-hot. It is the p or q of rejection sampling.
    """
    _check(logits, history, penalties)
    return reference.sampling_logprobs(logits, args, history, filters=filters, penalties=penalties)


def token_logprobs(
    logits: Array,
    tokens: Array,
    args: SampleArgs,
    history: Array | None = None,
    *,
    rows: Array | None = None,
    top_n: int = 0,
    penalties: bool = False,
    implementation: Implementation = "auto",
    interpret: bool | None = None,
) -> tuple[Array, Array, Array]:
    """What to report of `tokens` (int32 [E]): log_softmax over the full vocabulary, unfiltered.

    Of the untouched logits where `args.raw_logprobs` is 1, otherwise of the logits after bias,
    penalties and mask divided by temperature (by 1 in greedy rows).

    Args:
      logits: float32 [S, V].
      tokens: int32 [E].
      args: the parameters of each of the E tokens, as is `history`.
      rows: int32 [E], which row of logits each token is of; default: one after the other. Cheaper
        than gathering the logits.
      top_n: how many of the most likely ids to report; more than 0 takes the XLA path, as do
        penalties.

    Returns:
      logprobs of the tokens float32 [E], the top_n most likely ids int32 [E, top_n], most likely
      first, and their logprobs float32 [E, top_n].
    """
    scores = scores_in_shard(
        logits,
        tokens,
        args,
        0,
        history,
        rows=rows,
        top_n=top_n,
        penalties=penalties,
        implementation=implementation,
        interpret=interpret,
    )
    normaliser = scores.normaliser
    return scores.chosen - normaliser, scores.ids, scores.top - normaliser[:, None]


def scores_in_shard(
    logits: Array,
    tokens: Array,
    args: SampleArgs,
    vocab_start: int | Array,
    history: Array | None = None,
    *,
    rows: Array | None = None,
    top_n: int = 0,
    penalties: bool = False,
    implementation: Implementation = "auto",
    interpret: bool | None = None,
) -> TokenScores:
    """What a shard of the vocabulary contributes to `token_logprobs`.

    Args as there and as for `best_in_shard`.

    Returns:
      What `merge_scores` makes the result of `token_logprobs` of.
    """
    _check(logits, history, penalties)
    pallas, interpret = resolve(implementation, interpret)
    if pallas and top_n == 0 and not penalties and tokens.shape[0]:
        return _pallas_scores(logits, tokens, args, vocab_start, rows, interpret)
    if rows is not None:
        logits = logits[rows]
    return reference.token_scores(
        logits, tokens, args, history, top_n=top_n, penalties=penalties, vocab_start=vocab_start
    )


def merge_scores(scores: TokenScores, top_n: int) -> tuple[Array, Array, Array]:
    """From `scores_in_shard` of every shard, stacked in the order of their ids."""
    normaliser = jax.nn.logsumexp(scores.normaliser, axis=0)
    ids, top = (jnp.concatenate([*part], axis=1) for part in (scores.ids, scores.top))
    if top_n:
        top, place = jax.lax.top_k(top, top_n)
        ids = jnp.take_along_axis(ids, place, axis=1)
    return scores.chosen.max(0) - normaliser, ids, top - normaliser[:, None]


def finite_rows(logits: Array) -> Array:
    """Whether each row of logits float32 [S, V] can be sampled, bool [S].

    False if it holds NaN or +inf, or nothing but -inf: fail that request, not its neighbours.
    """
    return reference.finite_rows(logits)


def _check(logits: Array, history: Array | None, penalties: bool) -> None:
    check(
        logits.ndim == 2 and logits.dtype == jnp.float32,
        f"logits must be float32 [S, V], but they are {logits.dtype} {list(logits.shape)}",
    )
    check(
        history is not None or not penalties,
        "penalties=True needs history, the tokens [S, C] of every row, but it is None",
    )


def _pallas_best(
    logits: Array,
    args: SampleArgs,
    history: Array | None,
    vocab_start: int | Array,
    filters: bool,
    penalties: bool,
    interpret: bool,
) -> Best:
    """Penalties are dense and rare: XLA applies them, and the kernel sees the penalised logits."""
    from pallas_kernels.sample_tokens import pallas_triton

    changes, penalised = Changes.of(args), logits
    if penalties:
        changes = Changes.none(logits.shape[0])
        penalised = reference.penalised_logits(logits, args, history, vocab_start)
    best = pallas_triton.best_tokens(
        penalised,
        args,
        changes,
        jnp.asarray(vocab_start, jnp.int32),
        filters=filters,
        interpret=interpret,
    )
    if penalties:
        best = best._replace(peak=jnp.where(args.position < 0, -jnp.inf, logits.max(-1)))
    return best


def _pallas_scores(
    logits: Array,
    tokens: Array,
    args: SampleArgs,
    vocab_start: int | Array,
    rows: Array | None,
    interpret: bool,
) -> TokenScores:
    from pallas_kernels.sample_tokens import pallas_triton

    rows = jnp.arange(len(tokens), dtype=jnp.int32) if rows is None else rows.astype(jnp.int32)
    raw = args.raw_logprobs != 0
    divisor = jnp.where(raw, 1, reference.divisor(args))
    args = args._replace(
        bias_ids=_local(jnp.where(raw[:, None], -1, args.bias_ids), vocab_start),
        withheld_ids=_local(args.withheld_ids, vocab_start),
        min_length=jnp.where(raw, 0, args.min_length),
    )
    tokens = _local(tokens, vocab_start)
    inside = (tokens >= 0) & (tokens < logits.shape[1])
    normaliser = pallas_triton.log_normalisers(
        logits, rows, divisor, Changes.of(args), interpret=interpret
    )
    ids, values = reference.sparse_changes(args)
    change = jnp.where(ids == tokens[:, None], values, 0).sum(-1)
    chosen = (logits[rows, jnp.where(inside, tokens, 0)] + change) / divisor
    nothing = jnp.zeros((len(tokens), 0))
    return TokenScores(
        jnp.where(inside, chosen, -jnp.inf), normaliser, nothing.astype(jnp.int32), nothing
    )


def _local(ids: Array, vocab_start: int | Array) -> Array:
    """Ids counted from the shard's first; -1 for those of the shards before it, and for padding."""
    return jnp.maximum(ids - vocab_start, -1)
