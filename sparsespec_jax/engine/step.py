"""The jitted step: draft, verify and prefill rows of one plan through the model, once.

Every layer appends this step's keys and values to the pool and then attends to the pool, in that
order: XLA keeps a donated pool in place only if it is written before it is read.

With tensor parallelism the whole step runs inside one `shard_map`: what it sees is a shard's part
of the model, and `shards` is all that knows of the others.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import (
    AttentionScores,
    CausalRows,
    append_kv,
    draft_slots,
    fused_attention,
)
from pallas_kernels.all_reduce import Peers
from sparsespec_jax.config import Implementation, Verification
from sparsespec_jax.drafters.base import Drafter, Verified
from sparsespec_jax.engine.emission import Emission
from sparsespec_jax.engine.plan import Plan, PlanLayout
from sparsespec_jax.engine.state import DecodeState, apply_commits, apply_updates
from sparsespec_jax.kv.pool import Pools
from sparsespec_jax.models import decoder
from sparsespec_jax.models.config import ModelConfig
from sparsespec_jax.models.parameters import Params
from sparsespec_jax.models.rope import rope_tables
from sparsespec_jax.parallel.collectives import Shards
from sparsespec_jax.parallel.vocabulary import Vocabulary


class Queries(NamedTuple):
    """The step's tokens, T in all: one per draft row, Q per verify row, C per prefill row.

    token, position, slot: [T] int32; padding writes to the trash slot.
    """

    token: jax.Array
    position: jax.Array
    slot: jax.Array


@dataclasses.dataclass(frozen=True)
class Step:
    """The step function of one bucket; `__call__` is what gets compiled.

    model: of one shard, but for the vocabulary, which is the whole one.
    """

    model: ModelConfig
    drafter: Drafter
    layout: PlanLayout
    verification: Verification
    implementation: Implementation
    shards: Shards = Shards()

    def __call__(
        self,
        params: Params,
        pools: Pools,
        state: DecodeState,
        packed: jax.Array,
        peers: Peers | None = None,
    ) -> tuple[Pools, DecodeState, jax.Array]:
        """New pools and state (both donated), and the packed result (`plan.ResultLayout`).

        peers: where shards leave each other messages, if they can.
        """
        plan = self.layout.unpack(packed)
        state = apply_updates(state, plan)
        if self.layout.delayed:
            state = apply_commits(state, plan)
        queries = self._queries(state, plan)
        hidden, pools, scores = self._forward(params, pools, state, plan, queries, peers)

        row, position, picked = self._sample_rows(plan, queries)
        hidden = decoder.final_norm(params, hidden[picked], self.model)
        logits = self._vocabulary.logits(params, hidden)
        emission = Emission(self.layout, self.verification, self._vocabulary)
        samples = emission.sample(state, row, position, logits)

        state = self._record_drafts(state, plan, queries, hidden, samples.token)
        old_length = state.length
        state, result, accepted = emission.emit(params, state, plan, samples)
        length = state.length
        if self.layout.delayed:
            length = emission.expected_length(state, plan, accepted)
        if scores is not None:
            verified = self._verified(plan, queries, old_length, length, scores, accepted)
            state = state._replace(drafter=self.drafter.update(state.drafter, verified))
        return pools, state, result

    @property
    def _vocabulary(self) -> Vocabulary:
        return Vocabulary(self.model.vocab_size, self.shards, self.implementation)

    def _queries(self, state: DecodeState, plan: Plan) -> Queries:
        """Where each token of the step sits; the tokens themselves are in the history already."""
        row, index = plan.drafts.T
        drafts = state.length[row] - 1 + index

        verify_row, n_drafts = plan.verifies.T
        offset = jnp.arange(self.layout.n_queries)
        verifies = state.length[verify_row][:, None] - 1 + offset
        verify_live = offset <= n_drafts[:, None]

        chunk_row, start, count, _ = plan.chunks.T
        offset = jnp.arange(self.layout.chunk)
        chunks = start[:, None] + offset
        chunk_live = offset < count[:, None]

        rows = [
            row,
            jnp.repeat(verify_row, self.layout.n_queries),
            jnp.repeat(chunk_row, len(offset)),
        ]
        row = jnp.concatenate(rows)
        position = jnp.concatenate([drafts, verifies.ravel(), chunks.ravel()])
        live = jnp.concatenate(
            [jnp.ones_like(drafts, bool), verify_live.ravel(), chunk_live.ravel()]
        )
        position = jnp.where(live, position, 0)
        slot = jnp.where(live, state.page_table[row, position], 0)
        return Queries(state.tokens[row, position], position, slot)

    def _forward(
        self,
        params: Params,
        pools: Pools,
        state: DecodeState,
        plan: Plan,
        queries: Queries,
        peers: Peers | None,
    ) -> tuple[jax.Array, Pools, AttentionScores | None]:
        """Hidden states [T, hidden], the pools, and scores of all layers for the drafter."""
        model, bucket, n_drafts = self.model, self.layout.bucket, self.layout.bucket.drafts
        drafts = None
        if n_drafts:
            rows = self.drafter.draft_rows(
                state.drafter, plan.drafts[:, 0], queries.position[:n_drafts]
            )
            drafts = draft_slots(rows, state.page_table, max_recent=self.drafter.max_recent)
        verify = prefill = scored = None
        score_queries = self.layout.n_queries if self.layout.n_queries > 1 else 0
        if bucket.verifies:
            row = plan.verifies[:, 0]
            count = jnp.where(row == self.layout.trash_row, 0, plan.verifies[:, 1] + 1)
            verify = CausalRows(row, state.length[row] - 1, count)
        if bucket.chunks:
            row, start, count, final = plan.chunks.T
            prefill = CausalRows(row, start, count)
            if score_queries:
                scored = jnp.where(final == 1, jnp.arange(bucket.chunks), -1).astype(jnp.int32)
        if not (bucket.verifies or bucket.chunks):
            score_queries = 0

        x = self._vocabulary.embed(params, queries.token)
        cos, sin = rope_tables(queries.position, model.rope, model.head_dim)
        norm = functools.partial(
            self.shards.add_norm,
            eps=model.rms_norm_eps,
            peers=peers,
            implementation=self.implementation,
        )
        delta, new_pools, scores = None, [], None
        for index, (layer, (k_pool, v_pool)) in enumerate(
            zip(params["layers"], pools, strict=True)
        ):
            x, normed = norm(x, delta, layer["attention_norm"])
            q, k_pool, v_pool = append_kv(
                k_pool,
                v_pool,
                decoder.project_qkv(layer, normed, implementation=self.implementation),
                queries.slot,
                cos,
                sin,
                **decoder.head_params(layer, model),
                implementation=self.implementation,
            )
            new_pools.append((k_pool, v_pool))
            attended, scores = fused_attention(
                q,
                k_pool,
                v_pool,
                state.page_table,
                layer=index,
                drafts=drafts,
                verify=verify,
                prefill=prefill,
                n_queries=self.layout.n_queries,
                chunk=self.layout.chunk,
                score_queries=score_queries,
                scored=scored,
                scores=scores,
                n_layers=model.num_layers,
                scale=model.head_dim**-0.5,
                context=bucket.context,
                implementation=self.implementation,
            )
            delta = decoder.attention_output(
                layer, attended, model, implementation=self.implementation
            )
            x, normed = norm(x, delta, layer["mlp_norm"])
            delta = decoder.mlp(layer, normed, implementation=self.implementation)
        return self.shards.add(x, delta, peers), tuple(new_pools), scores

    def _sample_rows(self, plan: Plan, queries: Queries) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The S queries that need logits: drafts, verify queries, the last token of each chunk.

        Returns batch row, position and index among the step's tokens, each [S].
        """
        bucket = self.layout.bucket
        head = bucket.drafts + bucket.verifies * self.layout.n_queries
        chunk_start = head + jnp.arange(bucket.chunks) * self.layout.chunk
        last = chunk_start + jnp.maximum(plan.chunks[:, 2] - 1, 0)
        picked = jnp.concatenate([jnp.arange(head), last]).astype(jnp.int32)
        verify_rows = jnp.repeat(plan.verifies[:, 0], self.layout.n_queries)
        row = jnp.concatenate([plan.drafts[:, 0], verify_rows, plan.chunks[:, 0]])
        return row, queries.position[picked], picked

    def _record_drafts(
        self,
        state: DecodeState,
        plan: Plan,
        queries: Queries,
        hidden: jax.Array,
        sampled: jax.Array,
    ) -> DecodeState:
        """Put the drafted tokens behind the row's history, where the next steps look for them."""
        n = self.layout.bucket.drafts
        if not n:
            return state
        row, index = plan.drafts.T
        tokens = state.tokens.at[row, queries.position[:n] + 1].set(sampled[:n])
        state = state._replace(tokens=tokens)
        if state.draft_hidden is not None:
            state = state._replace(draft_hidden=state.draft_hidden.at[row, index].set(hidden[:n]))
        return state

    def _verified(
        self,
        plan: Plan,
        queries: Queries,
        old_length: jax.Array,
        length: jax.Array,
        scores: AttentionScores,
        accepted: jax.Array,
    ) -> Verified:
        """What the drafter learns from: verify rows, and prefills that end in this step."""
        verify_row, n_drafts = plan.verifies.T
        chunk_row, start, count, final = plan.chunks.T
        chunk_row = jnp.where(final == 1, chunk_row, self.layout.trash_row)
        scored = jnp.minimum(count, self.layout.n_queries)
        row = jnp.concatenate([verify_row, chunk_row])
        trash = row == self.layout.trash_row
        return Verified(
            row=row,
            scores=scores,
            queries=jnp.concatenate([n_drafts + 1, scored]),
            committed=jnp.concatenate([accepted[: self.layout.bucket.verifies] + 1, scored]),
            start=jnp.where(
                trash, 0, jnp.concatenate([old_length[verify_row] - 1, start + count - scored])
            ),
            length=length[row],
            sparsity=plan.sparsity[0, 0],
        )
