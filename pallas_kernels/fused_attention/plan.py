"""Which program attends to which keys.

All blocks of keys of all work rows form one line, cut in equal shares, one for each program of a KV
head: whatever the rows' lengths, the programs fill the GPU once and end together (stream-K; Osama
et al., 2023). To start a work row within a share takes time in which nothing is read, so a work row
counts as if it had a few blocks more.

A share may hold parts of several work rows. Program u leaves what it makes of its first one in part
u, and of a further one, w, which begins in its share, in part programs + w. A second kernel merges
the parts of each work row.

The plan is the same for all layers: XLA makes it once a step. Each entry holds all that is needed
to begin, since loads that wait for loads are what a short kernel spends its time with.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl

from pallas_kernels.fused_attention.rows import CausalRows
from pallas_kernels.fused_attention.work_rows import Sizes, work_end

_LEAST_KEYS = 256  # of a share, so that short contexts do not fall to pieces
_START_KEYS = 96  # could be read in the time that the start of a work row takes


class Part(NamedTuple):
    """The part that one program has of one work row."""

    r: Array
    first: Array
    """First packed query of the work row."""
    row: Array
    """Page-table row."""
    start: Array
    count: Array
    low: Array
    """First block of keys."""
    high: Array
    """One past the last."""
    next: Array
    """The program's next part, or -1."""


class Merge(NamedTuple):
    """The parts of one work row: `part`, program + 1 .. program + n_parts - 1."""

    r: Array
    first: Array
    start: Array
    count: Array
    part: Array
    """What the program that begins the work row made of it."""
    program: Array
    """That program."""
    n_parts: Array


class Plan(NamedTuple):
    """Tables of int32."""

    parts: Array
    """[programs + n_work, 8] `Part`; of those not in use, `low` is `high`."""
    merges: Array
    """[n_work, 7] `Merge`."""


def read(entry: type[Part] | type[Merge], table_ref, i: Array):
    """Entry `i` of a plan's table, in a kernel."""
    return entry(*(table_ref[i, field] for field in range(len(entry._fields))))


def make_plan(rows: CausalRows, sizes: Sizes) -> Plan:
    programs, n_work, block = sizes.programs, sizes.n_work, sizes.tile.block
    r, tile = jnp.divmod(jnp.arange(n_work, dtype=jnp.int32), sizes.n_tiles)
    first = tile * sizes.tile.rows
    row, start, count = (of_row[r] for of_row in rows)
    blocks = pl.cdiv(work_end(first, sizes.tile.rows, start, count, sizes.group), block)

    padded = jnp.where(blocks > 0, blocks + pl.cdiv(_START_KEYS, block), 0)
    line = jnp.cumsum(padded, dtype=jnp.int32)
    share = jnp.maximum(pl.cdiv(line[-1], programs), pl.cdiv(_LEAST_KEYS, block))
    cuts = jnp.arange(programs + 1, dtype=jnp.int32)[:, None] * share
    # From here on without what the starts cost: blocks before each cut, and of each work row.
    cuts = jnp.clip(cuts - (line - blocks), 0, blocks).sum(1, dtype=jnp.int32)
    ends = jnp.cumsum(blocks, dtype=jnp.int32)
    begins = ends - blocks

    def parts(w, low, last):
        """Of work rows `w`, from `low` on, of programs whose shares end at `last`."""
        high = jnp.minimum(last, ends[w]) - begins[w]
        following = jnp.where(last > ends[w], programs + w + 1, -1)
        low = jnp.where(low < high, low, high)
        return Part(r[w], first[w], row[w], start[w], count[w], low, high, following)

    def count_up(condition, most):
        return jnp.minimum(condition.sum(1, dtype=jnp.int32), most - 1)

    all_work = jnp.arange(n_work, dtype=jnp.int32)
    earliest = count_up(ends <= cuts[:-1, None], n_work)  # work row of each program
    program = count_up(cuts[1:] <= begins[:, None], programs)  # that begins each work row
    final = count_up(cuts[1:] < ends[:, None], programs)  # that ends it
    table = [
        jnp.concatenate(fields)
        for fields in zip(
            parts(earliest, cuts[:-1] - begins[earliest], cuts[1:]),
            parts(all_work, jnp.zeros_like(all_work), cuts[program + 1]),
            strict=True,
        )
    ]
    part = jnp.where(earliest[program] == all_work, program, programs + all_work)
    n_parts = jnp.where(blocks > 0, final - program + 1, 0)
    merges = Merge(r, first, start, count, part, program, n_parts)
    return Plan(jnp.stack(table, axis=1), jnp.stack(merges, axis=1))
