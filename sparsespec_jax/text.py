"""From a request's tokens to its text, and to the stop string that ends both."""

from __future__ import annotations

from collections.abc import Sequence

from sparsespec_jax.engine.events import TokenLogprobs
from sparsespec_jax.models.tokenizer import StreamDecoder, Tokenizer
from sparsespec_jax.sampling.params import SamplingParams


class TextAssembler:
    """Decodes one completion token by token and watches for its stop strings.

    The stop string that completes first wins, whatever the order they were given in and however
    many tokens arrive at once; of those that complete at the same character, the longest. Tokens,
    logprobs and text all end at it. One that completes within `min_tokens` tokens does not count.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams):
        self._params = params
        self._decoder = StreamDecoder(tokenizer, skip_special_tokens=params.skip_special_tokens)
        self._longest = max(map(len, params.stop), default=0)
        self._text = ""
        self._searched = 0  # no stop string ends at or before this character
        self._sent = 0
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.stop_string: str | None = None

    @property
    def text(self) -> str:
        return self._text

    def push(
        self, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs] | None, *, last: bool
    ) -> str:
        """Add tokens, up to a stop string if one completes; returns the text that is safe to show.

        With `last`, nothing follows: incomplete characters come out as replacement characters.
        """
        for i, token in enumerate(tokens):
            self.token_ids.append(token)
            if logprobs is not None:
                self.logprobs.append(logprobs[i])
            self._text += self._decoder.push([token])
            if self._find_stop():
                return self._take_text(last=True)
        if last:
            self._text += self._decoder.flush()
            self._find_stop()
        return self._take_text(last)

    def _find_stop(self) -> bool:
        if len(self.token_ids) <= self._params.min_tokens:
            self._searched = len(self._text)
            return False
        first = None
        begin = max(self._searched - self._longest + 1, 0)
        for stop in self._params.stop:
            at = self._text.find(stop, begin)
            while at >= 0 and at + len(stop) <= self._searched:
                at = self._text.find(stop, at + 1)
            if at >= 0:
                found = (at + len(stop), at, stop)
                first = min(first, found) if first else found
        self._searched = len(self._text)
        if first is None:
            return False
        end, start, self.stop_string = first
        self._text = self._text[: end if self._params.include_stop_str_in_output else start]
        return True

    def _take_text(self, last: bool) -> str:
        held = 0 if last or self.stop_string else self._possible_stop()
        ready = max(len(self._text) - held, self._sent)
        text, self._sent = self._text[self._sent : ready], ready
        return text

    def _possible_stop(self) -> int:
        """Length of the longest end of the text with which a stop string may begin."""
        for length in range(min(self._longest - 1, len(self._text)), 0, -1):
            end = self._text[-length:]
            if any(stop.startswith(end) for stop in self._params.stop):
                return length
        return 0
