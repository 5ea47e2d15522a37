"""What a request may be: which prompts an engine takes, and how long a text can get."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from sparsespec_jax.sampling.params import SamplingParams


class Limits(NamedTuple):
    """capacity: tokens of the KV pool, k of them for drafts."""

    vocab_size: int
    max_context: int
    capacity: int
    k: int

    @property
    def most_length(self) -> int:
        """Tokens that one request can have at most, alone in the pool."""
        return min(self.max_context, self.capacity - self.k)

    def check_prompt(self, prompt: Sequence[int] | np.ndarray) -> np.ndarray:
        """The prompt as int32 [n]. Raises ValueError if it can never run."""
        prompt = np.asarray(prompt)
        if prompt.ndim != 1 or len(prompt) == 0:
            raise ValueError(
                f"prompt must be a non-empty list of token ids, got shape {prompt.shape}"
            )
        if not np.issubdtype(prompt.dtype, np.integer):
            raise ValueError(f"prompt must hold integers, got {prompt.dtype}")
        if (bad := prompt[(prompt < 0) | (prompt >= self.vocab_size)]).size:
            raise ValueError(
                f"prompt holds token id {bad[0]}, allowed are 0 to {self.vocab_size - 1}"
            )
        if len(prompt) >= self.max_context:
            raise ValueError(
                f"prompt has {len(prompt)} tokens, which leaves no room in the context of "
                f"{self.max_context}"
            )
        return prompt.astype(np.int32)

    def max_length(self, prompt_length: int, params: SamplingParams) -> int:
        """Tokens at which the request ends. Raises ValueError if they can never fit the pool."""
        length = self.most_length
        if params.max_tokens is not None:
            length = min(prompt_length + params.max_tokens, self.max_context)
        if length > self.most_length or length <= prompt_length:
            raise ValueError(
                f"{prompt_length} prompt tokens and max_tokens={params.max_tokens} can never fit: "
                f"the KV pool holds {self.capacity} tokens, {self.k} of them for drafts"
            )
        return length

    def expected_length(self, prompt_length: int, tokens: int | None) -> int | None:
        """Tokens to count with if `tokens` of output are expected."""
        if tokens is None:
            return None
        if tokens < 1:
            raise ValueError(f"expected_tokens must be at least 1, got {tokens}")
        return min(prompt_length + tokens, self.most_length)
