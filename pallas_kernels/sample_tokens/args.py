"""Arguments of the op that are not logits, and its results; one entry per sample row."""

from typing import NamedTuple

from jax import Array


class SampleArgs(NamedTuple):
    """How the token of each of S sample rows is chosen.

    `position` is the position of the token being sampled, so it is also the number of tokens
    before it. Lists of ids are padded with -1.
    """

    position: Array  # int32 [S]
    temperature: Array  # float32 [S]; 0 is greedy
    top_k: Array  # int32 [S]; 0 is off
    top_p: Array  # float32 [S], in (0, 1]; 1 is off
    min_p: Array  # float32 [S], in [0, 1]; 0 is off
    seed: Array  # uint32 [S, 2]
    prompt_length: Array  # int32 [S]; history from here on is output
    min_length: Array  # int32 [S]; withheld_ids cannot be sampled at positions below it
    presence: Array  # float32 [S]
    frequency: Array  # float32 [S]
    repetition: Array  # float32 [S], > 0; 1 is off
    raw_logprobs: Array  # int32 [S]; 1 reports log-probabilities of the untouched logits
    withheld_ids: Array  # int32 [S, W]
    bias_ids: Array  # int32 [S, N]
    bias_values: Array  # float32 [S, N]


class Best(NamedTuple):
    """The best token of each row of (a shard of) the vocabulary."""

    token: Array  # int32 [S]; its id in the whole vocabulary
    score: Array  # float32 [S]; processed logit + noise
    peak: (
        Array  # float32 [S]; the largest logit as the model computed it; +inf or NaN if one is NaN
    )


class TokenScores(NamedTuple):
    """What the logprobs of E tokens derive from, of (a shard of) the vocabulary.

    Scores are logits of which log-probabilities are the log_softmax.
    """

    chosen: Array  # float32 [E]; score of each token, -inf where another shard has it
    normaliser: Array  # float32 [E]; log of the sum of exp(score)
    ids: Array  # int32 [E, n]; of the highest scores, highest first; ids of the whole vocabulary
    top: Array  # float32 [E, n]; these scores


class Sampled(NamedTuple):
    """What was sampled. Rows that are skipped have token 0 and are not finite."""

    token: Array  # int32 [S]
    finite: Array  # bool [S]; see `finite_rows`
