"""Sampling parameters of the device batch: `RowSampling`, one entry per batch row.

Row b holds the parameters of whatever request occupies batch row b; the last row is the trash row
that padding points at. A request's parameters travel to the device once, at admission, as one row
of `ROW_WORDS` int32 words (floats and the seed bitcast), because one packed array uploads many
times faster than a dozen small ones.
"""

import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from sparsespec_jax.sampling.params import MAX_INT32, MAX_LOGIT_BIAS, MAX_STOP_IDS, SamplingParams

MAX_BIAS = MAX_LOGIT_BIAS
MAX_STOP = MAX_STOP_IDS + 8  # a request's own stop ids and the model's EOS ids


class RowSampling(NamedTuple):
    """Sampling parameters by batch row; every array has the rows as its leading axis.

    Lists of ids are padded with -1. The order of the fields is their order in a packed row.
    """

    temperature: Array  # float32 [B]; 0 is greedy
    top_k: Array  # int32 [B]; 0 is off
    top_p: Array  # float32 [B]; 1 is off
    min_p: Array  # float32 [B]; 0 is off
    seed: Array  # uint32 [B, 2]: low word, high word
    prompt_length: Array  # int32 [B]; tokens from here on are output
    min_length: Array  # int32 [B]; withheld_ids cannot be sampled at positions below it
    presence: Array  # float32 [B]
    frequency: Array  # float32 [B]
    repetition: Array  # float32 [B]; 1 is off
    raw_logprobs: Array  # int32 [B]; 1 reports log-probabilities of the model's own logits
    stop_ids: Array  # int32 [B, MAX_STOP]; ids that end the request
    withheld_ids: Array  # int32 [B, MAX_STOP]; stop ids and EOS ids, even ignored ones
    bias_ids: Array  # int32 [B, MAX_BIAS]
    bias_values: Array  # float32 [B, MAX_BIAS]

    @classmethod
    def zeros(cls, n_rows: int) -> "RowSampling":
        """`n_rows` rows that sample greedily and change no logit: the state before admissions."""
        words = jnp.broadcast_to(jnp.asarray(NEUTRAL_ROW), (n_rows, ROW_WORDS))
        return unpack_rows(words)


# Field -> (words in a packed row, dtype); the shape of a field is [B] where words is None.
_LAYOUT: dict[str, tuple[int | None, type]] = {
    "temperature": (None, np.float32),
    "top_k": (None, np.int32),
    "top_p": (None, np.float32),
    "min_p": (None, np.float32),
    "seed": (2, np.uint32),
    "prompt_length": (None, np.int32),
    "min_length": (None, np.int32),
    "presence": (None, np.float32),
    "frequency": (None, np.float32),
    "repetition": (None, np.float32),
    "raw_logprobs": (None, np.int32),
    "stop_ids": (MAX_STOP, np.int32),
    "withheld_ids": (MAX_STOP, np.int32),
    "bias_ids": (MAX_BIAS, np.int32),
    "bias_values": (MAX_BIAS, np.float32),
}
assert tuple(_LAYOUT) == RowSampling._fields
_ENDS = list(itertools.accumulate(words or 1 for words, _ in _LAYOUT.values()))
ROW_WORDS = _ENDS[-1]
# Where each field stands in a packed row, for the host.
FIELD_WORDS = {
    name: slice(start, end)
    for name, (start, end) in zip(_LAYOUT, itertools.pairwise([0, *_ENDS]), strict=True)
}


def pack_row(
    params: SamplingParams, seed: int, prompt_length: int, eos_ids: tuple[int, ...]
) -> np.ndarray:
    """One request's parameters as int32 [ROW_WORDS], for `unpack_rows`.

    Args:
      params: what the request asked for; its own seed is not read.
      seed: the 64-bit seed to sample with (the engine has drawn it if the request gave none).
      prompt_length: tokens in the prompt.
      eos_ids: the model's end-of-sequence ids.

    Raises:
      ValueError: seed or prompt_length out of range, or more than MAX_STOP stop ids with EOS ids.
    """
    if not 0 <= seed < 2**64:
        raise ValueError(f"seed={seed} is not allowed: it must be an integer from 0 to 2**64 - 1")
    if not 1 <= prompt_length <= MAX_INT32:
        raise ValueError(f"prompt_length={prompt_length} is not allowed: it must be at least 1")
    withheld = tuple(dict.fromkeys((*params.stop_token_ids, *eos_ids)))
    if len(withheld) > MAX_STOP:
        raise ValueError(
            f"{len(withheld)} stop ids (stop_token_ids={params.stop_token_ids}, EOS ids="
            f"{tuple(eos_ids)}) are not allowed: a request has at most {MAX_STOP} of both together"
        )
    bias = params.logit_bias
    return _pack(
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        seed=(seed & 0xFFFFFFFF, seed >> 32),
        prompt_length=prompt_length,
        min_length=min(prompt_length + params.min_tokens, MAX_INT32),
        presence=params.presence_penalty,
        frequency=params.frequency_penalty,
        repetition=params.repetition_penalty,
        raw_logprobs=params.logprobs_mode == "raw",
        stop_ids=_padded(params.stop_token_ids if params.ignore_eos else withheld, MAX_STOP, -1),
        withheld_ids=_padded(withheld, MAX_STOP, -1),
        bias_ids=_padded([token for token, _ in bias], MAX_BIAS, -1),
        bias_values=_padded([value for _, value in bias], MAX_BIAS, 0.0),
    )


def unpack_rows(words: Array) -> RowSampling:
    """Packed rows int32 [A, ROW_WORDS] -> `RowSampling` with leading axis A."""
    fields, start = {}, 0
    for name, (width, dtype) in _LAYOUT.items():
        part = words[:, start] if width is None else words[:, start : start + width]
        fields[name] = lax.bitcast_convert_type(part, dtype)
        start += width or 1
    return RowSampling(**fields)


def scatter(state: RowSampling, rows: Array, new: RowSampling) -> RowSampling:
    """`state` with batch rows `rows` (int32 [A]) replaced by `new` (leading axis A).

    Padding admissions name the trash row; several of them may.
    """
    return jax.tree.map(lambda old, update: old.at[rows].set(update), state, new)


def _pack(**fields) -> np.ndarray:
    parts = [
        np.atleast_1d(np.asarray(fields[name], dtype)).view(np.int32)
        for name, (_, dtype) in _LAYOUT.items()
    ]
    return np.concatenate(parts)


def _padded(values, width: int, fill) -> list:
    return [*values, *[fill] * (width - len(values))]


# The trash row: greedy, nothing masked, nothing biased, and no division by a zero penalty.
NEUTRAL_ROW = pack_row(SamplingParams(temperature=0.0), seed=0, prompt_length=1, eos_ids=())
