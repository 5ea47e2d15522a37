"""Log-probabilities: the largest logit of a part of a row, and the part's normaliser.

A row of logits may be asked for several times, each time with changes and a divisor of its own.
"""

import dataclasses

import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.sample_tokens.changes import Changes
from pallas_kernels.sample_tokens.row import Row
from pallas_kernels.sample_tokens.tiles import Tiles
from pallas_kernels.sample_tokens.triton_parts import high_and_norm


def normaliser_kernel(
    row_ref,
    divisor_ref,
    *refs,
    vocab: int,
    tiles: Tiles,
    interpret: bool,
):
    changes, (logits_ref, high_ref, norm_ref) = Changes(*refs[:4]), refs[4:]
    c, e = pl.program_id(0), pl.program_id(1)
    zero = jnp.int32(0)
    row = Row(row_ref[e], divisor_ref[e], (zero, zero), zero, changes, logits_ref, vocab, interpret)
    low = c * tiles.chunk
    at = low + jnp.arange(tiles.chunk)
    logits = row.load(at)
    logits = dataclasses.replace(row, index=e).patch(logits, at, (low, low + tiles.chunk))
    high, norm = high_and_norm(logits, divisor_ref[e])
    high_ref[e, c] = high
    norm_ref[e, c] = norm
