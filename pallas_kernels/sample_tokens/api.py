"""Choosing a token from each row of logits: the contract, and which implementation runs.

Shapes: S sample rows, vocabulary V, history width C. Everything is per row, so a result depends on
neither the other rows nor their number. Static switches keep the common case cheap: rows with
neutral parameters get the same result with a switch on or off.
- `filters`: some row uses top_k, top_p or min_p.
- `penalties`: some row uses repetition, frequency or presence; needs `history` int32 [S, C], whose
  entries below `args.position` are the tokens before the one being sampled.
"""

import jax.numpy as jnp
from jax import Array

from pallas_kernels.dispatch import Implementation, check
from pallas_kernels.sample_tokens import reference
from pallas_kernels.sample_tokens.args import SampleArgs


def sample_tokens(
    logits: Array,
    args: SampleArgs,
    history: Array | None = None,
    *,
    filters: bool = True,
    penalties: bool = False,
    implementation: Implementation = "auto",
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
    _check(logits, history, penalties)
    _choose(implementation)
    return reference.sample_tokens(logits, args, history, filters=filters, penalties=penalties)


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
    top_n: int = 0,
    penalties: bool = False,
) -> tuple[Array, Array, Array]:
    """What to report of `tokens` (int32 [S]): log_softmax over the full vocabulary, unfiltered.

    Of the untouched logits where `args.raw_logprobs` is 1, otherwise of the logits after bias,
    penalties and mask divided by temperature (by 1 in greedy rows).

    Returns:
      logprobs of the tokens float32 [S], the top_n most likely ids int32 [S, top_n], most likely
      first, and their logprobs float32 [S, top_n].
    """
    _check(logits, history, penalties)
    return reference.token_logprobs(logits, tokens, args, history, top_n=top_n, penalties=penalties)


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


def _choose(implementation: Implementation) -> None:
    check(
        implementation in ("auto", "pallas", "xla"),
        f"implementation={implementation!r}, but it must be 'auto', 'pallas' or 'xla'",
    )
    if implementation == "pallas":
        raise NotImplementedError("sample_tokens has no Pallas kernel; use 'auto' or 'xla'")
