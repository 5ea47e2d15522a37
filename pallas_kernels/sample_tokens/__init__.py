"""Temperature, penalties, filters, noise and argmax over the vocabulary."""

from pallas_kernels.sample_tokens.api import (
    finite_rows,
    process_logits,
    sample_tokens,
    sampling_logprobs,
    token_logprobs,
)
from pallas_kernels.sample_tokens.args import SampleArgs
from pallas_kernels.sample_tokens.noise import (
    ACCEPT_STREAM,
    RESIDUAL_STREAM,
    SAMPLE_STREAM,
    gumbel_noise,
    uniform_noise,
)

__all__ = [
    "ACCEPT_STREAM",
    "RESIDUAL_STREAM",
    "SAMPLE_STREAM",
    "SampleArgs",
    "finite_rows",
    "gumbel_noise",
    "process_logits",
    "sample_tokens",
    "sampling_logprobs",
    "token_logprobs",
    "uniform_noise",
]
