"""The kernel of the sampler op takes the very tokens that the reference takes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_sample_tokens import make_args, seeds_of, some_logits

from pallas_kernels.lowering import lower_for_cuda
from pallas_kernels.sample_tokens import (
    api,
    best_in_shard,
    bounds,
    merge_shards,
    noise,
    pallas_triton,
    reference,
    sample,
)
from pallas_kernels.sample_tokens.changes import Changes
from pallas_kernels.sample_tokens.tiles import Tiles

TRITON_CALL = "__gpu$xla.gpu.triton"
ROWS = 12
# Several of everything; lists overflow.
SMALL = Tiles(part=16, lanes=4, chunk=16, group=4, listed=4, stream=32)
fuzz = settings(max_examples=30, deadline=None, derandomize=True)


@functools.partial(jax.jit, static_argnames=("filters", "tiles"))
def kernel(logits, args, filters=True, tiles=SMALL):
    changes, start = Changes.of(args), jnp.int32(0)
    run = pallas_triton.best_tokens
    return run(logits, args, changes, start, filters=filters, interpret=True, tiles=tiles)


@functools.partial(jax.jit, static_argnames="filters")
def oracle(logits, args, filters=True):
    return reference.best_tokens(logits, args, None, filters=filters, penalties=False)


def check(logits, args, **options):
    actual = kernel(logits, args, **options)
    expected = oracle(logits, args, filters=options.get("filters", True))
    np.testing.assert_array_equal(actual.token, expected.token)
    np.testing.assert_allclose(actual.score, expected.score, rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(jnp.isfinite(actual.peak), jnp.isfinite(expected.peak))


def random_logits(rng, rows, vocab, levels):
    logits = rng.normal(size=(rows, vocab)) * rng.choice([0.1, 1, 6], (rows, 1))
    if levels:  # ties
        logits = np.round(logits * levels) / levels
    logits[rng.random((rows, vocab)) < rng.choice([0, 0.5])] = -np.inf
    logits[:, rng.integers(vocab)] = 0.5
    return jnp.asarray(logits, jnp.float32)


def random_args(rng, rows, vocab):
    """Every parameter on in some rows and off in others."""

    def some(*values):
        return rng.choice(np.asarray(values), rows)

    biased = np.stack([rng.choice(vocab, 3, replace=False) for _ in range(rows)])
    return make_args(
        rows,
        position=rng.integers(1, 100, rows),
        seed=rng.integers(0, 2**32, (rows, 2)),
        temperature=some(0, 0.01, 0.6, 1, 2.5),
        top_k=some(0, 0, 1, 3, 20, vocab, vocab + 9),
        top_p=some(1, 1, 1e-3, 0.5, 0.95),
        min_p=some(0, 0, 0.02, 0.5, 1),
        min_length=rng.integers(0, 100, rows),
        withheld_ids=rng.integers(-1, vocab, (rows, 3)),
        bias_ids=np.where(rng.random((rows, 3)) < 0.5, biased, -1),
        bias_values=rng.normal(size=(rows, 3)).astype(np.float32) * 4,
    )


@fuzz
@given(
    seed=st.integers(0, 2**32 - 1),
    levels=st.sampled_from([0, 1, 2]),
    vocab=st.sampled_from([9, 64, 75]),
    filters=st.booleans(),
)
def test_tokens_are_those_of_the_reference(seed, levels, vocab, filters):
    rng = np.random.default_rng(seed)
    logits, args = random_logits(rng, ROWS, vocab, levels), random_args(rng, ROWS, vocab)
    check(logits, args, filters=filters)


@pytest.mark.parametrize("tiles", [Tiles(), SMALL._replace(listed=16), SMALL._replace(chunk=4)])
def test_tokens_do_not_depend_on_the_tiles(tiles):
    rng = np.random.default_rng(7)
    logits, args = random_logits(rng, ROWS, 75, 2), random_args(rng, ROWS, 75)
    check(logits, args, tiles=tiles)


@pytest.mark.parametrize("filters", [False, True])
def test_a_long_vocabulary_with_the_real_tiles(filters):
    rng = np.random.default_rng(3)
    logits, args = random_logits(rng, 4, 20_001, 0), random_args(rng, 4, 20_001)
    args = args._replace(
        top_k=jnp.asarray([0, 20, 3000, 0], jnp.int32), top_p=jnp.asarray([0.95, 0.95, 0.9, 1.0])
    )
    check(logits, args, filters=filters, tiles=Tiles())


def test_bounds_of_scores():
    """At every magnitude of the hash and of its complement."""
    powers = 2 ** np.arange(32, dtype=np.uint64)
    near = np.concatenate([powers, 2**32 - powers, np.arange(0, 2**32, 2**17)])
    bits = np.concatenate([near + i for i in (-1, 0, 1)]) % 2**32
    bits = jnp.asarray(bits[bits > 0].astype(np.uint32))
    logits = jnp.linspace(-15, 15, bits.size, dtype=jnp.float32)
    base_2, shift = np.log2(np.e), jnp.float32(-25)
    odds = jax.jit(functools.partial(bounds.odds_of, interpret=True))
    bound = np.log2(odds(logits, bits, jnp.float32(base_2 / 0.7), shift)) + 32 - shift
    noise_of = noise.gumbel(noise.fold(bits))
    exact = (np.asarray(logits, np.float64) / np.float32(0.7) + noise_of) * base_2
    margin = bounds.margin(jnp.float32(0))
    assert (exact - bound).max() < margin / 20
    likely = (bits > 2**16) & (bits < 2**24)  # where the best of many tokens is
    assert np.abs(exact - bound)[likely].max() < margin / 20


def test_the_best_token_is_not_in_the_part_of_the_highest_bound():
    """Two tokens share nearly all mass; bounds are loose where there is much of it for each."""
    n = 2000
    args = make_args(n, seed=seeds_of(*[3] * n), position=np.arange(n))
    ids, own = jnp.asarray([7, 40], jnp.uint32), jnp.asarray([0.0, 1.0])
    key0, key1 = noise.row_key(args.seed, args.position, noise.SAMPLE_STREAM)
    bits = noise.token_bits(ids, key0[:, None], key1[:, None])
    bound = own + jnp.log(1 / noise.unit(bits) - 0.5)
    loose = np.asarray(bound.argmax(1) != (own + noise.gumbel(bits)).argmax(1))
    assert loose.sum() > 5
    logits = jnp.full((loose.sum(), 75), -30.0).at[:, ids].set(own)
    check(logits, jax.tree.map(lambda x: x[loose], args), filters=False)


@pytest.mark.parametrize("highest", [1e4, 1e9])
def test_scores_that_round_to_a_tie_go_to_the_lowest_id(highest):
    """Noise is below the rounding of such logits; equal ones are in every chunk."""
    logits = jnp.zeros((2, 75)).at[:, jnp.asarray([70, 5, 33])].set(highest)
    args = make_args(2, temperature=[1e-5, 0])
    check(logits, args, filters=False)
    assert kernel(logits, args, filters=False).token[1] == 5


@pytest.mark.parametrize("filters", [False, True])
def test_rows_that_cannot_be_sampled(filters):
    logits = np.array(some_logits(6, vocab=75))
    logits[1, 40] = np.nan
    logits[2, 3] = np.inf
    logits[3] = -np.inf
    logits[4] = np.nan
    logits[5, [0, 70]] = -np.nan, np.inf
    args = make_args(6, temperature=[1, 1, 0.5, 1, 1, 2], top_p=np.float32(0.9), top_k=30)
    best = kernel(jnp.asarray(logits), args, filters=filters)
    assert jnp.isfinite(best.peak).tolist() == [True, False, False, False, False, False]
    assert ((best.token >= 0) & (best.token < 75)).all()
    assert best.token[0] == oracle(jnp.asarray(logits), args, filters=filters).token[0]


def test_a_masked_row_is_finite_by_its_own_logits():
    logits = jnp.full((1, 75), -jnp.inf).at[0, 20].set(1.0)
    args = make_args(1, min_length=99, withheld_ids=[[20, -1, -1]])
    check(logits, args, filters=False)


@pytest.mark.parametrize("implementation", ["xla", "pallas"])
def test_rows_at_negative_positions_are_skipped(implementation):
    logits, args = some_logits(3), make_args(3, position=[4, -1, 6])
    run = functools.partial(sample, filters=False, implementation=implementation)
    result = jax.jit(run)(logits, args)
    assert result.token[1] == 0
    assert result.finite.tolist() == [True, False, True]
    assert result.token[2] == oracle(logits, args, filters=False).token[2]


def test_no_rows():
    logits, args = some_logits(2)[:0], jax.tree.map(lambda x: x[:0], make_args(2))
    assert sample(logits, args, implementation="pallas").token.shape == (0,)
    assert sample(logits, args, implementation="xla").finite.shape == (0,)


def test_without_lists_of_ids():
    args = make_args(3)
    nothing = {
        name: getattr(args, name)[:, :0] for name in ("bias_ids", "bias_values", "withheld_ids")
    }
    check(some_logits(3, vocab=75), args._replace(**nothing), filters=False)


def test_penalties():
    logits = some_logits(4, vocab=75).at[1, 3].set(jnp.nan)
    history = jnp.asarray(np.random.default_rng(0).integers(0, 75, (4, 16)), jnp.int32)
    args = make_args(
        4, repetition=1.5, frequency=0.3, presence=0.2, bias_ids=[[1, -1]] * 4,
        bias_values=np.full((4, 2), 5), position=[9, 9, 9, -1],
    )  # fmt: skip
    run = jax.jit(
        functools.partial(sample, filters=False, penalties=True), static_argnames="implementation"
    )
    actual, expected = (run(logits, args, history, implementation=i) for i in ("pallas", "xla"))
    assert actual.finite.tolist() == expected.finite.tolist() == [True, False, True, False]
    np.testing.assert_array_equal(actual.token[::2], expected.token[::2])


@pytest.mark.parametrize("implementation", ["xla", "pallas"])
@pytest.mark.parametrize("shards", [1, 3])
def test_shards_of_the_vocabulary(implementation, shards):
    rng = np.random.default_rng(1)
    logits, args = random_logits(rng, ROWS, 75, 1), random_args(rng, ROWS, 75)
    logits = logits.at[2, 60].set(jnp.nan)
    run = jax.jit(functools.partial(best_in_shard, implementation=implementation))
    size = 75 // shards
    parts = [run(logits[:, at : at + size], args, at) for at in range(0, 75, size)]
    merged = merge_shards(jax.tree.map(lambda *x: jnp.stack(x), *parts))
    expected = sample(logits, args, filters=False, implementation="xla")
    np.testing.assert_array_equal(merged.finite, expected.finite)
    np.testing.assert_array_equal(merged.token[expected.finite], expected.token[expected.finite])


@pytest.mark.parametrize("start", [16, 17, 40])
def test_a_shard_of_several_parts(start):
    """Its parts may or may not begin at multiples of their size."""
    rng = np.random.default_rng(4)
    logits, args = random_logits(rng, ROWS, 115, 1), random_args(rng, ROWS, 115)
    logits = logits[:, start:]
    run = functools.partial(pallas_triton.best_tokens, filters=False, interpret=True, tiles=SMALL)
    actual = run(logits, args, Changes.of(args), jnp.int32(start))
    expected = best_in_shard(logits, args, start, implementation="xla")
    np.testing.assert_array_equal(actual.token, expected.token)
    np.testing.assert_allclose(actual.score, expected.score, rtol=1e-6, atol=1e-6)


def test_logprobs_of_some_rows():
    rng = np.random.default_rng(2)
    rows = jnp.asarray([4, 0, 4, 2], jnp.int32)
    logits, args = random_logits(rng, ROWS, 75, 0), random_args(rng, 4, 75)
    args = args._replace(raw_logprobs=jnp.asarray([0, 0, 1, 1], jnp.int32))
    tokens = jnp.asarray([7, 74, 0, 30], jnp.int32)
    run = jax.jit(api.token_logprobs, static_argnames=("implementation", "top_n"))
    run = functools.partial(run, logits, tokens, args, rows=rows)
    actual, ids, values = run(implementation="pallas")
    expected, *_ = run(implementation="xla")
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)
    assert ids.shape == values.shape == (4, 0)
    chosen, ids, _ = run(implementation="pallas", top_n=2)
    np.testing.assert_allclose(chosen, expected, rtol=1e-5)
    assert ids.shape == (4, 2)


@pytest.mark.parametrize("vocab", [40, 1000, 151_936])
@pytest.mark.parametrize("filters", [False, True])
def test_it_lowers_for_cuda(vocab, filters):
    args = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), make_args(5))
    logits = jax.ShapeDtypeStruct((5, vocab), jnp.float32)
    run = functools.partial(sample, filters=filters, implementation="pallas", interpret=False)
    assert lower_for_cuda(run, logits, args).as_text().count(TRITON_CALL) == 2 + filters


def test_logprobs_lower_for_cuda():
    args = make_args(4)
    rows = jnp.asarray([0, 1, 3, 4], jnp.int32)
    run = functools.partial(api.token_logprobs, implementation="pallas", interpret=False)
    text = lower_for_cuda(run, some_logits(5, vocab=1000), rows, args, rows=rows).as_text()
    assert text.count(TRITON_CALL) == 1


gpu = pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs an NVIDIA GPU")


def spread(rng, rows, vocab):
    """Rows from nearly flat to nearly certain."""
    scale = rng.uniform(0.2, 4, (rows, 1)).astype(np.float32)
    return jnp.asarray(rng.standard_normal((rows, vocab), np.float32) * scale)


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("filters", [False, True])
@pytest.mark.parametrize("vocab", [1000, 128_256, 151_936])
def test_compiled_kernel(vocab, filters):
    rng = np.random.default_rng(0)
    logits, args = spread(rng, 248, vocab), random_args(rng, 248, vocab)
    run = functools.partial(jax.jit, static_argnames=("filters", "implementation"))(sample)
    expected = run(logits, args, filters=filters, implementation="xla")
    actual = run(logits, args, filters=filters, implementation="pallas")
    np.testing.assert_array_equal(actual.finite, expected.finite)
    # top_p may be decided by the rounding of sums.
    assert (actual.token != expected.token).sum() <= filters


@pytest.mark.gpu
@gpu
def test_compiled_kernel_samples_many_positions_of_a_flat_row_like_the_reference():
    """Nearly flat rows leave the choice to the noise, over all of its range."""
    logits = jnp.asarray(np.random.default_rng(1).normal(size=(1, 32_000)) * 0.01, jnp.float32)
    logits = jnp.broadcast_to(logits, (2000, 32_000))
    args = make_args(2000, seed=seeds_of(*[3] * 2000), position=np.arange(1, 2001))
    run = functools.partial(jax.jit, static_argnames=("filters", "implementation"))(sample)
    tokens = [run(logits, args, filters=False, implementation=i).token for i in ("xla", "pallas")]
    np.testing.assert_array_equal(*tokens)


@pytest.mark.gpu
@gpu
def test_compiled_logprobs():
    rng = np.random.default_rng(2)
    logits, args = spread(rng, 248, 151_936), random_args(rng, 135, 151_936)
    rows, tokens = (jnp.asarray(rng.integers(0, n, 135), jnp.int32) for n in (248, 151_936))
    run = jax.jit(api.token_logprobs, static_argnames="implementation")
    expected, *_ = run(logits, tokens, args, rows=rows, implementation="xla")
    actual, *_ = run(logits, tokens, args, rows=rows, implementation="pallas")
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-4)
