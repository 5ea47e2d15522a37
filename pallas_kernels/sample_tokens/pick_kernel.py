"""Takes the token of a row, from what the scan and the lists know of it.

A row without filters goes the way of `best_token.py`, whatever filters its neighbours have.
"""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.sample_tokens.best_filtered_token import Filters, best_filtered
from pallas_kernels.sample_tokens.best_token import best_of_row
from pallas_kernels.sample_tokens.changes import Changes
from pallas_kernels.sample_tokens.row import Row
from pallas_kernels.sample_tokens.tiles import Tiles
from pallas_kernels.sample_tokens.triton_parts import load_row


def pick_kernel(
    position_ref,
    temperature_ref,
    key0_ref,
    key1_ref,
    start_ref,
    *refs,
    vocab: int,
    part: int,
    tiles: Tiles,
    interpret: bool,
):
    changes, (logits_ref, bound_ref, peak_ref) = Changes(*refs[:4]), refs[4:7]
    *filter_refs, token_ref, score_ref, row_peak_ref = refs[7:]
    r = pl.program_id(0)

    @pl.when(position_ref[r] >= 0)
    def _():
        scalars = temperature_ref, key0_ref, key1_ref, start_ref
        row = Row.of(r, scalars, changes, logits_ref, vocab=vocab, interpret=interpret)
        bound, peak = load_row(bound_ref, r), load_row(peak_ref, r)

        def rescan(_):
            return best_of_row(row, bound, part)

        def filtered(_):
            return best_filtered(row, Filters(*filter_refs), bound, part, tiles)

        if filter_refs:
            is_filtered = Filters(*filter_refs).filtered[r] != 0
            score, token = lax.cond(is_filtered, filtered, rescan, 0)
        else:
            score, token = rescan(0)
        token_ref[r] = jnp.minimum(token, vocab - 1) + start_ref[0]
        score_ref[r] = score
        row_peak_ref[r] = peak.max()
