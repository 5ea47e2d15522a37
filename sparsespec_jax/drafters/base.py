"""What the step asks of a drafter."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import jax

from pallas_kernels import AttentionScores, DraftRows


class Verified(NamedTuple):
    """The rows that got exact scores in a step: verify rows, then prefills.

    E rows, Q scored queries, at most k + 1.

    row: [E] int32 batch row; the trash row where there is nothing to learn.
    scores: the probabilities that each query gave each position, in every layer, as attention
      left them. Those of queries that do not exist may be anything.
    queries: [E] int32 queries that exist, from the front.
    committed: [E] int32 of those, the ones whose tokens are final: the accepted drafts and the
      token before them, or a prompt's. The rest are queries of rejected drafts.
    start: [E] int32 position of the first scored query.
    length: [E] int32 tokens of the row after the step; the last one's KV is not written yet.
    sparsity: [] int32 which of the speculation's sparsities their next drafts have.
    """

    row: jax.Array
    scores: AttentionScores
    queries: jax.Array
    committed: jax.Array
    start: jax.Array
    length: jax.Array
    sparsity: jax.Array | int = 0


class Drafter(Protocol):
    """Chooses what drafts attend to. Drafts may be wrong: verification keeps the output exact.

    k: drafts in a cycle; 0 for plain decoding.
    max_recent: most positions from a draft's `recent_start` to its own.
    state_axes: logical axes (see `parallel/sharding.py`) of every array of the state.

    With tensor parallelism a drafter sees one shard of the model, and its part of the state.
    """

    k: int
    max_recent: int
    state_axes: Any

    def init_state(self, rows: int) -> Any:
        """The drafter's part of the device state, for `rows` batch rows."""

    def draft_rows(self, state: Any, row: jax.Array, position: jax.Array) -> DraftRows:
        """What the draft queries of batch rows `row` [D] at `position` [D] attend to."""

    def update(self, state: Any, verified: Verified) -> Any:
        """Learn from a verification, once it is known what was accepted."""
