"""`select_positions`: exact, ties included, against a sort."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import select_positions
from pallas_kernels.select_positions import pallas_triton


def oracle(scores, candidates, count, k):
    scores = np.asarray(scores, np.float64)
    out = np.zeros((*scores.shape[:3], k), np.int32)
    for layer, row, head in np.ndindex(scores.shape[:3]):
        live = scores[layer, row, head, : candidates[row]]
        best_first = np.lexsort((-np.arange(len(live)), -live))
        chosen = np.sort(best_first[: count[row]])
        out[layer, row, head, : len(chosen)] = chosen
    return out


def make_inputs(seed, *, shape=(2, 3, 2, 50), k=20, dtype="float16", levels=None):
    """Scores that are all different, or of a few `levels` so that most are ties."""
    rng = np.random.default_rng(seed)
    scores = rng.random(shape) ** 8
    if levels:
        scores = np.floor(scores * levels) / levels
    scores[rng.random(shape) < 0.1] = -0.0
    candidates = rng.integers(0, shape[-1] + 1, shape[1])
    candidates[:1] = shape[-1]
    count = rng.integers(0, np.minimum(k, candidates) + 1)
    count[:2] = np.minimum(k, candidates)[:2]
    as_int = lambda x: jnp.asarray(x, jnp.int32)  # noqa: E731
    return jnp.asarray(scores, dtype), as_int(candidates), as_int(count)


@functools.lru_cache
def jitted(k, implementation):
    return jax.jit(functools.partial(select_positions, k=k, implementation=implementation))


def check(inputs, k, implementation):
    actual = jitted(k, implementation)(*inputs)
    assert actual.dtype == jnp.int32
    np.testing.assert_array_equal(actual, oracle(*map(np.asarray, inputs), k))


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 2**32 - 1),
    dtype=st.sampled_from(["float16", "bfloat16", "float32"]),
    levels=st.sampled_from([None, 1, 3, 20]),
    k=st.sampled_from([1, 20]),
)
def test_reference_is_the_oracle(seed, dtype, levels, k):
    check(make_inputs(seed, dtype=dtype, levels=levels, k=k), k, "xla")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("k", [1, 20])
def test_kernel_is_the_oracle(dtype, k):
    for seed, levels in enumerate([None, 1, 3]):
        check(make_inputs(seed, dtype=dtype, levels=levels, k=k), k, "pallas")


@pytest.mark.parametrize("levels", [None, 3])
def test_kernel_on_rows_of_several_blocks(levels):
    inputs = make_inputs(0, levels=levels)
    actual = pallas_triton.select_positions(*inputs, k=20, interpret=True, block=16)
    np.testing.assert_array_equal(actual, oracle(*map(np.asarray, inputs), 20))


@pytest.mark.parametrize("size", [1, 2, 31, 32, 33])
def test_sizes(size):
    check(make_inputs(0, shape=(1, 2, 1, size), k=size), size, "xla")


def test_lists_longer_than_the_context():
    check(make_inputs(0, shape=(1, 2, 1, 8), k=12), 12, "xla")
    check(make_inputs(0, shape=(1, 2, 1, 8), k=12), 12, "pallas")


def test_no_rows():
    scores, nobody = jnp.zeros((2, 0, 2, 8)), jnp.zeros((0,), jnp.int32)
    assert select_positions(scores, nobody, nobody, k=3).shape == (2, 0, 2, 3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scores": jnp.zeros((3, 2, 50))}, r"scores has shape \(3, 2, 50\)"),
        ({"scores": jnp.zeros((2, 3, 2, 50), jnp.int32)}, "scores is int32"),
        ({"candidates": jnp.zeros((2,), jnp.int32)}, r"candidates is int32\[2\]"),
        ({"count": jnp.zeros((3,))}, r"count is float32\[3\], but must be int32\[R\]"),
        ({"k": 0}, "k=0, but must be at least 1"),
    ],
)
def test_errors_name_the_argument(changes, message):
    scores, candidates, count = make_inputs(0)
    arguments = {"scores": scores, "candidates": candidates, "count": count, "k": 20} | changes
    with pytest.raises(ValueError, match=message):
        select_positions(**arguments)


@pytest.mark.gpu
@pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("size", [1000, 8192, 20000])
@pytest.mark.parametrize("levels", [None, 5])
def test_compiled_kernel(dtype, size, levels):
    check(make_inputs(0, shape=(3, 4, 8, size), k=410, dtype=dtype, levels=levels), 410, "pallas")
