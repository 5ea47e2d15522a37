"""What a generation returns."""

from __future__ import annotations

import dataclasses

from sparsespec_jax.engine.events import TokenLogprobs
from sparsespec_jax.engine.request import RequestStats


@dataclasses.dataclass(frozen=True)
class Completion:
    """One completed sample of a prompt.

    Attributes:
      index: which of the prompt's `n` samples.
      text: without the stop string (unless it was asked for) and, by default, special tokens.
      token_ids: up to and including the token that ended it.
      finish_reason: `stop` (EOS, stop id or stop string), `length`, `cancelled` or `error`.
      stop_reason: the stop string or token id that ended it.
      logprobs: one entry a token, if asked for.
      error: what went wrong, with finish_reason `error`.
      stats: times, cycles and accepted drafts; None if the request was refused.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    stop_reason: str | int | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None
    error: Exception | None = None
    stats: RequestStats | None = None


@dataclasses.dataclass(frozen=True)
class RequestOutput:
    """A prompt and its completions, `n` of them, by index."""

    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[Completion, ...]


@dataclasses.dataclass(frozen=True)
class StreamOutput:
    """News of one completion while it is generated.

    Attributes:
      prompt_index, index: which prompt, and which of its samples.
      text, token_ids: what is new. Text may lag behind the tokens: it is held back where a
        character is incomplete or a stop string may have begun. Joined, the texts of a completion
        are its final text.
      completion: the whole of it, in its last news.
    """

    prompt_index: int
    index: int
    text: str
    token_ids: tuple[int, ...]
    completion: Completion | None = None
