"""What a caller may ask of one request's sampling: `SamplingParams`, under vLLM's names.

An instance is always valid, immutable and hashable: every field is checked and normalised when it
is made, and whatever cannot be honoured exactly raises here, before any device work.
"""

import dataclasses
import math
import numbers
from collections.abc import Iterable, Mapping
from typing import Any, Literal

MAX_STOP_IDS = 16
MAX_LOGIT_BIAS = 64
MAX_LOGPROBS = 20
MAX_INT32 = 2**31 - 1

# Field -> (lowest, highest) allowed, both inclusive. All of them travel to the device as float32,
# so the bounds also keep them clear of its underflow.
_REAL_RANGES = {
    "temperature": (0.0, 1e6),
    "top_p": (1e-6, 1.0),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (0.01, 100.0),
}
_MIN_TEMPERATURE = 1e-6
_INTEGER_RANGES = {
    "top_k": (-1, MAX_INT32),
    "n": (1, MAX_INT32),
    "min_tokens": (0, MAX_INT32),
    "priority": (-1000, 1000),
}
_OPTIONAL_INTEGER_RANGES = {
    "seed": (0, 2**64 - 1),
    "max_tokens": (1, MAX_INT32),
    "logprobs": (0, MAX_LOGPROBS),
}
_FLAGS = ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens")
_LOGPROBS_MODES = ("processed", "raw")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are chosen, when they stop and what is reported of them.

    The logits of a position are changed in this order: logit_bias, repetition_penalty,
    frequency_penalty and presence_penalty, the min_tokens mask, temperature, top_k, top_p, min_p.

    Attributes:
      temperature: divides the logits; 0 is greedy (argmax, lowest id among equals). Greedy requests
        ignore top_k, top_p, min_p and seed.
      top_k: keep the tokens at least as likely as the k-th most likely one (ties kept); 0 or -1 is
        off and is stored as 0.
      top_p: then keep the fewest most likely tokens whose probability, renormalised after top_k,
        adds up to at least top_p (ties at the edge kept).
      min_p: then keep the tokens at least min_p times as likely as the most likely one.
      seed: 64 bits that alone decide the random choices; None lets the engine draw one.
      n: how many completions of the prompt; completion i samples with `sample_seed(seed, i)`.
      max_tokens: most tokens to emit; None is as many as the context holds.
      min_tokens: EOS and stop_token_ids cannot be sampled as one of the first min_tokens tokens.
      stop: strings that end the completion; a single string is accepted.
      stop_token_ids: ids that end the completion, besides the model's EOS ids.
      ignore_eos: the EOS ids do not end the completion.
      presence_penalty: subtracted from the logits of tokens emitted before.
      frequency_penalty: the same, times how often they were emitted.
      repetition_penalty: divides positive and multiplies negative logits of the tokens that occur
        in the prompt or were emitted (Keskar et al. 2019).
      logit_bias: token id -> value in [-100, 100] added to its logit; stored as pairs sorted by id.
      logprobs: None reports none, 0 that of each emitted token, n also the n most likely ones.
      logprobs_mode: "processed" is log_softmax over the FULL vocabulary of the logits after bias,
        penalties and mask, divided by temperature (by 1 if temperature is 0), before top_k, top_p
        and min_p. "raw" is log_softmax of the model's logits.
      include_stop_str_in_output: keep the stop string at the end of the text.
      skip_special_tokens: leave special tokens out of the text.
      priority: the higher, the sooner it runs: each point is worth 64 requests submitted before,
        so that nobody waits forever.

    Raises:
      ValueError: naming the field, the value and what is allowed.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    n: int = 1
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] | None = None
    logprobs: int | None = None
    logprobs_mode: Literal["processed", "raw"] = "processed"
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    priority: int = 0

    def __post_init__(self) -> None:
        for name, bounds in _REAL_RANGES.items():
            self._set(name, _real(name, getattr(self, name), *bounds))
        for name, bounds in _INTEGER_RANGES.items():
            self._set(name, _integer(name, getattr(self, name), *bounds))
        for name, bounds in _OPTIONAL_INTEGER_RANGES.items():
            if (value := getattr(self, name)) is not None:
                self._set(name, _integer(name, value, *bounds))
        for name in _FLAGS:
            if not isinstance(value := getattr(self, name), bool):
                raise _error(name, value, "True or False")
        self._set("top_k", max(self.top_k, 0))
        self._set("stop", _stop_strings(self.stop))
        self._set("stop_token_ids", _stop_ids(self.stop_token_ids))
        self._set("logit_bias", _bias_pairs(self.logit_bias))
        self._check_combinations()

    def _check_combinations(self) -> None:
        if 0 < self.temperature < _MIN_TEMPERATURE:
            raise _error("temperature", self.temperature, f"0 (greedy) or >= {_MIN_TEMPERATURE}")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise _error("min_tokens", self.min_tokens, f"at most max_tokens={self.max_tokens}")
        if not isinstance(self.logprobs_mode, str) or self.logprobs_mode not in _LOGPROBS_MODES:
            raise _error("logprobs_mode", self.logprobs_mode, f"one of {_LOGPROBS_MODES}")

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)  # the dataclass is frozen, its checks are not

    @property
    def greedy(self) -> bool:
        """Whether every token is the argmax."""
        return self.temperature == 0.0

    @property
    def uses_filters(self) -> bool:
        """Whether top_k, top_p or min_p changes anything: the step must be built with filters."""
        return not self.greedy and (self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0)

    @property
    def uses_penalties(self) -> bool:
        """Whether logits depend on earlier tokens: the step must be built with penalties."""
        return (
            self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or self.repetition_penalty != 1.0
        )

    def with_seed(self, seed: int) -> "SamplingParams":
        """A copy that samples with `seed`."""
        return dataclasses.replace(self, seed=seed)


def sample_seed(seed: int, index: int) -> int:
    """The 64-bit seed of completion `index` of a request with `seed`; completion 0 keeps `seed`.

    Steps by 2**64 / golden ratio (Weyl), so the completions of requests with neighbouring seeds do
    not share seeds.
    """
    return (seed + index * 0x9E3779B97F4A7C15) % 2**64


def validate_for_model(params: SamplingParams, vocab_size: int) -> None:
    """Raises ValueError if `params` names a token id the model does not have."""
    allowed = f"token ids below the vocabulary size {vocab_size}"
    for name, ids in (
        ("stop_token_ids", params.stop_token_ids),
        ("logit_bias", tuple(token for token, _ in params.logit_bias)),
    ):
        if outside := [token for token in ids if token >= vocab_size]:
            raise _error(name, outside, allowed)


def _error(name: str, value: Any, allowed: str) -> ValueError:
    return ValueError(f"{name}={value!r} is not allowed: it must be {allowed}")


def _real(name: str, value: Any, lowest: float, highest: float) -> float:
    allowed = f"a number from {lowest:g} to {highest:g}"
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise _error(name, value, allowed)
    if math.isnan(value) or not lowest <= value <= highest:
        raise _error(name, value, allowed)
    return float(value)


def _integer(name: str, value: Any, lowest: int, highest: int) -> int:
    allowed = f"an integer from {lowest} to {highest}"
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise _error(name, value, allowed)
    if not lowest <= value <= highest:
        raise _error(name, value, allowed)
    return int(value)


def _stop_strings(stop: Any) -> tuple[str, ...]:
    allowed = "a non-empty string or several of them"
    strings = (stop,) if isinstance(stop, str) else _items("stop", stop, allowed)
    if any(not isinstance(string, str) or not string for string in strings):
        raise _error("stop", stop, allowed)
    return tuple(dict.fromkeys(strings))


def _stop_ids(ids: Any) -> tuple[int, ...]:
    items = _items("stop_token_ids", ids, f"at most {MAX_STOP_IDS} token ids")
    items = [_integer("stop_token_ids", token, 0, MAX_INT32) for token in items]
    unique = tuple(dict.fromkeys(items))
    if len(unique) > MAX_STOP_IDS:
        raise _error("stop_token_ids", ids, f"at most {MAX_STOP_IDS} token ids")
    return unique


def _bias_pairs(bias: Any) -> tuple[tuple[int, float], ...]:
    allowed = f"a mapping of at most {MAX_LOGIT_BIAS} token ids to values from -100 to 100"
    if isinstance(bias, Mapping):
        bias = tuple(bias.items())
    pairs = _items("logit_bias", bias, allowed)
    if any(not isinstance(pair, tuple) or len(pair) != 2 for pair in pairs):
        raise _error("logit_bias", bias, allowed)
    values = {
        _integer("logit_bias", token, 0, MAX_INT32): _real("logit_bias", value, -100.0, 100.0)
        for token, value in pairs
    }
    if len(values) > MAX_LOGIT_BIAS:
        raise _error("logit_bias", bias, allowed)
    return tuple(sorted(values.items()))


def _items(name: str, value: Any, allowed: str) -> tuple:
    if value is None:
        return ()
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        raise _error(name, value, allowed)
    return tuple(value)
