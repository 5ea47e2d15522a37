"""What the engine tells about a request: new tokens, its end, or both."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from sparsespec_jax.engine.plan import NON_FINITE, StepResult
from sparsespec_jax.sampling.params import SamplingParams
from sparsespec_jax.sampling.verification import LENGTH, RUNNING, STOPPED

if TYPE_CHECKING:
    from sparsespec_jax.engine.request import Request

FINISH_REASONS = {RUNNING: None, STOPPED: "stop", LENGTH: "length", NON_FINITE: "error"}


@dataclasses.dataclass(frozen=True)
class TokenLogprobs:
    """Logprobs of one emitted token, and of the most likely ones (id, logprob), best first."""

    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclasses.dataclass(frozen=True)
class TokenEvent:
    """New tokens of a request, its end, or both.

    finish_reason: None while it runs; then `stop` (an EOS or stop id, which is the last token),
    `length`, `cancelled` or `error`.
    """

    request_id: int
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None = None
    finish_reason: str | None = None
    error: Exception | None = None


def token_event(request: Request, result: StepResult, entry: int) -> TokenEvent | None:
    """The event of `request`'s entry in a step's result; None if nothing happened."""
    emitted, finish = int(result.emitted[entry]), int(result.finish[entry])
    if not emitted and finish == RUNNING:
        return None
    error = None
    if finish == NON_FINITE:
        error = FloatingPointError(
            f"request {request.request_id}: the model's logits are not finite after "
            f"{request.stats.output_tokens} tokens"
        )
    return TokenEvent(
        request.request_id,
        tuple(result.tokens[entry, :emitted].tolist()),
        _token_logprobs(request.params, result, entry, emitted),
        FINISH_REASONS[finish],
        error,
    )


def _token_logprobs(
    params: SamplingParams, result: StepResult, entry: int, emitted: int
) -> tuple[TokenLogprobs, ...] | None:
    if params.logprobs is None:
        return None
    top = params.logprobs
    return tuple(
        TokenLogprobs(
            float(result.logprobs[entry, i]),
            tuple(
                zip(
                    result.top_ids[entry, i, :top].tolist(),
                    result.top_logprobs[entry, i, :top].tolist(),
                    strict=True,
                )
            ),
        )
        for i in range(emitted)
    )
