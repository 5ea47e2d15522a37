"""From a step's logits to what it emits: sample, accept drafts, append, report.

The emitting rows of a step, E in all, are its verify rows and then its prefill rows, whose one
token (where the prompt ends) stands in the first of their Q = k + 1 columns.

With delayed verification a step stops at reporting: the host decides what is emitted, and the plan
of the next step but one appends it.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import SampleArgs, sampling_logprobs
from sparsespec_jax.config import Verification
from sparsespec_jax.engine.plan import NON_FINITE, Plan, PlanLayout
from sparsespec_jax.engine.state import DecodeState
from sparsespec_jax.models.parameters import Params
from sparsespec_jax.parallel.vocabulary import Vocabulary
from sparsespec_jax.sampling.processors import sample_args, sample_history
from sparsespec_jax.sampling.verification import (
    RUNNING,
    accept_coupled,
    accept_rejection,
    truncate,
)


class Samples(NamedTuple):
    """The S queries that a step samples for: draft rows, verify queries, the last of each prefill.

    row: [S] int32 batch row. position: [S] int32 of the query, which samples the token behind it.
    logits: [S, vocab / shards] float32. token: [S] int32. finite: [S] bool, whether the logits are
      numbers.
    """

    row: jax.Array
    position: jax.Array
    logits: jax.Array
    token: jax.Array
    finite: jax.Array


@dataclasses.dataclass(frozen=True)
class Emission:
    """Sampling, verification and result of the steps of one bucket."""

    layout: PlanLayout
    verification: Verification
    vocabulary: Vocabulary

    def sample(
        self, state: DecodeState, row: jax.Array, position: jax.Array, logits: jax.Array
    ) -> Samples:
        args = self._args(state, row, position)
        # The op skips rows with a negative position: padding has nothing to sample.
        skipped = args._replace(position=jnp.where(row == self.layout.trash_row, -1, args.position))
        token, finite = self.vocabulary.sample(
            logits,
            skipped,
            self._history(state, row),
            filters=self.layout.bucket.filters,
            penalties=self.layout.bucket.penalties,
        )
        return Samples(row, position, logits, token, finite)

    def emit(
        self, params: Params, state: DecodeState, plan: Plan, samples: Samples
    ) -> tuple[DecodeState, jax.Array, jax.Array]:
        """Accept drafts, append what is emitted, and pack the result (`plan.ResultLayout`).

        Also returns how many drafts each emitting row accepted, [E].
        """
        row, emits = self._emitting_rows(plan)
        at = self._sample_index()
        accepted, tokens = self._accept(params, state, plan, samples, samples.token[at])
        if self.layout.delayed:
            return state, self._report(state, plan, samples, at, accepted, tokens), accepted

        length, sampling = state.length[row], state.sampling
        running = emits & ~state.done[row]
        emitted, _, reason = truncate(
            tokens,
            jnp.where(running, accepted + 1, 0),
            sampling.stop_ids[row],
            length,
            state.max_length[row],
            sampling.min_length[row],
        )
        # What plain decoding would emit before it fails; queries of rejected drafts do not count.
        query = jnp.arange(self.layout.n_queries)
        no_number = ~samples.finite[at] & (query < emitted[:, None])
        failed = no_number.any(axis=1)
        emitted = jnp.where(failed, no_number.argmax(axis=1).astype(jnp.int32), emitted)
        reason = jnp.where(failed, NON_FINITE, jnp.where(running, reason, RUNNING))
        accepted = jnp.minimum(accepted, emitted)

        live = query < emitted[:, None]
        target_row = jnp.where(live, row[:, None], self.layout.trash_row)
        target = jnp.where(live, length[:, None] + query, 0)
        state = state._replace(
            tokens=state.tokens.at[target_row, target].set(tokens),
            length=state.length.at[row].add(emitted),
            done=state.done.at[row].max(reason != RUNNING),
        )
        words = [emitted[:, None], accepted[:, None], reason[:, None], tokens]
        words += self._logprob_words(state, samples, at, tokens)
        return state, jnp.concatenate(words, axis=1), accepted

    def expected_length(self, state: DecodeState, plan: Plan, accepted: jax.Array) -> jax.Array:
        """Lengths [R] once the host has verified, but for requests that it finds to end."""
        row, emits = self._emitting_rows(plan)
        return state.length.at[row].add(jnp.where(emits & ~state.done[row], accepted + 1, 0))

    def _report(
        self,
        state: DecodeState,
        plan: Plan,
        samples: Samples,
        at: jax.Array,
        accepted: jax.Array,
        tokens: jax.Array,
    ) -> jax.Array:
        """What the host verifies."""
        queries, finite = self.layout.n_queries, samples.finite[at]
        numbers = jnp.where(finite.all(axis=1), queries, finite.argmin(axis=1)).astype(jnp.int32)
        words = [numbers[:, None], accepted[:, None], jnp.zeros_like(accepted)[:, None], tokens]
        words += self._logprob_words(state, samples, at, tokens)
        chunks = self.layout.bucket.chunks
        words.append(jnp.pad(self._drafts(state, plan.verifies[:, 0]), ((0, chunks), (0, 0))))
        return jnp.concatenate(words, axis=1)

    def _drafts(self, state: DecodeState, row: jax.Array) -> jax.Array:
        """The drafts of batch rows `row` [V], which stand behind their histories: [V, k]."""
        first = state.length[row]
        return state.tokens[row[:, None], first[:, None] + jnp.arange(self.layout.n_queries - 1)]

    def _emitting_rows(self, plan: Plan) -> tuple[jax.Array, jax.Array]:
        """Batch row of each emitting row, and whether it may emit: [E]."""
        verify_row, chunk_row, final = plan.verifies[:, 0], plan.chunks[:, 0], plan.chunks[:, 3]
        may_emit = jnp.concatenate([jnp.ones_like(verify_row, bool), final == 1])
        return jnp.concatenate([verify_row, chunk_row]), may_emit

    def _sample_index(self) -> jax.Array:
        """Where the emitting rows' queries are among the samples: [E, Q] int32."""
        bucket, queries = self.layout.bucket, self.layout.n_queries
        chunks = bucket.drafts + bucket.verifies * queries
        verify = jnp.arange(bucket.drafts, chunks).reshape(bucket.verifies, queries)
        prefill = chunks + jnp.arange(bucket.chunks)
        return jnp.concatenate([verify, jnp.repeat(prefill[:, None], queries, axis=1)])

    def _accept(
        self,
        params: Params,
        state: DecodeState,
        plan: Plan,
        samples: Samples,
        sampled: jax.Array,
    ) -> tuple[jax.Array, jax.Array]:
        """Accepted drafts [E] and the tokens to emit [E, Q]; prefills accept none."""
        n_verify, k = self.layout.bucket.verifies, self.layout.n_queries - 1
        none = jnp.zeros(self.layout.bucket.chunks, jnp.int32)
        if not n_verify:
            return none, sampled
        verify_row, n_drafts = plan.verifies.T
        drafts = self._drafts(state, verify_row)
        if self.verification == "coupled" or k == 0:
            accepted, tokens = accept_coupled(drafts, n_drafts, sampled[:n_verify])
        else:
            accepted, tokens = self._accept_by_rejection(
                params, state, verify_row, drafts, n_drafts, samples
            )
        return jnp.concatenate([accepted, none]), jnp.concatenate([tokens, sampled[n_verify:]])

    def _accept_by_rejection(
        self,
        params: Params,
        state: DecodeState,
        verify_row: jax.Array,
        drafts: jax.Array,
        n_drafts: jax.Array,
        samples: Samples,
    ) -> tuple[jax.Array, jax.Array]:
        """The draft distributions come from running the head again on the drafts' hidden states.

        Keeping k vocabulary rows instead would take 6 MB a request; the hidden states take 64 KB.
        Whole distributions are needed: of several shards, each verifies some of the rows.
        """
        n, queries = self.layout.bucket.verifies, self.layout.n_queries
        shards = self.vocabulary.shards
        own_row, own_drafts, own_count = shards.own_rows((verify_row, drafts, n_drafts))
        first = state.length[own_row]

        def distribution(logits: jax.Array) -> jax.Array:
            """Of the own rows' first positions, from logits [n, positions, vocab / shards]."""
            positions = logits.shape[1]
            row = jnp.repeat(own_row, positions)
            position = first[:, None] - 1 + jnp.arange(positions)
            logits = shards.exchange(logits)
            logp = sampling_logprobs(
                logits.reshape(len(row), -1),
                self._args(state, row, position.ravel()),
                self._history(state, row),
                filters=self.layout.bucket.filters,
                penalties=self.layout.bucket.penalties,
            )
            return logp.reshape(logits.shape)

        window = slice(self.layout.bucket.drafts, self.layout.bucket.drafts + n * queries)
        hidden = state.draft_hidden[verify_row, : queries - 1]
        accepted = accept_rejection(
            own_drafts,
            own_count,
            distribution(samples.logits[window].reshape(n, queries, -1)),
            distribution(self.vocabulary.logits(params, hidden)),
            state.sampling.seed[own_row],
            first,
        )
        return shards.all_rows(accepted, n)

    def _logprob_words(
        self, state: DecodeState, samples: Samples, at: jax.Array, tokens: jax.Array
    ) -> list[jax.Array]:
        """The logprob sections of the result."""
        if self.layout.bucket.logprobs < 0:
            return []
        rows, which = tokens.shape[0], at.ravel()
        row = samples.row[which]
        chosen, ids, values = self.vocabulary.token_logprobs(
            samples.logits,
            tokens.ravel(),
            self._args(state, row, samples.position[which]),
            self._history(state, row),
            rows=which,
            top_n=self.layout.bucket.logprobs,
            penalties=self.layout.bucket.penalties,
        )
        words = [_bits(chosen).reshape(rows, -1)]
        if self.layout.bucket.logprobs:
            words += [ids.reshape(rows, -1), _bits(values).reshape(rows, -1)]
        return words

    def _args(self, state: DecodeState, row: jax.Array, position: jax.Array) -> SampleArgs:
        return sample_args(state.sampling, row, position)

    def _history(self, state: DecodeState, row: jax.Array) -> jax.Array | None:
        return sample_history(state.tokens, row) if self.layout.bucket.penalties else None


def _bits(x: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(x, jnp.int32)
