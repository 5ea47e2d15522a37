"""Embedding, head and sampling where the vocabulary is split over shards.

What is sampled is what one device samples: noise is a function of token ids, and what shards find
merges. Logits stay where they are: shards tell each other their best token, and for logprobs their
normaliser and their most likely tokens. Filters need thresholds over the whole vocabulary: for
them (and for rejection sampling, see `Emission`) the shards exchange their columns of all rows for
all columns of their own rows, so that none ever holds the logits of all.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels import SampleArgs, Sampled, sample, token_logprobs
from pallas_kernels.sample_tokens import (
    best_in_shard,
    merge_scores,
    merge_shards,
    scores_in_shard,
)
from sparsespec_jax.config import Implementation
from sparsespec_jax.models import decoder
from sparsespec_jax.models.parameters import Params
from sparsespec_jax.parallel.collectives import Shards


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """The `size` tokens of a model, split over `shards`. The last shard may have padding."""

    size: int
    shards: Shards
    implementation: Implementation

    def embed(self, params: Params, tokens: jax.Array) -> jax.Array:
        """Token ids [...] to hidden states [..., hidden]."""
        if self.shards.size == 1:
            return decoder.embed(params, tokens)
        start = self._start(len(params["embedding"]))
        return self.shards.all_reduce(decoder.embed_part(params, tokens, start))

    def logits(self, params: Params, hidden: jax.Array) -> jax.Array:
        """This shard's logits, float32 [..., V / shards]; -inf for padding."""
        logits = decoder.lm_logits(params, hidden)
        count = logits.shape[-1]
        if count * self.shards.size == self.size:
            return logits
        ids = self._start(count) + jnp.arange(count)
        return jnp.where(ids < self.size, logits, -jnp.inf)

    def sample(
        self,
        logits: jax.Array,
        args: SampleArgs,
        history: jax.Array | None,
        *,
        filters: bool,
        penalties: bool,
    ) -> Sampled:
        """`pallas_kernels.sample` of this shard's logits [S, V / shards]."""
        switches = {"penalties": penalties, "implementation": self.implementation}
        if filters or self.shards.size == 1:
            own = self.shards.own_rows((args, history))
            sampled = sample(self.shards.exchange(logits), *own, filters=filters, **switches)
            return self.shards.all_rows(sampled, len(logits))
        best = best_in_shard(logits, args, self._start(logits.shape[-1]), history, **switches)
        return merge_shards(self.shards.all_gather(best))

    def token_logprobs(
        self,
        logits: jax.Array,
        tokens: jax.Array,
        args: SampleArgs,
        history: jax.Array | None,
        *,
        rows: jax.Array,
        top_n: int,
        penalties: bool,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """`pallas_kernels.token_logprobs` of this shard's logits [S, V / shards]."""
        switches = {
            "rows": rows,
            "top_n": top_n,
            "penalties": penalties,
            "implementation": self.implementation,
        }
        if self.shards.size == 1:
            return token_logprobs(logits, tokens, args, history, **switches)
        start = self._start(logits.shape[-1])
        scores = scores_in_shard(logits, tokens, args, start, history, **switches)
        return merge_scores(self.shards.all_gather(scores), top_n)

    def _start(self, count: int) -> int | jax.Array:
        """The first id of this shard, of `count` ids."""
        return self.shards.index * count
