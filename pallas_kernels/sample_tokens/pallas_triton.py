"""`sample_tokens` in Pallas (Triton lowering): one pass over the logits, no [S, V] temporary.

- scan: one program per row and part of the vocabulary. It keeps an upper bound of the part's noisy
  scores: it hashes every token id, but compares tokens by their odds, exp(logit) / u, and takes one
  logarithm a part. With filters it also keeps the part's normaliser and the largest logit of every
  16 ids (a group).
- collect, with filters: one program per row lists the groups with the largest maxima. They hold the
  row's largest logits, all of them down to a bound.
- pick: one program per row. Without filters it scores exactly the part of the highest bound, and
  then those whose bound is above the best score so far: nearly always none. With filters it finds
  the top_k threshold by bisection in the list, takes the best token above it, and asks whether the
  tokens above that one have the mass of top_p already; if so, the best of those is next, and so on:
  one or two rounds, for what is drawn is likely to be kept. Rows whose filters keep more than the
  list holds (over 512 tokens, at least) go the same way over the logits in memory: slower, never
  wrong.

Exact scores are computed by the very operations of the reference, from the same device functions,
and so are the tokens. Only sums of probabilities, on which top_p depends, have their own order.

Nothing depends on the number of rows. Biased and withheld ids are patched in registers, and only in
the parts that hold one. Without filters the scan does not know of them: bounds of untouched logits
still hold where logits are lowered, and pick scores all biased ids, which may be raised.
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
from pallas_kernels.sample_tokens.noise import (
    SAMPLE_STREAM,
    fold,
    gumbel,
    row_key,
    token_bits,
    unfolded_bits,
)

_LOG2E = math.log2(math.e)
_NO_ID = np.int32(2**31 - 1)
_TOP_BIT = np.uint32(1 << 31)
_MAX_NOISE = 34.0  # more than any, to base 2
_FEW = 16  # lanes that look at one token


class Tiles(NamedTuple):
    """Sizes that are powers of two. Results do not depend on them, but for sums' rounding."""

    part: int = 2048  # ids of a scan program, which share one bound
    lanes: int = 128  # of them, what is loaded at once
    scan_warps: int = 1
    chunk: int = 4096  # ids of a scan program with filters
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

    def load_part(self, at: Array, size: int) -> Array:
        """The untouched logits of ids of parts; see `_first_id`."""
        if self.vocab < size:
            return self.load(at)
        return plt.load(self.logits_ref.at[self.index, at])

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

    def ids(self, at: Array) -> Array:
        return (at + self.vocab_start).astype(jnp.uint32)

    def tempered(self, logits: Array) -> Array:
        return logits / self.divisor

    def exact_scores(self, tempered: Array, at: Array) -> Array:
        noise = gumbel(token_bits(self.ids(at), *self.keys))
        return tempered + jnp.where(self.greedy, jnp.float32(0), noise)

    def bound(
        self, logits: list[Array], at: Array, high: Array, aligned: Array | bool = False
    ) -> Array:
        """An upper bound, to within `_margin`, of a part's base 2 scores (greedy rows: logits).

        Args:
          logits: the part's, in blocks of one shape that follow each other.
          at: local ids of the first block.
          high: the largest of the logits.
          aligned: whether the first id is a multiple of the part's length, a power of two.
        """
        keys = [fold(key) for key in self.keys]

        def noisy(high, aligned):
            scale = _LOG2E / self.divisor
            shift = jnp.where(high > -jnp.inf, high, 0) * scale
            first = fold(self.ids(at))
            odds = []
            for i, block in enumerate(logits):
                offset = i * block.size
                ids = first ^ np.uint32(offset) if aligned else fold(self.ids(at + offset))
                bits = unfolded_bits(ids, *keys)
                odds.append(_odds(block, bits, scale, -shift, self.interpret))
            noise = jnp.log2(_max(functools.reduce(jnp.maximum, odds))) + 32
            # Odds of huge scores leave float32's range; noise is less than their margin.
            return shift + jnp.where(jnp.abs(shift) < 2.0**29, noise, _MAX_NOISE)

        def either(high):
            fast, general = (functools.partial(noisy, aligned=value) for value in (True, False))
            return general(high) if len(logits) == 1 else lax.cond(aligned, fast, general, high)

        return lax.cond(self.greedy, lambda high: high, either, high)

    def least_bound(self, score: Array) -> Array:
        """A part with a lower bound has no token with a better (exact) score."""
        base_2 = score * _LOG2E
        return jnp.where(self.greedy, score, base_2 - _margin(base_2))


def _odds(logits: Array, bits: Array, scale: Array, shift: Array, interpret: bool) -> Array:
    """2**(scale * logits + shift) * (1 / u - 1 / 2) / 2**32, for u = bits / 2**32.

    1 / -log1p(-u) is less than 1 / u - 1 / 2, and nearly that where u is small.

    The kernel is bound by its instructions, and the compiler fuses no multiplication with an
    addition: hence assembly.
    """
    if interpret:
        return jnp.exp2(logits * scale + shift) * (1 / bits.astype(jnp.float32) - 2.0**-33)
    [odds] = plt.elementwise_inline_asm(
        _ODDS,
        args=[jnp.broadcast_to(x, logits.shape) for x in (logits, bits, scale, shift)],
        constraints="=f,f,r,f,f",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(logits.shape, jnp.float32)],
    )
    return odds


_ODDS = """{
    .reg .f32 inverse, power;
    cvt.rn.f32.u32 inverse, $2;
    rcp.approx.ftz.f32 inverse, inverse;
    add.rn.ftz.f32 inverse, inverse, 0fAF000000;
    fma.rn.ftz.f32 power, $1, $3, $4;
    ex2.approx.ftz.f32 power, power;
    mul.rn.ftz.f32 $0, power, inverse;
}"""  # 0fAF000000 is -2**-33


def _higher(one: Array, other: Array, interpret: bool) -> Array:
    """The maximum, NaN if either is, in one instruction."""
    if interpret:
        return jnp.maximum(one, other)
    [higher] = plt.elementwise_inline_asm(
        "max.NaN.f32 $0, $1, $2;",
        args=[one, other],
        constraints="=f,f,f",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(one.shape, jnp.float32)],
    )
    return higher


def _margin(best: Array) -> Array:
    """By how much a bound may be too low: 20 times what its errors add up to."""
    return 2.0**-9 + jnp.abs(best) * 2.0**-16


def _first_id(part: Array, size: int, vocab: int) -> Array:
    """Of a part; the last one overlaps its predecessor, so that no id is beyond the vocabulary."""
    return jnp.minimum(part * size, max(vocab - size, 0))


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
    logits_ref,
    bound_ref,
    peak_ref,
    *,
    vocab: int,
    tiles: Tiles,
    interpret: bool,
):
    p, r = pl.program_id(0), pl.program_id(1)
    # All small loads before anything waits for one of them.
    position, temperature, start = position_ref[r], temperature_ref[r], start_ref[0]
    keys = key0_ref[r], key1_ref[r]

    @pl.when(position >= 0)
    def _():
        row = _Row(r, temperature, keys, start, None, logits_ref, vocab, interpret)
        low = _first_id(p, tiles.part, vocab)
        at = low + jnp.arange(tiles.lanes)
        offsets = range(0, tiles.part, tiles.lanes)
        logits = [row.load_part(at + offset, tiles.part) for offset in offsets]
        high = functools.reduce(functools.partial(_higher, interpret=interpret), logits)
        peak = jnp.where(high < jnp.inf, high, jnp.inf).max()  # Triton's maximum ignores NaN
        peak_ref[r, p] = peak
        bound_ref[r, p] = row.bound(logits, at, peak, (start + low) % tiles.part == 0)


def _scan_with_filters_kernel(
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
    changes = Changes(*refs[:4])
    logits_ref, bound_ref, peak_ref, group_ref, high_ref, norm_ref = refs[4:]
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
        at = low + _grid(n_groups, tiles.group)
        logits = row.load(at)
        peak_ref[r, c] = _max(jnp.where(logits < jnp.inf, logits, jnp.inf))
        logits = row.patch(logits, at, (low, low + tiles.chunk))
        group_ref[r, c * n_groups + jnp.arange(n_groups)] = logits.max(1)
        high, norm = _high_and_norm(logits, row.divisor)
        bound_ref[r, c] = row.bound([logits], at, high)
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
    part: int,
    tiles: Tiles,
    interpret: bool,
):
    changes, (logits_ref, bound_ref, peak_ref) = Changes(*refs[:4]), refs[4:7]
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
        bound, peak = _load_row(bound_ref, r), _load_row(peak_ref, r)

        def rescan(_):
            return _best_of_row(row, bound, part)

        def filtered(_):
            return _best_filtered(row, _Filters(*filter_refs), bound, part, tiles)

        if filter_refs:
            is_filtered = _Filters(*filter_refs).filtered[r] != 0
            score, token = lax.cond(is_filtered, filtered, rescan, 0)
        else:
            score, token = rescan(0)
        token_ref[r] = jnp.minimum(token, vocab - 1) + start_ref[0]
        score_ref[r] = score
        row_peak_ref[r] = peak.max()


def _load_row(ref: Any, row: Array, other: float = -jnp.inf) -> Array:
    """A whole row of [S, N], filled up to a power of two."""
    n = ref.shape[1]
    lane = jnp.arange(pl.next_power_of_2(n))
    return plt.load(ref.at[row, lane], mask=lane < n, other=other)


def _best_of_row(row: _Row, bound: Array, size: int) -> tuple[Array, Array]:
    """Exact score and local id of the best token, without filters.

    Args:
      row: the row.
      bound: of each part's scores, filled up to a power of two.
      size: of a part.
    """
    biased = _load_row(row.changes.bias_ids, row.index, other=-1)
    part, n_parts = jnp.arange(bound.shape[0]), pl.cdiv(row.vocab, size)

    def first(candidates):
        return jnp.where(candidates, part, n_parts).min()

    def score(state):
        p, left, found = state
        low = _first_id(p, size, row.vocab)
        at = low + jnp.arange(size)
        logits = row.patch(row.load_part(at, size), at, (low, low + size))
        found = _better(_argmax(row.exact_scores(row.tempered(logits), at), at), found)
        left &= part != p
        # Negated, so that what has no order is not skipped.
        return first(left & ~(bound < row.least_bound(found[0]))), left, found

    state = first(bound == bound.max()), part < n_parts, _best_biased(row, biased)
    return lax.while_loop(lambda state: state[0] < n_parts, score, state)[2]


def _best_biased(row: _Row, ids: Array) -> tuple[Array, Array]:
    """Exact score and local id of the best of the tokens that have a bias, `ids`."""
    at = ids - row.vocab_start
    inside = (ids >= 0) & (at >= 0) & (at < row.vocab)

    def score(_, found):
        logits = row.patch(row.load(at, inside), at)
        scores = row.exact_scores(row.tempered(logits), at)
        return _better(_argmax(scores, jnp.where(inside, at, _NO_ID)), found)

    nothing = jnp.float32(-jnp.inf), _NO_ID
    # Once or never; in Triton's lowering, a conditional cannot return a constant.
    return lax.fori_loop(0, inside.astype(jnp.int32).max(), score, nothing)


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
    row: _Row, filters: _Filters, bound: Array, part: int, tiles: Tiles
) -> tuple[Array, Array]:
    """Exact score and local id of the best token that top_k, top_p and min_p keep."""
    r = row.index
    top_k, top_p, min_p = filters.top_k[r], filters.top_p[r], filters.min_p[r]
    highs, norms = _load_row(filters.high, r), _load_row(filters.norm, r, other=0)
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
        first = _best_of_row(row, bound, part)
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
    part = min(tiles.part, most)
    return tiles._replace(
        part=part,
        lanes=min(tiles.lanes, part),
        chunk=min(tiles.chunk, most),
        stream=min(tiles.stream, most),
    )


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
    n_groups = pl.cdiv(vocab, tiles.group)
    sizes = {"vocab": vocab, "tiles": tiles, "interpret": interpret}
    f32, i32, u32 = jnp.float32, jnp.int32, jnp.uint32
    key0, key1 = row_key(args.seed, args.position, SAMPLE_STREAM)
    row_inputs = args.position, args.temperature, key0, key1, jnp.asarray(vocab_start, i32)[None]
    inputs = (*row_inputs, *changes, logits)

    if filters:
        part, warps = tiles.chunk, tiles.warps
        scan, scan_inputs = _scan_with_filters_kernel, inputs
    else:
        part, warps = tiles.part, tiles.scan_warps
        scan, scan_inputs = _scan_kernel, (*row_inputs, logits)
    n_parts = pl.cdiv(vocab, part)
    parts = [((n_rows, n_parts), f32)] * 2
    if filters:
        groups = (n_rows, n_parts * part // tiles.group)
        parts += [(groups, f32), *parts]
    bound, peak, *filter_parts = _call(
        functools.partial(scan, **sizes),
        parts,
        scan_inputs,
        grid=(n_parts, n_rows),
        name="sample_scan",
        warps=warps,
        interpret=interpret,
    )
    inputs += (bound, peak)
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
        functools.partial(_pick_kernel, part=part, **sizes),
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
