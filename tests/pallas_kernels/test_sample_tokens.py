"""The sampler op: its noise, its filters, and the token it picks."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from pallas_kernels.lowering import lower_for_cuda
from pallas_kernels.sample_tokens import (
    ACCEPT_STREAM,
    RESIDUAL_STREAM,
    SAMPLE_STREAM,
    SampleArgs,
    api,
    finite_rows,
    noise,
    uniform_noise,
)
from pallas_kernels.sample_tokens.filters import filter_logits, ordered_bits
from pallas_kernels.sample_tokens.noise import gumbel, threefry2x32, unit

UNLIKELY = 1e-4  # the statistical tests are seeded: they pass or fail for good

process_logits = jax.jit(api.process_logits, static_argnames=("filters", "penalties"))
sampling_logprobs = jax.jit(api.sampling_logprobs, static_argnames=("filters", "penalties"))
sample_tokens = jax.jit(
    api.sample_tokens, static_argnames=("filters", "penalties", "implementation")
)
token_logprobs = jax.jit(api.token_logprobs, static_argnames=("top_n", "penalties"))
gumbel_noise = jax.jit(noise.gumbel_noise, static_argnums=2, static_argnames="stream")

fuzz = settings(max_examples=60, deadline=None, derandomize=True)


def seeds_of(*values):
    return jnp.asarray([[v & 0xFFFFFFFF, v >> 32] for v in values], jnp.uint32)


def make_args(rows, **changes):
    """`rows` rows that sample at temperature 1 and change nothing, but for `changes`."""
    defaults = {
        "position": np.arange(10, 10 + rows, dtype=np.int32),
        "temperature": np.float32(1),
        "top_k": np.int32(0),
        "top_p": np.float32(1),
        "min_p": np.float32(0),
        "seed": seeds_of(*range(rows)),
        "prompt_length": np.int32(4),
        "min_length": np.int32(0),
        "presence": np.float32(0),
        "frequency": np.float32(0),
        "repetition": np.float32(1),
        "raw_logprobs": np.int32(0),
        "withheld_ids": np.full((rows, 3), -1, np.int32),
        "bias_ids": np.full((rows, 2), -1, np.int32),
        "bias_values": np.zeros((rows, 2), np.float32),
    }
    assert changes.keys() <= defaults.keys()
    fields = {}
    for name, default in defaults.items():
        value = np.asarray(changes.get(name, default), np.asarray(default).dtype)
        fields[name] = jnp.asarray(np.broadcast_to(value, (rows,)) if value.ndim == 0 else value)
    return SampleArgs(**fields)


def some_logits(rows, vocab=40, seed=0, scale=3.0):
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.normal(size=(rows, vocab)) * scale, jnp.float32)


def softmax(logits):
    logits = np.asarray(logits, np.float64)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


class TestNoise:
    @pytest.mark.parametrize(
        ("key", "counter", "expected"),
        [
            ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
            ((0xFFFFFFFF,) * 2, (0xFFFFFFFF,) * 2, (0x1CB996FC, 0xBB002BE7)),
            ((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), (0xC4923A9C, 0x483DF7A0)),
        ],
    )
    def test_row_keys_are_threefry_as_published(self, key, counter, expected):
        as_words = lambda pair: tuple(jnp.uint32(word) for word in pair)  # noqa: E731
        assert tuple(map(int, threefry2x32(as_words(key), as_words(counter)))) == expected

    def test_token_bits_are_two_rounds_of_the_finaliser(self):
        ids, key0, key1 = np.random.default_rng(0).integers(0, 2**32, (3, 1000), np.uint32)
        expected = noise.mix(noise.mix(ids ^ key0) ^ key1)
        np.testing.assert_array_equal(noise.token_bits(ids, key0, key1), expected)

    @pytest.mark.parametrize(("start", "size"), [(0, 1), (0, 7), (13, 1), (500, 33), (999, 1)])
    def test_a_slice_of_the_vocabulary_has_the_bits_of_the_whole(self, start, size):
        seed, position = seeds_of(1, 2**40), jnp.asarray([5, 6])
        whole = gumbel_noise(seed, position, 1000)
        part = gumbel_noise(seed, position, size, vocab_start=start)
        np.testing.assert_array_equal(part, whole[:, start : start + size])

    def test_a_row_has_the_same_bits_in_any_batch(self):
        seed, position = seeds_of(*range(9)), jnp.arange(9)
        batch = gumbel_noise(seed, position, 333)
        for row in range(9):
            alone = gumbel_noise(seed[row : row + 1], position[row : row + 1], 333)
            np.testing.assert_array_equal(alone[0], batch[row])

    def test_it_is_gumbel_distributed(self):
        noise = gumbel_noise(seeds_of(3), jnp.asarray([17]), 200_000)
        assert stats.kstest(np.asarray(noise[0], np.float64), "gumbel_r").pvalue > UNLIKELY

    def test_the_maximum_over_a_large_vocabulary_is_gumbel_too(self):
        """Coarse uniforms would flatten exactly the tail that decides."""
        vocab, rows = 150_000, 60
        maximum = jax.jit(lambda s, p: gumbel_noise(s, p, vocab).max(-1))
        highest = np.concatenate([maximum(seeds_of(*[i] * rows), jnp.arange(rows)) for i in (1, 2)])
        assert stats.kstest(highest - np.log(vocab), "gumbel_r").pvalue > UNLIKELY

    def test_uniforms_are_uniform_over_positions_and_over_seeds(self):
        n = 100_000
        positions = uniform_noise(jnp.broadcast_to(seeds_of(7), (n, 2)), jnp.arange(n))
        low_words = jnp.stack([jnp.arange(n), jnp.zeros(n, int)], 1).astype(jnp.uint32)
        seeds = uniform_noise(low_words, jnp.full(n, 3))
        for sample in (positions, seeds):
            assert stats.kstest(np.asarray(sample, np.float64), "uniform").pvalue > UNLIKELY

    def test_every_hash_gives_a_uniform_inside_the_interval_and_a_finite_gumbel(self):
        bits = jnp.asarray([0, 1, 2**24, 2**31, 2**32 - 129, 2**32 - 1], jnp.uint32)
        assert ((unit(bits) > 0) & (unit(bits) < 1)).all()
        assert jnp.isfinite(gumbel(bits)).all()

    def test_the_smallest_exponentials_are_resolved_below_the_float32_epsilon(self):
        assert len(np.unique(gumbel(jnp.arange(100, dtype=jnp.uint32)))) == 100

    @pytest.mark.parametrize("neighbour", ["id", "id xor 1", "position", "seed", "high seed"])
    def test_neighbouring_coordinates_are_independent(self, neighbour):
        rows, vocab = 60, 2000
        seed, position = seeds_of(*[12345] * rows), jnp.arange(0, 2 * rows, 2)
        one = gumbel_noise(seed, position, vocab)
        other = {
            "id": lambda: jnp.roll(one, 1, -1),
            "id xor 1": lambda: one[:, jnp.arange(vocab) ^ 1],
            "position": lambda: gumbel_noise(seed, position + 1, vocab),
            "seed": lambda: gumbel_noise(seed.at[:, 0].add(1), position, vocab),
            "high seed": lambda: gumbel_noise(seed.at[:, 1].add(1), position, vocab),
        }[neighbour]()
        half = slice(None, None, 2) if neighbour == "id xor 1" else slice(None)  # each pair once
        assert independent(one[:, half], other[:, half])

    def test_streams_are_independent(self):
        rows, vocab = 60, 2000
        seed, position = seeds_of(*[5] * rows), jnp.arange(rows)
        sample = gumbel_noise(seed, position, vocab, stream=SAMPLE_STREAM)
        residual = gumbel_noise(seed, position, vocab, stream=RESIDUAL_STREAM)
        assert independent(sample, residual)
        many = jnp.broadcast_to(seed[:1], (100_000, 2)), jnp.arange(100_000)
        assert independent(uniform_noise(*many, ACCEPT_STREAM), uniform_noise(*many, 2))


def independent(a, b, bins=16):
    """Chi-square test of the joint distribution of two equally shaped Gumbel or uniform arrays."""
    ranks = [stats.rankdata(np.ravel(x)) * bins / (np.size(x) + 1) for x in (a, b)]
    counts, *_ = np.histogram2d(*ranks, bins=bins, range=[[0, bins]] * 2)
    return stats.chi2_contingency(counts).pvalue > UNLIKELY


class TestFilters:
    VOCAB = 12
    # Few distinct values make ties common; the extremes must order correctly too.
    values = st.sampled_from([-np.inf, -3e38, -2.0, -1.5, -1e-30, -0.0, 0.0, 0.5, 1.0, 1.25, 3.0])
    rows = st.lists(values, min_size=VOCAB, max_size=VOCAB).filter(lambda x: max(x) > -np.inf)
    run = staticmethod(jax.jit(filter_logits))

    def kept(self, row, top_k=0, top_p=1.0, min_p=0.0):
        one = lambda value, dtype: jnp.asarray([value], dtype)  # noqa: E731
        out = self.run(
            one(row, jnp.float32),
            one(top_k, jnp.int32),
            one(top_p, "float32"),
            one(min_p, "float32"),
        )
        out, row = np.asarray(out[0]), np.asarray(row, np.float32)
        kept = out > -np.inf
        np.testing.assert_array_equal(out[kept], row[kept])
        return kept

    @fuzz
    @given(st.lists(st.floats(width=32, allow_nan=False), min_size=2, max_size=2))
    def test_ordered_bits_keep_the_order_of_floats(self, pair):
        pair = np.where(np.abs(pair) < 2.0**-126, 0.0, pair)  # XLA flushes subnormals
        a, b = np.asarray(ordered_bits(jnp.asarray(pair, jnp.float32))).tolist()
        assert (a < b) == (pair[0] < pair[1])
        assert (a == b) == (pair[0] == pair[1])

    @fuzz
    @given(rows, st.integers(0, VOCAB + 3))
    def test_top_k_keeps_what_is_at_least_the_kth_largest(self, row, k):
        row = np.asarray(row, np.float32)
        at_least = np.sort(row)[::-1][min(k or self.VOCAB, self.VOCAB) - 1]
        np.testing.assert_array_equal(self.kept(row, top_k=k), (row >= at_least) & (row > -np.inf))

    @fuzz
    @given(rows, st.integers(0, VOCAB), st.floats(2**-7, 1.0, width=32))
    def test_top_p_keeps_the_fewest_most_likely_tokens_of_top_k(self, row, k, p):
        candidates = np.flatnonzero(self.kept(row, top_k=k))
        kept = self.kept(row, top_k=k, top_p=p)[candidates]
        row = np.asarray(row)[candidates]
        probs = softmax(row)
        assert kept.any()
        assert row[kept].min() > row[~kept].max(initial=-np.inf)  # an upper set, ties included
        assert probs[kept].sum() >= p - 1e-6
        assert p == 1 or probs[kept & (row > row[kept].min())].sum() < p + 1e-6

    @fuzz
    @given(rows, st.floats(0.0, 1.0, width=32))
    def test_min_p_is_relative_to_the_most_likely_token(self, row, m):
        probs = softmax(row)
        clear = np.abs(probs - m * probs.max()) > 1e-6  # not decided by rounding
        kept = self.kept(row, min_p=m)
        np.testing.assert_array_equal(kept[clear], (probs >= m * probs.max())[clear])
        assert kept[np.argmax(row)]

    def test_top_p_of_one_keeps_tokens_too_unlikely_to_change_the_sum(self):
        assert self.kept([0.0] + [-50.0] * (self.VOCAB - 1)).all()

    def test_a_tiny_top_p_keeps_the_most_likely_token(self):
        assert self.kept(np.arange(self.VOCAB), top_p=1e-6).tolist() == [False] * 11 + [True]

    def test_top_p_shares_are_those_after_top_k(self):
        row = np.log([0.4, 0.3, 0.2, 0.1] + [1e-9] * 8)
        assert self.kept(row, top_p=0.55).sum() == 2
        assert self.kept(row, top_k=2, top_p=0.55).sum() == 1  # 0.4 / 0.7 > 0.55

    def test_they_match_a_sort_on_a_real_vocabulary(self):
        vocab, rows = 32_000, 6
        logits = np.random.default_rng(0).normal(size=(rows, vocab)).astype(np.float32) * 4
        top_k, top_p = np.array([0, 1, 20, 50, 1000, 0]), np.array([0.9, 0.9, 0.95, 1, 0.8, 0.5])
        out = self.run(logits, top_k.astype("int32"), top_p.astype("float32"), jnp.zeros(rows))
        for row, k, p, result in zip(logits, top_k, top_p, out, strict=True):
            best = np.argsort(-row)[: k or vocab]
            mass = np.cumsum(softmax(row[best]))
            count = len(best) if p == 1 else np.searchsorted(mass, p) + 1
            assert set(np.flatnonzero(result > -np.inf)) == set(best[:count])


class TestProcessing:
    def test_bias_is_added(self):
        logits = some_logits(2)
        args = make_args(2, bias_ids=[[3, -1], [0, 39]], bias_values=[[-100, 9], [2.5, 1]])
        expected = np.array(logits)
        expected[0, 3] -= 100
        expected[1, [0, 39]] += [2.5, 1]
        np.testing.assert_allclose(process_logits(logits, args), expected, rtol=1e-6)

    def test_penalties_follow_the_history_before_the_position(self):
        logits = some_logits(1, vocab=8, seed=1)
        history = jnp.asarray([[1, 1, 2, 5, 5, 6, 7, 7]])
        args = make_args(
            1, position=[6], prompt_length=3, repetition=1.5, frequency=0.3, presence=0.2
        )
        out = process_logits(logits, args, history, penalties=True)
        expected = np.array(logits[0], np.float64)
        for token in (1, 2, 5, 6):  # prompt and output, but not the stale 7s
            expected[token] *= 1 / 1.5 if expected[token] > 0 else 1.5
        expected[5] -= 2 * 0.3 + 0.2  # output only
        expected[6] -= 0.3 + 0.2
        np.testing.assert_allclose(out[0], expected, rtol=1e-5)

    def test_withheld_ids_cannot_be_sampled_below_the_minimum_length(self):
        logits = jnp.zeros((3, 5)).at[:, 2].set(50.0)
        withheld = np.tile(np.array([2, 4, -1], np.int32), (3, 1))
        args = make_args(3, position=[6, 7, 8], min_length=8, withheld_ids=withheld)
        out = process_logits(logits, args)
        assert (out[:, [2, 4]] == -jnp.inf).all(-1).tolist() == [True, True, False]
        assert jnp.isfinite(out[:, [0, 1, 3]]).all()

    def test_a_mask_wins_over_a_bias_and_survives_penalties(self):
        args = make_args(
            1,
            min_length=99,
            withheld_ids=[[2, -1, -1]],
            bias_ids=[[2, 2]],
            bias_values=[[100, 100]],
            repetition=2.0,
            frequency=-2.0,
        )
        history = jnp.full((1, 12), 2)
        out = process_logits(some_logits(1), args, history, penalties=True)
        assert out[0, 2] == -jnp.inf

    def test_padding_ids_touch_nothing(self):
        logits = some_logits(3)
        args = make_args(3, min_length=99, bias_values=np.full((3, 2), 7.0))
        history = jnp.full((3, 12), 1)
        np.testing.assert_array_equal(process_logits(logits, args, history, penalties=True), logits)

    def test_neutral_rows_get_the_same_bits_whatever_the_switches(self):
        logits, history = some_logits(4), jnp.zeros((4, 16), jnp.int32)
        args = make_args(4, temperature=0.65)
        runs = [
            process_logits(logits, args, history, filters=filters, penalties=penalties)
            for filters in (False, True)
            for penalties in (False, True)
        ]
        for run in runs[1:]:
            np.testing.assert_array_equal(run, runs[0])

    def test_temperature_comes_before_top_p(self):
        logits = jnp.log(jnp.asarray([[0.6, 0.3, 0.1]]))
        kept = lambda t: (  # noqa: E731
            process_logits(logits, make_args(1, temperature=t, top_p=0.75)) > -jnp.inf
        ).sum()
        assert (kept(0.5), kept(1.0), kept(5.0)) == (1, 2, 3)

    def test_penalties_without_a_history_are_refused(self):
        with pytest.raises(ValueError, match="history"):
            process_logits(some_logits(1), make_args(1), penalties=True)

    def test_logits_that_are_not_float32_are_refused(self):
        with pytest.raises(ValueError, match="float32"):
            sample_tokens(some_logits(1).astype(jnp.bfloat16), make_args(1))


@dataclasses.dataclass(frozen=True)
class Setting:
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


SETTINGS = [
    Setting(),
    Setting(temperature=0.6),
    Setting(temperature=1.7, top_k=4),
    Setting(top_p=0.8),
    Setting(min_p=0.15),
    Setting(temperature=0.8, top_k=5, top_p=0.9, min_p=0.05),
]


class TestSampling:
    @pytest.mark.parametrize("setting", SETTINGS)
    def test_tokens_follow_the_processed_distribution(self, setting):
        draws, row = 20_000, some_logits(1, vocab=8, seed=4, scale=1.2)
        args = make_args(draws, **dataclasses.asdict(setting))
        logits = jnp.broadcast_to(row, (draws, 8))
        counts = np.bincount(sample_tokens(logits, args), minlength=8)
        probs = softmax(process_logits(logits[:1], make_args(1, **dataclasses.asdict(setting))))[0]
        assert not counts[probs == 0].any()
        likely = probs > 0
        expected = probs[likely] * draws
        assert likely.sum() == 1 or stats.chisquare(counts[likely], expected).pvalue > UNLIKELY

    @pytest.mark.parametrize("setting", SETTINGS)
    def test_sampling_logprobs_are_the_log_of_that_distribution(self, setting):
        args = make_args(3, **dataclasses.asdict(setting))
        logp = sampling_logprobs(some_logits(3), args)
        np.testing.assert_allclose(
            np.exp(logp), softmax(process_logits(some_logits(3), args)), rtol=1e-5, atol=1e-7
        )

    def test_temperature_zero_takes_the_argmax_of_the_penalised_logits(self):
        logits = jnp.asarray([[0.0, 3.0, 2.0, 2.5]] * 2)
        args = make_args(2, temperature=0, bias_ids=[[1, -1]] * 2, bias_values=[[-9, 0], [0, 0]])
        assert sample_tokens(logits, args).tolist() == [3, 1]
        args = args._replace(top_k=jnp.asarray([1, 1], jnp.int32))
        assert sample_tokens(logits, args).tolist() == [3, 1]

    def test_greedy_ties_go_to_the_lowest_id(self):
        logits = jnp.zeros((1, 300)).at[0, jnp.asarray([290, 17, 140])].set(1.0)
        args = make_args(1, temperature=0)
        assert sample_tokens(logits, args).tolist() == [17]
        one_hot = sampling_logprobs(logits, args)[0]
        assert (one_hot[17] == 0) & (jnp.isinf(one_hot).sum() == 299)

    def test_a_row_does_not_depend_on_its_neighbours(self):
        logits = some_logits(6, vocab=130)
        history = jnp.asarray(np.random.default_rng(1).integers(0, 130, (6, 20)), jnp.int32)
        args = make_args(
            6,
            temperature=np.array([0, 0.5, 1, 1, 2, 0.9]),
            top_k=[0, 5, 0, 9, 0, 0],
            top_p=np.array([1, 1, 0.7, 0.9, 1, 1]),
            frequency=np.array([0, 0, 0.5, 0, -1, 2]),
        )
        run = functools.partial(sample_tokens, filters=True, penalties=True)
        together = run(logits, args, history)
        for row in range(6):
            alone = jax.tree.map(lambda x, row=row: x[row : row + 1], (logits, args, history))
            assert run(*alone).tolist() == [together[row]]

    def test_the_position_and_the_seed_change_the_token(self):
        logits = jnp.zeros((400, 1000))
        same_seed = make_args(400, seed=np.zeros((400, 2)), position=np.arange(400))
        same_position = make_args(400, position=5)
        for args in (same_seed, same_position):
            assert len(np.unique(sample_tokens(logits, args))) > 300

    @pytest.mark.parametrize(
        ("row", "finite"),
        [
            ([0.0, 1.0, 2.0], True),
            ([-np.inf, 1.0, -np.inf], True),
            ([np.nan, 1.0, 2.0], False),
            ([0.0, -np.nan, -np.inf], False),
            ([0.0, np.inf, 2.0], False),
            ([-np.inf, -np.inf, -np.inf], False),
        ],
    )
    def test_rows_that_cannot_be_sampled_are_reported_alone(self, row, finite):
        logits = jnp.asarray([[1.0, 0.0, 0.0], row, [0.0, 0.0, 1.0]], jnp.float32)
        assert jax.jit(finite_rows)(logits).tolist() == [True, finite, True]
        args = make_args(3, temperature=[0, 1, 0], top_p=np.array([1, 0.9, 1]))
        tokens = sample_tokens(logits, args)
        assert tokens[jnp.asarray([0, 2])].tolist() == [0, 2]
        assert 0 <= int(tokens[1]) < 3  # still an index into the vocabulary

    def test_an_unknown_implementation_is_refused(self):
        with pytest.raises(ValueError, match="implementation='cuda'"):
            sample_tokens(some_logits(1), make_args(1), implementation="cuda")


class TestLogprobs:
    def test_processed_ones_are_of_the_tempered_unfiltered_logits(self):
        logits, tokens = some_logits(2), jnp.asarray([3, 30])
        args = make_args(
            2, temperature=[0.5, 0], top_k=1, bias_ids=[[3, -1]] * 2, bias_values=[[2, 0]] * 2
        )
        expected = np.log(softmax((np.array(logits) + 2 * (np.arange(40) == 3)) * [[2], [1]]))
        chosen, ids, values = token_logprobs(logits, tokens, args, top_n=4)
        np.testing.assert_allclose(chosen, expected[[0, 1], tokens], rtol=1e-4)
        best = np.argsort(-expected, -1)[:, :4]
        np.testing.assert_array_equal(ids, best)
        np.testing.assert_allclose(values, np.take_along_axis(expected, best, -1), rtol=1e-4)

    def test_raw_ones_are_of_the_untouched_logits(self):
        logits, tokens = some_logits(2), jnp.asarray([3, 30])
        args = make_args(
            2,
            temperature=0.5,
            raw_logprobs=[1, 0],
            repetition=1.3,
            bias_ids=[[3, -1]] * 2,
            bias_values=[[2, 0]] * 2,
        )
        history = jnp.full((2, 12), 7)
        chosen, _, _ = token_logprobs(logits, tokens, args, history, penalties=True)
        raw = np.log(softmax(logits))[[0, 1], tokens]
        np.testing.assert_allclose(chosen[0], raw[0], rtol=1e-5)
        assert abs(chosen[1] - raw[1]) > 0.1

    def test_without_top_n_nothing_is_ranked(self):
        chosen, ids, values = token_logprobs(some_logits(2), jnp.asarray([1, 2]), make_args(2))
        assert (chosen.shape, ids.shape, values.shape) == ((2,), (2, 0), (2, 0))


def test_everything_lowers_for_cuda():
    def everything(logits, args, history):
        tokens = sample_tokens(logits, args, history, filters=True, penalties=True)
        return (
            tokens,
            finite_rows(logits),
            sampling_logprobs(logits, args, history, penalties=True),
            token_logprobs(logits, tokens, args, history, top_n=5, penalties=True),
            uniform_noise(args.seed, args.position),
        )

    inputs = some_logits(4, vocab=1000), make_args(4), jnp.zeros((4, 64), jnp.int32)
    assert "stablehlo" in lower_for_cuda(everything, *inputs).as_text()


def test_sampling_alone_lowers_without_a_sort():
    inputs = some_logits(4, vocab=1000), make_args(4), jnp.zeros((4, 64), jnp.int32)
    text = lower_for_cuda(sample_tokens, *inputs, filters=True, penalties=True).as_text()
    assert "stablehlo.sort" not in text
    assert "top_k" not in text
