"""From batch rows to sample rows: the arguments with which a step samples.

A step samples for S rows (drafts, verify queries, finished prefills alike). Row s belongs to batch
row rows[s] and its query token sits at positions[s], so it samples the token of position
positions[s] + 1, whose history is tokens[rows[s], : positions[s] + 1] whatever kind of row it is.
"""

import jax.numpy as jnp
from jax import Array

from pallas_kernels.sample_tokens import SampleArgs
from sparsespec_jax.sampling.rows import RowSampling


def sample_args(state: RowSampling, rows: Array, positions: Array) -> SampleArgs:
    """Gathers each sample row's parameters: rows and positions int32 [S], state [B + 1, ...]."""
    gathered = {
        name: array[rows]
        for name, array in state._asdict().items()
        if name in SampleArgs._fields  # stop_ids are verification's
    }
    return SampleArgs(position=jnp.asarray(positions, jnp.int32) + 1, **gathered)


def sample_history(tokens: Array, rows: Array) -> Array:
    """The token history of each sample row: tokens int32 [B + 1, C], rows int32 [S] -> [S, C].

    Entries from a row's sampled position on are stale; the op masks them.
    """
    return tokens[rows]
