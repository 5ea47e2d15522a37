"""PillarAttn (SparseSpec, MLSys 2026): draft with the positions that verification found important.

Every verification attends to the whole context anyway. Its probabilities rank the positions, per
layer, for each KV head or for all of them together (`score_rules`), and the best of them are what
the row's next drafts attend to, together with every position from the verification's first query
on. The first list comes from the last queries of the prompt, so that the first cycle is sparse
already.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import DraftRows, rank_positions, select_positions
from sparsespec_jax.config import Implementation, SpeculationConfig
from sparsespec_jax.drafters.base import Verified
from sparsespec_jax.drafters.score_rules import SCORE_RULES, SHIFT_AGES
from sparsespec_jax.models.config import ModelConfig


class PillarState(NamedTuple):
    """R batch rows, K the largest list.

    selected: [layers, R, lists, K] int32 positions, never slots, ascending; of each KV head, or
      one list that they share.
    count: [R] int32 live entries of each list.
    recent_start: [R] int32; drafts attend to every position from here on.
    """

    selected: jax.Array
    count: jax.Array
    recent_start: jax.Array


class PillarDrafter:
    state_axes = PillarState(
        selected=(None, None, "lists", None), count=(None,), recent_start=(None,)
    )

    def __init__(
        self,
        model: ModelConfig,
        speculation: SpeculationConfig,
        max_context: int,
        implementation: Implementation = "auto",
    ):
        self.k = speculation.ks[0]
        # k + 1 tokens since the verification's first query, and up to k drafts behind them.
        self.max_recent = 2 * self.k + 1
        contexts, sparsities = range(max_context + 1), range(len(speculation.sparsities))
        budgets = [[speculation.budget(n, sparsity) for n in contexts] for sparsity in sparsities]
        self._budgets = np.array(budgets, np.int32)
        self._rule = SCORE_RULES[speculation.score_rule]
        self._layers = model.num_layers
        self._lists = 1 if self._rule.shared else model.num_kv_heads
        self._width = int(self._budgets.max())
        self._group = model.num_heads // model.num_kv_heads
        self._implementation = implementation

    def init_state(self, rows: int) -> PillarState:
        return PillarState(
            selected=jnp.zeros((self._layers, rows, self._lists, self._width), jnp.int32),
            count=jnp.zeros(rows, jnp.int32),
            recent_start=jnp.zeros(rows, jnp.int32),
        )

    def draft_rows(self, state: PillarState, row: jax.Array, position: jax.Array) -> DraftRows:
        return DraftRows(row, position, state.selected, state.count, state.recent_start)

    def update(self, state: PillarState, verified: Verified) -> PillarState:
        ranking = self._ranking(verified)
        context, width = ranking.shape[-1], min(self._width, ranking.shape[-1])
        start = jnp.minimum(verified.start, context)
        count = self._selected_count(verified, start, width)
        selected = select_positions(
            ranking, start, count, k=width, implementation=self._implementation
        )
        row = verified.row
        return PillarState(
            selected=state.selected.at[:, row, :, :width].set(selected),
            count=state.count.at[row].set(count),
            recent_start=state.recent_start.at[row].set(verified.start),
        )

    def _ranking(self, verified: Verified) -> jax.Array:
        """[layers, E, lists, context], the larger the better; 0 from `verified.start` on, where
        all is attended to anyway."""
        scores = verified.scores
        n_queries = scores.n_queries(self._group)
        context = scores[0].shape[-1]  # of probabilities or codes: positions come last
        weights = self._rule.weigh(verified.queries, verified.committed, n_queries)
        return rank_positions(
            scores,
            jnp.minimum(verified.start, context),
            weights.here,
            weights.ahead,
            verified.committed,
            group=self._group,
            lists=self._lists,
            drafts=n_queries - 1,
            context=context,
            ages=SHIFT_AGES,
            implementation=self._implementation,
        )

    def _selected_count(self, verified: Verified, candidates: jax.Array, width: int) -> jax.Array:
        """Budget of the context less the recent positions, which every draft attends to anyway."""
        cached = verified.length - 1
        recent = cached - verified.start
        budget = jnp.asarray(self._budgets)[verified.sparsity, cached]
        return jnp.clip(budget - recent, 0, jnp.minimum(candidates, width))
