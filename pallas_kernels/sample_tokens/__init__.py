"""Temperature, penalties, filters, noise and argmax over the vocabulary."""

from pallas_kernels.sample_tokens.api import (
    best_in_shard,
    finite_rows,
    merge_scores,
    merge_shards,
    process_logits,
    sample,
    sample_tokens,
    sampling_logprobs,
    scores_in_shard,
    token_logprobs,
)
from pallas_kernels.sample_tokens.args import Best, SampleArgs, Sampled, TokenScores
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
    "Best",
    "SampleArgs",
    "Sampled",
    "TokenScores",
    "best_in_shard",
    "finite_rows",
    "gumbel_noise",
    "merge_scores",
    "merge_shards",
    "process_logits",
    "sample",
    "sample_tokens",
    "sampling_logprobs",
    "scores_in_shard",
    "token_logprobs",
    "uniform_noise",
]
