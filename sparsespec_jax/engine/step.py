"""The jitted step: draft, verify and prefill rows of one plan through the model, once.

Every layer appends this step's keys and values to the pool and then attends to the pool, in that
order: XLA keeps a donated pool in place only if it is written before it is read.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import (
    CausalRows,
    append_kv,
    finite_rows,
    fused_attention,
    sample_tokens,
    sampling_logprobs,
    token_logprobs,
)
from sparsespec_jax.config import Implementation, Verification
from sparsespec_jax.drafters.base import Drafter, Verified
from sparsespec_jax.engine.plan import NON_FINITE, Bucket, Plan, PlanLayout
from sparsespec_jax.engine.state import DecodeState, apply_updates
from sparsespec_jax.kv.pool import Pools
from sparsespec_jax.models import decoder
from sparsespec_jax.models.config import ModelConfig
from sparsespec_jax.models.parameters import Params
from sparsespec_jax.models.rope import rope_tables
from sparsespec_jax.sampling.processors import sample_args, sample_history
from sparsespec_jax.sampling.verification import (
    RUNNING,
    accept_coupled,
    accept_rejection,
    truncate,
)


class Queries(NamedTuple):
    """The step's tokens, T in all: one per draft row, Q per verify row, C per prefill row.

    token, position, slot: [T] int32; padding writes to the trash slot.
    """

    token: jax.Array
    position: jax.Array
    slot: jax.Array


@dataclasses.dataclass(frozen=True)
class Step:
    """The step function of one bucket; `__call__` is what gets compiled."""

    model: ModelConfig
    drafter: Drafter
    layout: PlanLayout
    verification: Verification
    implementation: Implementation

    @property
    def bucket(self) -> Bucket:
        return self.layout.bucket

    @property
    def n_queries(self) -> int:
        return self.layout.n_queries

    def __call__(
        self, params: Params, pools: Pools, state: DecodeState, packed: jax.Array
    ) -> tuple[Pools, DecodeState, jax.Array]:
        """New pools and state (both donated), and the packed result (`plan.ResultLayout`)."""
        plan = self.layout.unpack(packed)
        state = apply_updates(state, plan)
        queries = self._queries(state, plan)
        hidden, pools, scores = self._forward(params, pools, state, plan, queries)

        row, position, picked = self._sample_rows(plan, queries)
        hidden = decoder.final_norm(params, hidden[picked], self.model)
        logits = decoder.lm_logits(params, hidden)
        sampled = self._sample(state, row, position, logits)

        state = self._record_drafts(state, plan, queries, hidden, sampled)
        old_length = state.length
        state, result, accepted = self._emit(params, state, plan, row, position, logits, sampled)
        if scores is not None:
            verified = self._verified(plan, queries, old_length, state.length, scores, accepted)
            state = state._replace(drafter=self.drafter.update(state.drafter, verified))
        return pools, state, result

    def _queries(self, state: DecodeState, plan: Plan) -> Queries:
        """Where each token of the step sits; the tokens themselves are in the history already."""
        row, index = plan.drafts.T
        drafts = state.length[row] - 1 + index

        verify_row, n_drafts = plan.verifies.T
        offset = jnp.arange(self.n_queries)
        verifies = state.length[verify_row][:, None] - 1 + offset
        verify_live = offset <= n_drafts[:, None]

        chunk_row, start, count, _ = plan.chunks.T
        offset = jnp.arange(self.layout.chunk)
        chunks = start[:, None] + offset
        chunk_live = offset < count[:, None]

        rows = [row, jnp.repeat(verify_row, self.n_queries), jnp.repeat(chunk_row, len(offset))]
        row = jnp.concatenate(rows)
        position = jnp.concatenate([drafts, verifies.ravel(), chunks.ravel()])
        live = jnp.concatenate(
            [jnp.ones_like(drafts, bool), verify_live.ravel(), chunk_live.ravel()]
        )
        position = jnp.where(live, position, 0)
        slot = jnp.where(live, state.page_table[row, position], 0)
        return Queries(state.tokens[row, position], position, slot)

    def _forward(
        self, params: Params, pools: Pools, state: DecodeState, plan: Plan, queries: Queries
    ) -> tuple[jax.Array, Pools, jax.Array | None]:
        """Hidden states [T, hidden], the pools, and scores of all layers for the drafter."""
        model, bucket, n_drafts = self.model, self.bucket, self.bucket.drafts
        drafts = None
        if n_drafts:
            drafts = self.drafter.draft_rows(
                state.drafter, plan.drafts[:, 0], queries.position[:n_drafts]
            )
        verify = prefill = scored = None
        score_queries = self.n_queries if self.drafter.k else 0
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

        x = decoder.embed(params, queries.token)
        cos, sin = rope_tables(queries.position, model.rope, model.head_dim)
        new_pools, scores = [], []
        for index, (layer, (k_pool, v_pool)) in enumerate(
            zip(params["layers"], pools, strict=True)
        ):
            q, k, v = decoder.attention_inputs(layer, x, cos, sin, model)
            k_pool, v_pool = append_kv(
                k_pool, v_pool, k, v, queries.slot, implementation=self.implementation
            )
            new_pools.append((k_pool, v_pool))
            attended, layer_scores = fused_attention(
                q,
                k_pool,
                v_pool,
                state.page_table,
                layer=index,
                drafts=drafts,
                verify=verify,
                prefill=prefill,
                n_queries=self.n_queries,
                chunk=self.layout.chunk,
                score_queries=score_queries,
                scored=scored,
                scale=model.head_dim**-0.5,
                max_recent=self.drafter.max_recent,
                context=bucket.context,
                implementation=self.implementation,
            )
            scores.append(layer_scores)
            x = x + decoder.attention_output(layer, attended, model)
            x = x + decoder.mlp(layer, x, model)
        return x, tuple(new_pools), jnp.stack(scores) if score_queries else None

    def _sample_rows(self, plan: Plan, queries: Queries) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The S queries that need logits: drafts, verify queries, the last token of each chunk.

        Returns batch row, position and index among the step's tokens, each [S].
        """
        bucket = self.bucket
        head = bucket.drafts + bucket.verifies * self.n_queries
        chunk_start = head + jnp.arange(bucket.chunks) * self.layout.chunk
        last = chunk_start + jnp.maximum(plan.chunks[:, 2] - 1, 0)
        picked = jnp.concatenate([jnp.arange(head), last]).astype(jnp.int32)
        verify_rows = jnp.repeat(plan.verifies[:, 0], self.n_queries)
        row = jnp.concatenate([plan.drafts[:, 0], verify_rows, plan.chunks[:, 0]])
        return row, queries.position[picked], picked

    def _sample(
        self, state: DecodeState, row: jax.Array, position: jax.Array, logits: jax.Array
    ) -> jax.Array:
        return sample_tokens(
            logits,
            sample_args(state.sampling, row, position),
            self._history(state, row),
            filters=self.bucket.filters,
            penalties=self.bucket.penalties,
        )

    def _history(self, state: DecodeState, row: jax.Array) -> jax.Array | None:
        return sample_history(state.tokens, row) if self.bucket.penalties else None

    def _record_drafts(
        self,
        state: DecodeState,
        plan: Plan,
        queries: Queries,
        hidden: jax.Array,
        sampled: jax.Array,
    ) -> DecodeState:
        """Put the drafted tokens behind the row's history, where the next steps look for them."""
        n = self.bucket.drafts
        if not n:
            return state
        row, index = plan.drafts.T
        tokens = state.tokens.at[row, queries.position[:n] + 1].set(sampled[:n])
        state = state._replace(tokens=tokens)
        if state.draft_hidden is not None:
            state = state._replace(draft_hidden=state.draft_hidden.at[row, index].set(hidden[:n]))
        return state

    def _emit(
        self,
        params: Params,
        state: DecodeState,
        plan: Plan,
        row: jax.Array,
        position: jax.Array,
        logits: jax.Array,
        sampled: jax.Array,
    ) -> tuple[DecodeState, jax.Array, jax.Array]:
        """Accept drafts, append what is emitted, and pack the result.

        The emitting rows are the verify rows and then the prefill rows, whose one token stands in
        the first of their Q columns. Also returns how many drafts each accepted, [E].
        """
        head, n_verify, queries = self.bucket.drafts, self.bucket.verifies, self.n_queries
        verify_row, n_drafts = plan.verifies.T
        chunk_row, _, _, final = plan.chunks.T
        emitting_row = jnp.concatenate([verify_row, chunk_row])

        # Row-major [E, Q] indices of the emitting rows' queries among the sample rows.
        verify_at = head + jnp.arange(n_verify * queries).reshape(n_verify, queries)
        chunk_at = head + n_verify * queries + jnp.arange(self.bucket.chunks)
        at = jnp.concatenate([verify_at, jnp.repeat(chunk_at[:, None], queries, axis=1)])
        asked = jnp.concatenate([n_drafts + 1, jnp.ones_like(chunk_row)])

        accepted, tokens = self._accept(params, state, plan, row, position, logits, sampled[at])
        emitted = jnp.concatenate([accepted[:n_verify] + 1, final])
        emitted = jnp.where(state.done[emitting_row], 0, emitted)
        sampling = state.sampling
        emitted, finished, reason = truncate(
            tokens,
            emitted,
            sampling.stop_ids[emitting_row],
            state.length[emitting_row],
            state.max_length[emitting_row],
            sampling.min_length[emitting_row],
        )
        failed = ~(finite_rows(logits)[at] | (jnp.arange(queries) >= asked[:, None])).all(-1)
        running = ~state.done[emitting_row] & jnp.concatenate([n_drafts >= 0, final == 1])
        reason = jnp.where(running, jnp.where(failed, NON_FINITE, reason), RUNNING)
        emitted = jnp.where(running & ~failed, emitted, 0)
        accepted = jnp.minimum(accepted, emitted)
        finished = reason != RUNNING

        length = state.length[emitting_row]
        # Beyond `emitted` these land on positions that only drafts use. Prefill rows that emit
        # nothing must not touch their prompt.
        live = jnp.arange(queries) < emitted[:, None]
        target_row = jnp.where(live, emitting_row[:, None], self.layout.trash_row)
        target = jnp.where(live, length[:, None] + jnp.arange(queries), 0)
        state = state._replace(
            tokens=state.tokens.at[target_row, target].set(tokens),
            length=state.length.at[emitting_row].add(emitted),
            done=state.done.at[emitting_row].max(finished),
        )
        words = [emitted[:, None], accepted[:, None], reason[:, None], tokens]
        words += self._logprob_words(state, row[at], position[at], logits[at], tokens)
        return state, jnp.concatenate(words, axis=1), accepted

    def _accept(
        self,
        params: Params,
        state: DecodeState,
        plan: Plan,
        row: jax.Array,
        position: jax.Array,
        logits: jax.Array,
        sampled: jax.Array,
    ) -> tuple[jax.Array, jax.Array]:
        """Accepted drafts [E] and the tokens to emit [E, Q]; prefills accept none."""
        n_verify, k = self.bucket.verifies, self.n_queries - 1
        none = jnp.zeros(self.bucket.chunks, jnp.int32)
        if not n_verify:
            return none, sampled
        verify_row, n_drafts = plan.verifies.T
        first = state.length[verify_row]
        drafts = state.tokens[verify_row[:, None], first[:, None] + jnp.arange(k)]
        if self.verification == "coupled" or k == 0:
            accepted, tokens = accept_coupled(drafts, n_drafts, sampled[:n_verify])
        else:
            accepted, tokens = self._accept_by_rejection(
                params, state, verify_row, n_drafts, drafts, row, position, logits
            )
        return jnp.concatenate([accepted, none]), jnp.concatenate([tokens, sampled[n_verify:]])

    def _accept_by_rejection(
        self, params, state, verify_row, n_drafts, drafts, row, position, logits
    ) -> tuple[jax.Array, jax.Array]:
        """The draft distributions come from running the head again on the drafts' hidden states.

        Keeping k vocabulary rows instead would take 6 MB a request; the hidden states take 64 KB.
        """
        n, queries, head = self.bucket.verifies, self.n_queries, self.bucket.drafts
        first = state.length[verify_row]

        def distribution(logits, row, position):
            args = sample_args(state.sampling, row, position)
            return sampling_logprobs(
                logits,
                args,
                self._history(state, row),
                filters=self.bucket.filters,
                penalties=self.bucket.penalties,
            )

        window = slice(head, head + n * queries)
        target = distribution(logits[window], row[window], position[window])
        hidden = state.draft_hidden[verify_row].reshape(n * (queries - 1), -1)
        draft = distribution(
            decoder.lm_logits(params, hidden),
            jnp.repeat(verify_row, queries - 1),
            (first[:, None] - 1 + jnp.arange(queries - 1)).ravel(),
        )
        vocab = logits.shape[-1]
        return accept_rejection(
            drafts,
            n_drafts,
            target.reshape(n, queries, vocab),
            draft.reshape(n, queries - 1, vocab),
            state.sampling.seed[verify_row],
            first,
        )

    def _logprob_words(
        self,
        state: DecodeState,
        row: jax.Array,
        position: jax.Array,
        logits: jax.Array,
        tokens: jax.Array,
    ) -> list[jax.Array]:
        """The logprob sections of the result; arguments are per emitting row and query."""
        if self.bucket.logprobs < 0:
            return []
        rows = tokens.shape[0]
        chosen, ids, values = token_logprobs(
            logits.reshape(-1, logits.shape[-1]),
            tokens.ravel(),
            sample_args(state.sampling, row.ravel(), position.ravel()),
            self._history(state, row.ravel()),
            top_n=self.bucket.logprobs,
            penalties=self.bucket.penalties,
        )
        words = [_bits(chosen).reshape(rows, -1)]
        if self.bucket.logprobs:
            words += [ids.reshape(rows, -1), _bits(values).reshape(rows, -1)]
        return words

    def _verified(
        self,
        plan: Plan,
        queries: Queries,
        old_length: jax.Array,
        length: jax.Array,
        scores: jax.Array,
        accepted: jax.Array,
    ) -> Verified:
        """What the drafter learns from: verify rows, and prefills that end in this step."""
        verify_row, n_drafts = plan.verifies.T
        chunk_row, start, count, final = plan.chunks.T
        chunk_row = jnp.where(final == 1, chunk_row, self.layout.trash_row)
        scored = jnp.minimum(count, self.n_queries)
        row = jnp.concatenate([verify_row, chunk_row])
        trash = row == self.layout.trash_row
        return Verified(
            row=row,
            scores=scores,
            queries=jnp.concatenate([n_drafts + 1, scored]),
            committed=jnp.concatenate([accepted[: self.bucket.verifies] + 1, scored]),
            start=jnp.where(
                trash, 0, jnp.concatenate([old_length[verify_row] - 1, start + count - scored])
            ),
            length=length[row],
        )


def _bits(x: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(x, jnp.int32)
