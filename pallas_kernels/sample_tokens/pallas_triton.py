"""`sample_tokens` in Pallas (Triton lowering): one pass over the logits, no [S, V] temporary.

- scan: one program per row and chunk of the vocabulary. It hashes every token id, but takes the
  logarithms of the noise approximately, and keeps only the chunk's best noisy score. With filters
  it also keeps the chunk's normaliser and the largest logit of every 16 ids (a group).
- collect, with filters: one program per row lists the groups with the largest maxima. They hold the
  row's largest logits, all of them down to a bound.
- pick: one program per row. Without filters it scores anew, exactly, the chunks whose best comes
  within the error of the row's best: nearly always one. With filters it finds the top_k threshold
  by bisection in the list, takes the best token above it, and asks whether the tokens above that
  one have the mass of top_p already; if so, the best of those is next, and so on: one or two
  rounds, for what is drawn is likely to be kept. Rows whose filters keep more than the list holds
  (over 512 tokens, at least) go the same way over the logits in memory: slower, never wrong.

Exact scores are computed by the very operations of the reference, from the same device functions,
and so are the tokens. Only sums of probabilities, on which top_p depends, have their own order.

Nothing depends on the number of rows. Biased and withheld ids are patched in registers, and only in
the chunks that hold one.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.sample_tokens.args import Best, SampleArgs
from pallas_kernels.sample_tokens.filters import float_of_bits, ordered_bits
from pallas_kernels.sample_tokens.noise import SAMPLE_STREAM, gumbel, mix, row_key

_LOG2E = math.log2(math.e)
_NO_ID = np.int32(2**31 - 1)
_TOP_BIT = np.uint32(1 << 31)
_FEW = 16  # lanes that look at one token


class Tiles(NamedTuple):
    """Sizes that are powers of two. Results do not depend on them, but for sums' rounding."""

    chunk: int = 4096  # ids of a scan program
    group: int = 16  # ids that share one maximum
    listed: int = 512  # groups of a list
    stream: int = 8192  # ids at a time where a whole row is read
    warps: int = 8
    collect_warps: int = 16
    pick_warps: int = 8
    filter_warps: int = 16  # of a pick with filters


class Changes(NamedTuple):
    """Sparse changes of each row's logits (or references of them); ids are padded with -1."""

    bias_ids: Any  # int32 [S, N]
    bias_values: Any  # float32 [S, N]
    withheld_ids: Any  # int32 [S, W]; -inf is added to them
    withheld: Any  # int32 [S]; 0 if they are not withheld now

    @classmethod
    def of(cls, args: SampleArgs) -> "Changes":
        withheld = (args.position < args.min_length).astype(jnp.int32)
        fields = args.bias_ids, args.bias_values, args.withheld_ids
        return cls(*(field if field.shape[1] else _padding(field) for field in fields), withheld)

    @classmethod
    def none(cls, n_rows: int) -> "Changes":
        ids, values = jnp.full((n_rows, 1), -1, jnp.int32), jnp.zeros((n_rows, 1))
        return cls(ids, values, ids, jnp.zeros((n_rows,), jnp.int32))


def _padding(field: Array) -> Array:
    """A kernel argument must not be empty."""
    return jnp.full((field.shape[0], 1), -1, field.dtype)


@dataclasses.dataclass(frozen=True)
class _Row:
    """What a program knows of its row; scalars, and references to the lists of changes."""

    index: Array
    temperature: Array
    keys: tuple[Array, Array]
    vocab_start: Array
    changes: Changes
    logits_ref: Any
    vocab: int
    interpret: bool

    @property
    def greedy(self) -> Array:
        return self.temperature <= 0

    @property
    def divisor(self) -> Array:
        return jnp.where(self.greedy, jnp.float32(1), self.temperature)

    def load(self, at: Array, mask: Array | None = None) -> Array:
        """The untouched logits of local ids; -inf beyond the vocabulary."""
        exists = at < self.vocab if mask is None else mask & (at < self.vocab)
        return plt.load(self.logits_ref.at[self.index, at], mask=exists, other=-jnp.inf)

    def patch(self, logits: Array, at: Array, bounds: tuple[Array, Array] | None = None) -> Array:
        """Adds the sparse changes; with the bounds of contiguous ids, at no cost if none is in."""
        bias_ids, bias_values, withheld_ids, withheld = self.changes

        def last(ids_ref):
            """One more than the index of the last id that is in."""
            n = ids_ref.shape[1]
            lane = jnp.arange(pl.next_power_of_2(n))
            ids = plt.load(ids_ref.at[self.index, lane], mask=lane < n, other=-1)
            inside = ids >= 0
            if bounds is not None:
                local = ids - self.vocab_start
                inside &= (local >= bounds[0]) & (local < bounds[1])
            return jnp.where(inside, lane + 1, 0).max()

        def add(j, logits):
            here = at + self.vocab_start == bias_ids[self.index, j]
            return jnp.where(here, logits + bias_values[self.index, j], logits)

        def withhold(j, logits):
            here = at + self.vocab_start == withheld_ids[self.index, j]
            return jnp.where(here, logits - jnp.inf, logits)

        logits = lax.fori_loop(0, last(bias_ids), add, logits)
        count = jnp.where(withheld[self.index] != 0, last(withheld_ids), 0)
        return lax.fori_loop(0, count, withhold, logits)

    def bits(self, at: Array) -> Array:
        ids = (at + self.vocab_start).astype(jnp.uint32)
        return mix(mix(ids ^ self.keys[0]) ^ self.keys[1])

    def tempered(self, logits: Array) -> Array:
        return logits / self.divisor

    def exact_scores(self, tempered: Array, at: Array) -> Array:
        return tempered + jnp.where(self.greedy, jnp.float32(0), gumbel(self.bits(at)))

    def rough_scores(self, logits: Array, at: Array) -> Array:
        """Scores in base 2 but for a constant (greedy rows: the logits), to within `_margin`."""
        noisy = functools.partial(
            _rough_scores, bits=self.bits(at), scale=_LOG2E / self.divisor, interpret=self.interpret
        )
        return lax.cond(self.greedy, lambda logits: logits, noisy, logits)


def _rough_scores(logits: Array, bits: Array, scale: Array, interpret: bool) -> Array:
    """scale * logits - log2(log2(e) * -log1p(-u)), u = unit(bits); a series where u is small.

    The kernel is bound by its instructions, and the compiler fuses no multiplication with an
    addition: hence assembly.
    """
    if interpret:
        u = bits.astype(jnp.float32) * np.float32(2.0**-32) + np.float32(2.0**-33)
        series = u * (u * (u * np.float32(_LOG2E / 3) + np.float32(_LOG2E / 2)) + _LOG2E)
        exact = -jnp.log2(jnp.maximum(1 - u, np.float32(2.0**-24)))
        return logits * scale - jnp.log2(jnp.where(u < 1 / 32, series, exact))
    [scores] = plt.elementwise_inline_asm(
        _ROUGH_SCORES,
        args=[bits, logits, jnp.broadcast_to(scale, logits.shape)],
        constraints="=f,r,f,f",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(logits.shape, jnp.float32)],
    )
    return scores


def _ptx(x: float) -> str:
    return f"0f{np.float32(x).view(np.uint32):08X}"


_ROUGH_SCORES = f"""{{
    .reg .f32 u, series, log; .reg .pred small;
    cvt.rn.f32.u32 u, $1;
    fma.rn.ftz.f32 u, u, {_ptx(2.0**-32)}, {_ptx(2.0**-33)};
    fma.rn.ftz.f32 series, u, {_ptx(_LOG2E / 3)}, {_ptx(_LOG2E / 2)};
    fma.rn.ftz.f32 series, series, u, {_ptx(_LOG2E)};
    mul.rn.ftz.f32 series, series, u;
    sub.rn.ftz.f32 log, {_ptx(1)}, u;
    max.ftz.f32 log, log, {_ptx(2.0**-24)};
    lg2.approx.ftz.f32 log, log;
    neg.ftz.f32 log, log;
    setp.lt.ftz.f32 small, u, {_ptx(1 / 32)};
    selp.f32 log, series, log, small;
    lg2.approx.ftz.f32 log, log;
    neg.ftz.f32 log, log;
    fma.rn.ftz.f32 $0, $2, $3, log;
}}"""


def _margin(best: Array) -> Array:
    """By how much two rough scores may be in the wrong order: 20 times what errors add up to."""
    return 2.0**-9 + jnp.abs(best) * 2.0**-16


def _better(one: tuple[Array, Array], other: tuple[Array, Array]) -> tuple[Array, Array]:
    """The higher score with its id; the lower id of equal ones."""
    wins = (one[0] > other[0]) | ((one[0] == other[0]) & (one[1] < other[1]))
    return jnp.where(wins, one[0], other[0]), jnp.where(wins, one[1], other[1])


def _argmax(scores: Array, at: Array) -> tuple[Array, Array]:
    best = scores.max()
    return best, jnp.where(scores == best, at, _NO_ID).min()


# Scan.


def _scan_kernel(
    position_ref,
    temperature_ref,
    key0_ref,
    key1_ref,
    start_ref,
    *refs,
    vocab: int,
    tiles: Tiles,
    interpret: bool,
):
    changes, (logits_ref, rough_ref, peak_ref, *filter_refs) = Changes(*refs[:4]), refs[4:]
    c, r = pl.program_id(0), pl.program_id(1)

    @pl.when(position_ref[r] >= 0)
    def _():
        row = _Row(
            index=r,
            temperature=temperature_ref[r],
            keys=(key0_ref[r], key1_ref[r]),
            vocab_start=start_ref[0],
            changes=changes,
            logits_ref=logits_ref,
            vocab=vocab,
            interpret=interpret,
        )
        low = c * tiles.chunk
        n_groups = tiles.chunk // tiles.group
        at = low + jnp.arange(tiles.chunk)
        if filter_refs:
            at = low + _grid(n_groups, tiles.group)
        logits = row.load(at)
        peak_ref[r, c] = _max(jnp.where(logits < jnp.inf, logits, jnp.inf))
        logits = row.patch(logits, at, (low, low + tiles.chunk))
        rough_ref[r, c] = _max(row.rough_scores(logits, at))
        if filter_refs:
            group_ref, high_ref, norm_ref = filter_refs
            maxima = logits.max(1)
            group_ref[r, c * n_groups + jnp.arange(n_groups)] = maxima
            high, norm = _high_and_norm(logits, row.divisor)
            high_ref[r, c] = high
            norm_ref[r, c] = norm


def _grid(rows: int, columns: int) -> Array:
    """[rows, columns] consecutive numbers, row by row."""
    row, column = (lax.broadcasted_iota(jnp.int32, (rows, columns), axis) for axis in (0, 1))
    return row * columns + column


def _max(x: Array) -> Array:
    """Over all axes, the last one first."""
    while x.ndim:
        x = x.max(-1)
    return x


def _min(x: Array) -> Array:
    while x.ndim:
        x = x.min(-1)
    return x


def _sum(x: Array) -> Array:
    while x.ndim:
        x = x.sum(-1)
    return x


def _high_and_norm(logits: Array, divisor: Array) -> tuple[Array, Array]:
    """The largest logit, and the sum of exp((logits - largest) / divisor); 0 if all are -inf."""
    high = _max(logits)
    base = jnp.where(high > -jnp.inf, high, 0)
    return high, _sum(jnp.exp2((logits - base) * (_LOG2E / divisor)))


# Collect.


def _collect_kernel(
    position_ref,
    filtered_ref,
    group_ref,
    list_ref,
    count_ref,
    bound_ref,
    *,
    n_groups: int,
    listed: int,
):
    """Lists the groups whose maximum is above a bound: at most `listed`, if possible half as many.

    A bound of 0 means that every group is in the list.
    """
    r = pl.program_id(0)

    @pl.when((position_ref[r] >= 0) & (filtered_ref[r] != 0))
    def _():
        lane = jnp.arange(pl.next_power_of_2(n_groups))
        exists = lane < n_groups
        maxima = plt.load(group_ref.at[r, lane], mask=exists, other=-jnp.inf)
        keys = jnp.where(exists, ordered_bits(maxima), np.uint32(0))

        def number(threshold):
            return (keys >= threshold).astype(jnp.int32).sum()

        def narrow(state):
            """Too many groups are at or above `many`; `few` is a threshold with few enough."""
            bit, many, few = state
            trial = many | bit
            n = number(trial)
            good = (n <= listed) & (n >= listed // 2)
            many = jnp.where(n > listed, trial, many)
            few = jnp.where(good, trial, few)
            return jnp.where(good, np.uint32(0), bit >> np.uint32(1)), many, few

        zero = jnp.uint32(0)
        start = jnp.where(n_groups > listed, _TOP_BIT, zero)
        _, many, few = lax.while_loop(lambda s: s[0] != 0, narrow, (start, zero, zero))
        threshold = jnp.where(few > 0, few, many + np.uint32(1))
        take = keys >= threshold
        rank = jnp.cumsum(take.astype(jnp.int32)) - 1
        plt.store(list_ref.at[r, jnp.where(take, rank, listed)], lane, mask=take)
        count_ref[r] = take.astype(jnp.int32).sum()
        bound_ref[r] = threshold - np.uint32(1)


# Pick.


class _Filters(NamedTuple):
    """References of what the filters of a row need."""

    top_k: Any
    top_p: Any
    min_p: Any
    filtered: Any
    high: Any
    norm: Any
    list: Any
    count: Any
    bound: Any


def _pick_kernel(
    position_ref,
    temperature_ref,
    key0_ref,
    key1_ref,
    start_ref,
    *refs,
    vocab: int,
    n_chunks: int,
    tiles: Tiles,
    interpret: bool,
):
    changes, (logits_ref, rough_ref, peak_ref) = Changes(*refs[:4]), refs[4:7]
    *filter_refs, token_ref, score_ref, row_peak_ref = refs[7:]
    r = pl.program_id(0)

    @pl.when(position_ref[r] >= 0)
    def _():
        row = _Row(
            index=r,
            temperature=temperature_ref[r],
            keys=(key0_ref[r], key1_ref[r]),
            vocab_start=start_ref[0],
            changes=changes,
            logits_ref=logits_ref,
            vocab=vocab,
            interpret=interpret,
        )

        def rescan(_):
            return _best_of_row(row, rough_ref, n_chunks, tiles)

        def filtered(_):
            return _best_filtered(row, _Filters(*filter_refs), rough_ref, n_chunks, tiles)

        if filter_refs:
            is_filtered = _Filters(*filter_refs).filtered[r] != 0
            score, token = lax.cond(is_filtered, filtered, rescan, 0)
        else:
            score, token = rescan(0)
        chunk = jnp.arange(pl.next_power_of_2(n_chunks))
        peaks = plt.load(peak_ref.at[r, chunk], mask=chunk < n_chunks, other=-jnp.inf)
        token_ref[r] = jnp.minimum(token, vocab - 1) + start_ref[0]
        score_ref[r] = score
        row_peak_ref[r] = peaks.max()


def _best_of_row(row: _Row, rough_ref: Any, n_chunks: int, tiles: Tiles) -> tuple[Array, Array]:
    """Exact score and local id of the best token, without filters."""
    chunk = jnp.arange(pl.next_power_of_2(n_chunks))
    rough = plt.load(rough_ref.at[row.index, chunk], mask=chunk < n_chunks, other=-jnp.inf)
    best = rough.max()
    # Negated, so that what has no order is not skipped.
    near = (chunk < n_chunks) & ~(rough < best - _margin(best))

    def after(c):
        return jnp.where(near & (chunk > c), chunk, n_chunks).min()

    def score(state):
        c, found = state
        low = c * tiles.chunk
        at = low + jnp.arange(tiles.chunk)
        logits = row.patch(row.load(at), at, (low, low + tiles.chunk))
        scores = row.exact_scores(row.tempered(logits), at)
        return after(c), _better(_argmax(scores, at), found)

    nothing = jnp.float32(-jnp.inf), _NO_ID
    return lax.while_loop(lambda s: s[0] < n_chunks, score, (after(jnp.int32(-1)), nothing))[1]


class _Block(NamedTuple):
    """Some tokens of a row: local ids, tempered logits, and for the thresholds their keys."""

    at: Array
    tempered: Array
    keys: Array
    """`ordered_bits` of the tempered logits; 0 in lanes without a token."""
    weights: Array
    """Probability over that of the most likely token; 0 in lanes without a token."""

    @classmethod
    def of(cls, row: _Row, at: Array, exists: Array, high: Array) -> "_Block":
        """Of some ids; `high` is the largest logit of the row."""
        logits = row.patch(row.load(at, exists), at)
        tempered = row.tempered(logits)
        exists &= at < row.vocab
        keys = jnp.where(exists, ordered_bits(tempered), np.uint32(0))
        weights = jnp.exp(tempered - row.tempered(high))
        weights = jnp.where(logits >= high, 1.0, weights)  # whatever the compiler fuses
        return cls(at, tempered, keys, jnp.where(exists, weights, 0))


_Fold = Callable[[Callable[[_Block, Any], Any], Any], Any]
"""Folds a function (block, carry) -> carry over some tokens."""


def _best_filtered(
    row: _Row, filters: _Filters, rough_ref: Any, n_chunks: int, tiles: Tiles
) -> tuple[Array, Array]:
    """Exact score and local id of the best token that top_k, top_p and min_p keep."""
    r = row.index
    top_k, top_p, min_p = filters.top_k[r], filters.top_p[r], filters.min_p[r]
    chunk = jnp.arange(pl.next_power_of_2(n_chunks))
    exists = chunk < n_chunks
    highs = plt.load(filters.high.at[r, chunk], mask=exists, other=-jnp.inf)
    norms = plt.load(filters.norm.at[r, chunk], mask=exists, other=0)
    high = highs.max()
    total = (norms * jnp.exp2((highs - high) * (_LOG2E / row.divisor))).sum()

    lane = jnp.arange(tiles.listed)
    in_list = lane < filters.count[r]
    groups = plt.load(filters.list.at[r, lane], mask=in_list, other=0)
    column = lax.broadcasted_iota(jnp.int32, (1, tiles.group), 1)
    at = groups[:, None] * tiles.group + column
    listed = _Block.of(row, at, jnp.broadcast_to(in_list[:, None], at.shape), high)

    def of_list(f, init):
        return f(listed, init)

    def of_row(f, init):
        def body(c, carry):
            at = c * tiles.stream + jnp.arange(tiles.stream)
            return f(_Block.of(row, at, at >= 0, high), carry)

        return lax.fori_loop(0, pl.cdiv(row.vocab, tiles.stream), body, init)

    # Tokens outside the list have at most this key; a few units make up for division's rounding.
    complete = filters.bound[r] == 0
    at_most = float_of_bits(filters.bound[r]) / row.divisor
    limit = jnp.where(complete, np.uint32(0), ordered_bits(at_most) + np.uint32(4))
    excluded = jnp.exp(at_most - row.tempered(high)) * 1.0001 < min_p  # they are by min_p

    least = _top_k_threshold(of_list, top_k)
    k_in_list = least > limit
    share = jnp.where(top_k > 0, _mass(of_list, least), total)
    mass = _mass(of_list, jnp.maximum(least, limit + np.uint32(1)))
    p_in_list = (top_p < 1) & _enough(mass, top_p * share)
    share_known = (top_k <= 0) | k_in_list | (top_p >= 1)
    all_in_list = complete | (share_known & (k_in_list | p_in_list | excluded))

    def search_list(_):
        start = jnp.maximum(least, limit + np.uint32(1))
        first = _best_above(row, of_list, start, min_p)
        return _first_kept(row, of_list, first, start, high, top_p * share, top_p, min_p)

    def search_row(_):
        start = jnp.maximum(_top_k_threshold(of_row, top_k), np.uint32(1))
        wanted = top_p * _mass(of_row, start)
        first = _best_of_row(row, rough_ref, n_chunks, tiles)
        return _first_kept(row, of_row, first, start, high, wanted, top_p, min_p)

    return lax.cond(all_in_list, search_list, search_row, 0)


def _first_kept(
    row: _Row,
    fold: _Fold,
    best: tuple[Array, Array],
    start: Array,
    high: Array,
    wanted: Array,
    top_p: Array,
    min_p: Array,
) -> tuple[Array, Array]:
    """The best token that is kept; most often that is the first one tried, `best`.

    top_p keeps a token unless the more likely ones have the mass it wants. If one is not kept, no
    token of its key or a lower one is, so the best of those above is next. Keys below `start` are
    out from the beginning.
    """

    def try_one(state):
        _, score, token, start = state
        at = jnp.broadcast_to(jnp.minimum(token, row.vocab - 1), (_FEW,))
        block = _Block.of(row, at, at >= 0, high)
        key, weight = ordered_bits(block.tempered.max()), block.weights.max()
        above = jnp.maximum(start, key + np.uint32(1))
        mass = lax.cond(top_p < 1, lambda _: _mass(fold, above), lambda unused: unused, top_p)
        in_nucleus = (top_p >= 1) | ~_enough(mass, wanted)
        kept = (key >= start) & (weight >= min_p) & in_nucleus
        score, token = lax.cond(
            kept,
            lambda found: found,
            lambda _: _best_above(row, fold, above, min_p),
            (score, token),
        )
        return kept | (token == _NO_ID), score, token, above

    state = best[1] == _NO_ID, *best, start
    _, score, token, _ = lax.while_loop(lambda state: ~state[0], try_one, state)
    return score, token


def _best_above(row: _Row, fold: _Fold, start: Array, min_p: Array) -> tuple[Array, Array]:
    """The best token whose key is at least `start` and that min_p keeps."""

    def better(block, found):
        scores = row.exact_scores(block.tempered, block.at)
        candidate = (block.keys >= start) & (block.weights >= min_p)
        scores = jnp.where(candidate, scores, -jnp.inf)
        score = _max(scores)
        ids = jnp.where(candidate & (scores == score), block.at, _NO_ID)
        return _better((score, _min(ids)), found)

    return fold(better, (jnp.float32(-jnp.inf), _NO_ID))


def _mass(fold: _Fold, start: Array) -> Array:
    """The weight of the tokens whose key is at least `start`."""

    def add(block, mass):
        return mass + _sum(jnp.where(block.keys >= start, block.weights, 0))

    return fold(add, jnp.float32(0))


def _enough(mass: Array, wanted: Array) -> Array:
    return (mass >= wanted) & (mass > 0)


def _top_k_threshold(fold: _Fold, top_k: Array) -> Array:
    """The top_k-th largest key; 0 where fewer are asked for or exist. Two bits a step."""

    def set_bits(i, threshold):
        shift = (30 - 2 * i).astype(jnp.uint32)
        trials = [threshold | (np.uint32(digit) << shift) for digit in (1, 2, 3)]

        def count(block, sums):
            return [
                n + _sum((block.keys >= trial).astype(jnp.int32))
                for n, trial in zip(sums, trials, strict=True)
            ]

        counts = fold(count, [jnp.int32(0)] * 3)
        digit = sum((n >= top_k).astype(jnp.uint32) for n in counts)
        return threshold | (digit << shift)

    steps = 16 * (top_k > 0).astype(jnp.int32)
    return lax.fori_loop(0, steps, set_bits, jnp.uint32(0))


# Log-probabilities.


def _norm_kernel(
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
    row = _Row(
        row_ref[e], divisor_ref[e], (zero, zero), zero, changes, logits_ref, vocab, interpret
    )
    low = c * tiles.chunk
    at = low + jnp.arange(tiles.chunk)
    logits = row.load(at)
    logits = dataclasses.replace(row, index=e).patch(logits, at, (low, low + tiles.chunk))
    high, norm = _high_and_norm(logits, divisor_ref[e])
    high_ref[e, c] = high
    norm_ref[e, c] = norm


# Calls.


def _tiles(tiles: Tiles, vocab: int) -> Tiles:
    """Smaller tiles for small vocabularies."""
    most = max(tiles.group, pl.next_power_of_2(vocab))
    return tiles._replace(chunk=min(tiles.chunk, most), stream=min(tiles.stream, most))


def _call(kernel, out_shapes, inputs, *, grid, name, warps, interpret):
    return pl.pallas_call(
        kernel,
        out_shape=[jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in out_shapes],
        grid=grid,
        name=name,
        compiler_params=plt.CompilerParams(num_warps=warps, num_stages=1),
        interpret=interpret,
    )(*inputs)


@functools.partial(jax.jit, static_argnames=("filters", "interpret", "tiles"))
def best_tokens(
    logits: Array,
    args: SampleArgs,
    changes: Changes,
    vocab_start: Array,
    *,
    filters: bool,
    interpret: bool,
    tiles: Tiles = Tiles(),  # noqa: B008
) -> Best:
    """The best of `logits` [S, V], whose first id is `vocab_start`; filters need all of them.

    Rows at a negative position are skipped: token 0, and a peak of -inf.
    """
    n_rows, vocab = logits.shape
    tiles = _tiles(tiles, vocab)
    n_chunks = pl.cdiv(vocab, tiles.chunk)
    n_groups = pl.cdiv(vocab, tiles.group)
    sizes = {"vocab": vocab, "tiles": tiles, "interpret": interpret}
    f32, i32, u32 = jnp.float32, jnp.int32, jnp.uint32
    key0, key1 = row_key(args.seed, args.position, SAMPLE_STREAM)
    start = jnp.asarray(vocab_start, i32)[None]
    inputs = (args.position, args.temperature, key0, key1, start, *changes, logits)

    parts = [((n_rows, n_chunks), f32)] * 2
    if filters:
        groups = (n_rows, n_chunks * tiles.chunk // tiles.group)
        parts += [(groups, f32), *parts]
    rough, peak, *filter_parts = _call(
        functools.partial(_scan_kernel, **sizes),
        parts,
        inputs,
        grid=(n_chunks, n_rows),
        name="sample_scan",
        warps=tiles.warps,
        interpret=interpret,
    )
    inputs += (rough, peak)
    if filters:
        group_maxima, high, norm = filter_parts
        active = (args.top_k > 0) | (args.top_p < 1) | (args.min_p > 0)
        filtered = (active & (args.temperature > 0)).astype(i32)
        lists = _call(
            functools.partial(_collect_kernel, n_groups=n_groups, listed=tiles.listed),
            [((n_rows, tiles.listed), i32), ((n_rows,), i32), ((n_rows,), u32)],
            (args.position, filtered, group_maxima),
            grid=(n_rows,),
            name="sample_collect",
            warps=tiles.collect_warps,
            interpret=interpret,
        )
        inputs += (args.top_k, args.top_p, args.min_p, filtered, high, norm, *lists)
    token, score, peak = _call(
        functools.partial(_pick_kernel, n_chunks=n_chunks, **sizes),
        [((n_rows,), i32), ((n_rows,), f32), ((n_rows,), f32)],
        inputs,
        grid=(n_rows,),
        name="sample_pick",
        warps=tiles.filter_warps if filters else tiles.pick_warps,
        interpret=interpret,
    )
    live = args.position >= 0
    least = jnp.float32(-jnp.inf)
    return Best(
        jnp.where(live, token, 0), jnp.where(live, score, least), jnp.where(live, peak, least)
    )


@functools.partial(jax.jit, static_argnames=("interpret", "tiles"))
def log_normalisers(
    logits: Array,
    rows: Array,
    divisor: Array,
    changes: Changes,
    *,
    interpret: bool,
    tiles: Tiles = Tiles(),  # noqa: B008
) -> Array:
    """log(sum(exp(patched logits[rows] / divisor))): float32 [E], for rows and divisor of [E]."""
    n_rows, vocab = rows.shape[0], logits.shape[1]
    tiles = _tiles(tiles, vocab)
    n_chunks = pl.cdiv(vocab, tiles.chunk)
    high, norm = _call(
        functools.partial(_norm_kernel, vocab=vocab, tiles=tiles, interpret=interpret),
        [((n_rows, n_chunks), jnp.float32)] * 2,
        (rows, divisor, *changes, logits),
        grid=(n_chunks, n_rows),
        name="sample_normaliser",
        warps=tiles.warps,
        interpret=interpret,
    )
    high = high / divisor[:, None]
    return jax.nn.logsumexp(high, axis=-1, b=norm)
