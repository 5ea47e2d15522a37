"""Everything about the running requests that lives on the device, indexed by batch row.

The last row is the trash row: padding entries of a plan name it. It is always done, has length 1
and maps every position to the trash slot.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from sparsespec_jax.drafters.base import Drafter
from sparsespec_jax.engine.plan import Plan
from sparsespec_jax.parallel.sharding import Placement
from sparsespec_jax.sampling.rows import RowSampling, scatter, unpack_rows


class DecodeState(NamedTuple):
    """Rows of running requests. R = max_batch + 1, N = width of the page table.

    tokens: [R, N] int32 prompt, emitted tokens, and the drafts of the current cycle behind them.
    page_table: [R, N] int32 slot of each position; the trash slot where none is mapped.
    length: [R] int32 tokens that are final; the last one's KV is not written yet.
    max_length: [R] int32 length at which the request ends.
    done: [R] bool; a done row emits nothing more, whatever the host still plans for it.
    sampling: sampling parameters of each row.
    drafter: what the drafter keeps.
    draft_hidden: [R, k, hidden] final hidden states of the drafts, for rejection verification.
    """

    tokens: jax.Array
    page_table: jax.Array
    length: jax.Array
    max_length: jax.Array
    done: jax.Array
    sampling: RowSampling
    drafter: Any
    draft_hidden: jax.Array | None


def initial_state(
    max_batch: int, width: int, drafter: Any, draft_hidden: jax.Array | None
) -> DecodeState:
    rows = max_batch + 1
    return DecodeState(
        tokens=jnp.zeros((rows, width), jnp.int32),
        page_table=jnp.zeros((rows, width), jnp.int32),
        length=jnp.ones(rows, jnp.int32),
        max_length=jnp.ones(rows, jnp.int32),
        done=jnp.ones(rows, bool),
        sampling=RowSampling.zeros(rows),
        drafter=drafter,
        draft_hidden=draft_hidden,
    )


def state_shardings(placement: Placement, drafter: Drafter) -> DecodeState:
    """Shardings of all arrays, or one for all of a field's: all but the drafter's is replicated."""
    shardings = dict.fromkeys(DecodeState._fields, placement.replicated)
    drafter_shardings = jax.tree.map(
        lambda axes: placement.of(*axes),
        drafter.state_axes,
        is_leaf=lambda leaf: type(leaf) is tuple,
    )
    return DecodeState(**shardings | {"drafter": drafter_shardings})


def apply_commits(state: DecodeState, plan: Plan) -> DecodeState:
    """Append what the host accepted. Padding puts the trash row's one token where it is."""
    row, count, last_token = plan.commits.T
    length = state.length.at[row].add(count)
    tokens = state.tokens.at[row, length[row] - 1].set(last_token)
    return state._replace(tokens=tokens, length=length)


def apply_updates(state: DecodeState, plan: Plan) -> DecodeState:
    """Admit the plan's new requests and enter its page-table entries and prompt tokens."""
    row, position, slot, token = plan.updates.T
    known = token >= 0
    trash_row = state.length.shape[0] - 1
    page_table = state.page_table.at[row, position].set(slot)
    tokens = state.tokens.at[jnp.where(known, row, trash_row), position].set(
        jnp.where(known, token, 0)
    )
    if plan.admissions.shape[0] == 0:
        return state._replace(page_table=page_table, tokens=tokens)

    admitted, length, max_length = plan.admissions[:, :3].T
    padding = admitted == trash_row
    return state._replace(
        page_table=page_table,
        tokens=tokens,
        length=state.length.at[admitted].set(jnp.where(padding, 1, length)),
        max_length=state.max_length.at[admitted].set(jnp.where(padding, 1, max_length)),
        done=state.done.at[admitted].set(padding),
        sampling=scatter(state.sampling, admitted, unpack_rows(plan.admissions[:, 3:])),
    )
