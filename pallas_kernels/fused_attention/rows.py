"""A step's rows. Positions are logical; `page_table[row, position]` is the slot."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.dispatch import check


class DraftRows(NamedTuple):
    """Rows with one query each, attending to selected positions and to everything recent.

    The query at `position` of page-table row `row` attends to the live selected positions before
    `recent_start[row]` and to all positions `recent_start[row] .. position`. Padding: a row with
    `count` 0 and `recent_start` > `position`.
    """

    row: Array
    """[Nd] int32, page-table row of each draft query."""
    position: Array
    """[Nd] int32, position of the query's token, whose own keys and values are in the pool."""
    selected: Array
    """[L, B, lists, K] int32, ascending; of [layer, row, list] the first `count[row]` are live. A
    list is for the same number of KV heads, which lie next to each other."""
    count: Array
    """[B] int32, live selected positions of each page-table row, in every list."""
    recent_start: Array
    """[B] int32, first of the recent positions."""


class DraftSlots(NamedTuple):
    """`DraftRows` translated through the page table, by `draft_slots`."""

    slots: Array
    """[L, Nd, lists, W] int32: a slot to attend to, or `~slot` of a live key if there is none."""
    length: Array
    """[Nd] int32, entries of each list that are in use."""


class CausalRows(NamedTuple):
    """Rows with up to n queries each (n static), causal.

    Query i, live if i < count, sits at position start + i and attends to 0 .. start + i.
    """

    row: Array
    """[R] int32, page-table row."""
    start: Array
    """[R] int32, position of the first query."""
    count: Array
    """[R] int32, live queries; 0 marks a padding row."""


def sliding_window(
    row: Array,
    position: Array,
    *,
    rows: int,
    n_layers: int,
    sinks: int,
    window: int,
) -> DraftRows:
    """Draft rows of StreamingLLM (Xiao et al., 2023): the first `sinks` positions and the newest
    `window`. `draft_slots` takes them with `max_recent=window`.

    Args:
        row: [Nd] int32, page-table rows, each at most once.
        position: [Nd] int32, positions of the queries.
        rows: B, rows of the page table.
        n_layers: layers.
        sinks: at least 1.
        window: at least 1.
    """
    check(sinks >= 1, f"sinks={sinks}, but must be at least 1")
    check(window >= 1, f"window={window}, but must be at least 1")
    start = jnp.maximum(position - window + 1, 0)
    return DraftRows(
        row,
        position,
        jnp.broadcast_to(jnp.arange(sinks, dtype=jnp.int32), (n_layers, rows, 1, sinks)),
        jnp.zeros(rows, jnp.int32).at[row].set(jnp.minimum(start, sinks)),
        jnp.zeros(rows, jnp.int32).at[row].set(start),
    )


@jax.jit
def _translate(drafts: DraftRows, page_table: Array, recent: Array) -> DraftSlots:
    row, position = drafts.row, drafts.position
    start, count = drafts.recent_start[row], drafts.count[row]
    at = jnp.arange(drafts.selected.shape[-1] + recent.shape[0])
    listed = (at < count[:, None])[:, None]
    selected = jnp.pad(drafts.selected[:, row], [(0, 0)] * 3 + [(0, recent.shape[0])])
    behind = (at + (start - count)[:, None])[:, None]
    attended = jnp.where(listed, selected, behind)
    live = jnp.where(listed, selected < start[:, None, None], behind <= position[:, None, None])
    own = jnp.maximum(position, 0)[:, None, None]
    slot = page_table[row[:, None, None], jnp.where(live, attended, own)]
    length = count + jnp.maximum(position - start + 1, 0)
    return DraftSlots(jnp.where(live, slot, ~slot), length)


def draft_slots(drafts: DraftRows, page_table: Array, *, max_recent: int) -> DraftSlots:
    """The slots that draft rows attend to, in every layer: W = K + max_recent entries a list.

    Once a step and not in each layer's kernel, where every load of a key would wait for two loads
    of its address.

    Args:
        drafts: the rows.
        page_table: [B, max_context] int32.
        max_recent: bound of `position - recent_start + 1`.
    """
    check(max_recent >= 1, f"max_recent={max_recent}, but must be at least 1")
    check(
        page_table.ndim == 2 and page_table.dtype == jnp.int32,
        f"page_table is {page_table.dtype}{list(page_table.shape)}, "
        "but must be int32[B, max_context]",
    )
    n, n_rows, selected = drafts.row.shape[0], page_table.shape[0], drafts.selected
    for name, size in (("row", n), ("position", n), ("count", n_rows), ("recent_start", n_rows)):
        value = getattr(drafts, name)
        check(
            value.shape == (size,) and value.dtype == jnp.int32,
            f"drafts.{name} is {value.dtype}{list(value.shape)}, but must be int32[{size}]",
        )
    check(
        selected.ndim == 4
        and selected.dtype == jnp.int32
        and selected.shape[1] == n_rows
        and selected.shape[3] >= 1,
        f"drafts.selected is {selected.dtype}{list(selected.shape)}, "
        f"but must be int32[L, B, lists, K] with B={n_rows} and K >= 1",
    )
    return _translate(drafts, page_table, jnp.arange(max_recent))
