"""The scores of the rows that verify in one step, for each kind of ranking."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.fused_attention import CodedScores
from pallas_kernels.shapes.arrays import ints


@dataclass(frozen=True)
class Rank:
    """Coded scores of all layers of the rows that verified in one step, k + 1 queries each."""

    n_layers: int
    n_rows: int
    context: int
    k: int
    shifted: bool = True
    n_kv_heads: int = 8
    lists: int = 1
    group: int = 4

    def bytes(self) -> int:
        """Codes once, the ranking once."""
        codes = self.n_kv_heads * (self.k + 1) * self.group
        return self.n_layers * self.n_rows * self.context * (codes + 2 * self.lists)

    def inputs(self) -> tuple[Any, ...]:
        """Array arguments of `rank_positions`, half of the drafts accepted."""
        n_queries, rows = self.k + 1, np.ones(self.n_rows)
        lead = (self.n_layers, self.n_rows, self.n_kv_heads, n_queries * self.group)
        size = -(-self.context // 32) * 32
        scores = CodedScores(
            jax.random.bits(jax.random.key(0), (*lead, size), jnp.uint8), jnp.full(lead, 2.0**-7)
        )
        weights = jnp.full((self.n_rows, n_queries), 1 / n_queries)
        ahead = weights if self.shifted else None
        committed = ints(rows * (1 + self.k // 2))
        return scores, ints(rows * self.context), weights, ahead, committed


H200 = {
    "shifted": Rank(36, 15, context=8192, k=8),
    "paper": Rank(36, 15, context=8192, k=8, shifted=False, lists=8),
}

TINY = {
    "shifted": Rank(2, 3, context=256, k=3, n_kv_heads=2),
    "paper": Rank(2, 3, context=256, k=3, n_kv_heads=2, shifted=False, lists=2),
}
