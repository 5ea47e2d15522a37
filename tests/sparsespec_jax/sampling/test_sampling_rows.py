"""Packing a request's parameters, and keeping them by batch row."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsespec_jax.sampling import (
    ROW_WORDS,
    RowSampling,
    SamplingParams,
    pack_row,
    sample_args,
    sample_history,
    scatter,
    unpack_rows,
)
from sparsespec_jax.sampling.rows import MAX_STOP

reals = lambda low, high: st.floats(low, high, allow_subnormal=False)  # noqa: E731
any_params = st.builds(
    SamplingParams,
    temperature=st.just(0.0) | reals(1e-3, 10.0),
    top_k=st.integers(-1, 2**31 - 1),
    top_p=reals(0.01, 1.0),
    min_p=st.just(0.0) | reals(0.001, 1.0),
    min_tokens=st.integers(0, 1000),
    stop_token_ids=st.lists(st.integers(0, 200_000), max_size=16),
    ignore_eos=st.booleans(),
    presence_penalty=reals(-2.0, 2.0),
    frequency_penalty=reals(-2.0, 2.0),
    repetition_penalty=reals(0.1, 3.0),
    logit_bias=st.dictionaries(st.integers(0, 200_000), reals(-100.0, 100.0), max_size=64),
    logprobs_mode=st.sampled_from(["processed", "raw"]),
)
unpack = jax.jit(unpack_rows)


def listed(ids):
    return [token for token in ids.tolist() if token >= 0]


@settings(max_examples=80, deadline=None, derandomize=True)
@given(
    any_params,
    st.integers(0, 2**64 - 1),
    st.integers(1, 2**20),
    st.lists(st.integers(0, 200_000), max_size=8),
)
def test_a_packed_row_unpacks_to_what_the_request_asked_for(params, seed, prompt_length, eos_ids):
    words = pack_row(params, seed, prompt_length, tuple(eos_ids))
    assert (words.shape, words.dtype) == ((ROW_WORDS,), np.int32)
    row = jax.tree.map(lambda x: np.asarray(x[0]), unpack(words[None]))

    scalars = (row.temperature, row.top_p, row.min_p, row.presence, row.frequency, row.repetition)
    expected = (
        params.temperature,
        params.top_p,
        params.min_p,
        params.presence_penalty,
        params.frequency_penalty,
        params.repetition_penalty,
    )
    assert scalars == tuple(np.float32(value) for value in expected)
    assert (row.top_k, row.raw_logprobs) == (params.top_k, params.logprobs_mode == "raw")
    assert int(row.seed[0]) + (int(row.seed[1]) << 32) == seed
    assert (row.prompt_length, row.min_length) == (prompt_length, prompt_length + params.min_tokens)
    withheld = {*params.stop_token_ids, *eos_ids}
    assert set(listed(row.withheld_ids)) == withheld
    assert set(listed(row.stop_ids)) == (
        set(params.stop_token_ids) if params.ignore_eos else withheld
    )
    n_bias = len(params.logit_bias)
    pairs = zip(row.bias_ids[:n_bias].tolist(), row.bias_values[:n_bias], strict=True)
    assert tuple(pairs) == tuple((token, np.float32(v)) for token, v in params.logit_bias)
    assert (row.bias_ids[n_bias:] == -1).all()


def test_ignored_eos_is_still_withheld_by_min_tokens():
    words = pack_row(SamplingParams(ignore_eos=True, min_tokens=3, stop_token_ids=[5]), 0, 2, (1,))
    row = unpack_rows(jnp.asarray(words[None]))
    assert listed(row.stop_ids[0]) == [5]
    assert listed(row.withheld_ids[0]) == [5, 1]


def test_too_many_stop_ids_in_total_raise():
    params = SamplingParams(stop_token_ids=range(16))
    pack_row(params, 0, 1, tuple(range(100, 100 + MAX_STOP - 16)))
    with pytest.raises(ValueError, match=rf"{MAX_STOP + 1} stop ids .* at most {MAX_STOP}"):
        pack_row(params, 0, 1, tuple(range(100, 101 + MAX_STOP - 16)))


@pytest.mark.parametrize("bad", [{"seed": -1}, {"seed": 2**64}, {"prompt_length": 0}])
def test_values_outside_their_words_raise(bad):
    with pytest.raises(ValueError, match=f"{next(iter(bad))}=.* is not allowed"):
        pack_row(SamplingParams(), **{"seed": 0, "prompt_length": 1, "eos_ids": (), **bad})


def test_admissions_replace_their_rows_and_padding_goes_to_the_trash_row():
    state = RowSampling.zeros(5)
    admitted = [pack_row(SamplingParams(temperature=t), 1, 3, ()) for t in (0.25, 0.5, 2.0, 2.0)]
    rows = jnp.asarray([2, 0, 4, 4])
    state = jax.jit(scatter, donate_argnums=0)(state, rows, unpack_rows(jnp.stack(admitted)))
    assert state.temperature.tolist() == [0.5, 0.0, 0.25, 0.0, 2.0]
    assert state.prompt_length.tolist() == [3, 1, 3, 1, 3]


def test_rows_before_any_admission_are_greedy_and_change_nothing():
    state = RowSampling.zeros(2)
    assert state.seed.dtype == jnp.uint32
    neutral = (state.temperature, state.top_k, state.top_p, state.min_p, state.repetition)
    assert [value.tolist() for value in neutral] == [[0, 0], [0, 0], [1, 1], [0, 0], [1, 1]]
    for ids in (state.stop_ids, state.withheld_ids, state.bias_ids):
        assert (ids == -1).all()


def test_sample_rows_take_their_batch_rows_parameters_and_sample_the_next_position():
    words = [pack_row(SamplingParams(top_k=k), k, k, ()) for k in (1, 2, 3)]
    args = sample_args(
        unpack_rows(jnp.stack(words)), jnp.asarray([2, 0, 2]), jnp.asarray([9, 4, 8])
    )
    assert args.position.tolist() == [10, 5, 9]
    assert args.top_k.tolist() == [3, 1, 3]
    assert args.seed[:, 0].tolist() == [3, 1, 3]
    assert args.bias_ids.shape == (3, 64)


def test_the_history_of_a_sample_row_is_its_batch_rows():
    tokens = jnp.arange(12).reshape(3, 4)
    assert sample_history(tokens, jnp.asarray([1, 1, 0])).tolist() == [
        [4, 5, 6, 7],
        [4, 5, 6, 7],
        [0, 1, 2, 3],
    ]
