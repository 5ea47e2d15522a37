"""The best token of a row without filters.

The part of the highest bound is scored exactly, and then those whose bound is above the best score
so far: nearly always none. Biased tokens are scored whatever the bounds say.
"""

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels.sample_tokens.bounds import least_bound
from pallas_kernels.sample_tokens.row import Row
from pallas_kernels.sample_tokens.triton_parts import NO_ID, better, first_id, load_row


def best_of_row(row: Row, bound: Array, size: int) -> tuple[Array, Array]:
    """Exact score and local id of the best token, without filters.

    Args:
      row: the row.
      bound: of each part's scores, filled up to a power of two.
      size: of a part.
    """
    biased = load_row(row.changes.bias_ids, row.index, other=-1)
    part, n_parts = jnp.arange(bound.shape[0]), pl.cdiv(row.vocab, size)

    def first(candidates):
        return jnp.where(candidates, part, n_parts).min()

    def score(state):
        p, left, found = state
        low = first_id(p, size, row.vocab)
        at = low + jnp.arange(size)
        logits = row.patch(row.load_part(at, size), at, (low, low + size))
        found = better(_argmax(row.exact_scores(row.tempered(logits), at), at), found)
        left &= part != p
        # Negated, so that what has no order is not skipped.
        return first(left & ~(bound < least_bound(row, found[0]))), left, found

    state = first(bound == bound.max()), part < n_parts, _best_biased(row, biased)
    return lax.while_loop(lambda state: state[0] < n_parts, score, state)[2]


def _best_biased(row: Row, ids: Array) -> tuple[Array, Array]:
    """Exact score and local id of the best of the tokens that have a bias, `ids`."""
    at = ids - row.vocab_start
    inside = (ids >= 0) & (at >= 0) & (at < row.vocab)

    def score(_, found):
        logits = row.patch(row.load(at, inside), at)
        scores = row.exact_scores(row.tempered(logits), at)
        return better(_argmax(scores, jnp.where(inside, at, NO_ID)), found)

    nothing = jnp.float32(-jnp.inf), NO_ID
    # Once or never; in Triton's lowering, a conditional cannot return a constant.
    return lax.fori_loop(0, inside.astype(jnp.int32).max(), score, nothing)


def _argmax(scores: Array, at: Array) -> tuple[Array, Array]:
    best = scores.max()
    return best, jnp.where(scores == best, at, NO_ID).min()
