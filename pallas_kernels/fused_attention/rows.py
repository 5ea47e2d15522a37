"""A step's rows. Positions are logical; `page_table[row, position]` is the slot."""

from typing import NamedTuple

from jax import Array


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
    """[L, B, Hkv, K] int32, ascending; of [layer, row, head] the first `count[row]` are live."""
    count: Array
    """[B] int32, live selected positions of each page-table row, in every layer and head."""
    recent_start: Array
    """[B] int32, first of the recent positions."""


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
