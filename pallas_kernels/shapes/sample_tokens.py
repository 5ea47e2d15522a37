"""The logits of a step: without filters, with them, and for logprobs."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from pallas_kernels.sample_tokens import SampleArgs
from pallas_kernels.shapes.arrays import ints, normal


@dataclass(frozen=True)
class Sample:
    """Rows of logits to sample from, or (logprobs) to report the log-probabilities of."""

    n_rows: int
    vocab: int
    temperature: float = 0.65
    top_k: int = 0
    top_p: float = 1.0
    logprobs: bool = False
    spread: float = 3.0  # standard deviation of the logits
    k: int | None = None
    context: int | None = None

    @property
    def filters(self) -> bool:
        return self.top_k > 0 or self.top_p < 1

    def bytes(self) -> int:
        """Logits once."""
        return 4 * self.n_rows * self.vocab

    def inputs(self) -> tuple[Array, SampleArgs]:
        """Logits like a model's: a bulk that hardly matters and some tokens far above it."""
        shape = self.n_rows, self.vocab
        logits = self.spread * normal(shape, "float32", 0)
        best = jax.random.randint(jax.random.key(1), (self.n_rows, 20), 0, self.vocab)
        boost = self.spread * (3 + jax.random.exponential(jax.random.key(2), best.shape))
        logits = logits.at[jnp.arange(self.n_rows)[:, None], best].add(boost)
        row = np.arange(self.n_rows)

        def every(value: Any, dtype: Any) -> Array:
            return jnp.full((self.n_rows,), value, dtype)

        args = SampleArgs(
            position=ints(1000 + row),
            temperature=every(self.temperature, jnp.float32),
            top_k=every(self.top_k, jnp.int32),
            top_p=every(self.top_p, jnp.float32),
            min_p=every(0, jnp.float32),
            seed=jnp.asarray(np.stack([row, row], 1), jnp.uint32),
            prompt_length=every(100, jnp.int32),
            min_length=every(0, jnp.int32),
            presence=every(0, jnp.float32),
            frequency=every(0, jnp.float32),
            repetition=every(1, jnp.float32),
            raw_logprobs=every(0, jnp.int32),
            withheld_ids=jnp.full((self.n_rows, 24), -1, jnp.int32),
            bias_ids=jnp.full((self.n_rows, 64), -1, jnp.int32),
            bias_values=jnp.zeros((self.n_rows, 64)),
        )
        return logits, args


H200 = {
    "plain": Sample(248, 151_936),
    "greedy": Sample(248, 151_936, temperature=0),
    "top_k, top_p": Sample(248, 151_936, top_k=20, top_p=0.95),
    "top_p": Sample(248, 151_936, top_p=0.95),
    "top_p, flat": Sample(248, 151_936, temperature=1, top_p=0.95, spread=1),
    "logprobs": Sample(135, 151_936, logprobs=True),
}

TINY = {
    "plain": Sample(3, 100),
    "top_k, top_p": Sample(3, 100, top_k=5, top_p=0.9),
    "logprobs": Sample(3, 100, logprobs=True),
}
