"""What `SamplingParams` accepts, how it normalises it, and what it refuses."""

import dataclasses
import math

import numpy as np
import pytest

from sparsespec_jax.sampling import SamplingParams, sample_seed, validate_for_model

INFINITY, NAN = math.inf, math.nan


def test_defaults_are_vllms():
    params = SamplingParams()
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (1.0, 0, 1.0, 0.0)
    assert (params.n, params.max_tokens, params.min_tokens, params.seed) == (1, None, 0, None)
    assert (params.stop, params.stop_token_ids, params.logit_bias) == ((), (), ())
    assert (params.logprobs, params.logprobs_mode) == (None, "processed")


@pytest.mark.parametrize(
    ("field", "given", "stored"),
    [
        ("top_k", -1, 0),
        ("temperature", 1, 1.0),
        ("temperature", np.float32(0.5), 0.5),
        ("top_k", np.int64(20), 20),
        ("stop", "end", ("end",)),
        ("stop", ["a", "b", "a"], ("a", "b")),
        ("stop", None, ()),
        ("stop_token_ids", [7, 2, 7], (7, 2)),
        ("logit_bias", {9: -100, 2: 1.5}, ((2, 1.5), (9, -100.0))),
        ("logit_bias", None, ()),
        ("seed", 2**64 - 1, 2**64 - 1),
        ("logprobs", 0, 0),
    ],
)
def test_values_are_normalised(field, given, stored):
    value = getattr(SamplingParams(**{field: given}), field)
    assert value == stored
    assert type(value) is type(stored)


@pytest.mark.parametrize(
    ("field", "values"),
    {
        "temperature": [-0.1, NAN, INFINITY, "1", True, None, 1e-7, 1e7],
        "top_k": [-2, 1.5, True, None, "5", 2**31],
        "top_p": [0.0, -0.5, 1.01, NAN, True, "0.9", 1e-9],
        "min_p": [-0.1, 1.1, NAN, False],
        "seed": [-1, 2**64, 1.0, True, "0"],
        "n": [0, -1, 1.0, True],
        "max_tokens": [0, -5, 1.5, True],
        "min_tokens": [-1, 0.5, False],
        "priority": [-1001, 1001, 0.5, True],
        "stop": ["", ["a", ""], 5, [5], b"end", [None]],
        "stop_token_ids": [[-1], [1.5], ["1"], 3, [True], list(range(17)), [2**31]],
        "ignore_eos": [1, None, "no"],
        "presence_penalty": [-2.5, 2.5, NAN, INFINITY, True],
        "frequency_penalty": [-2.5, 2.5, NAN, "0"],
        "repetition_penalty": [0.0, -1.0, NAN, INFINITY, True, 1e3],
        "logit_bias": [
            {1: 101.0},
            {1: -INFINITY},
            {1: NAN},
            {-1: 1.0},
            {"1": 1.0},
            {True: 1.0},
            {1: "x"},
            dict.fromkeys(range(65), 1.0),
            [1, 2],
            3,
        ],
        "logprobs": [-1, 21, True, 1.0],
        "logprobs_mode": ["logits", None, 1],
        "include_stop_str_in_output": [0, "yes"],
        "skip_special_tokens": [1, None],
    }.items(),
)
def test_what_cannot_be_honoured_raises_naming_the_field_and_the_rule(field, values):
    for value in values:
        with pytest.raises(ValueError, match=rf"^{field}=.* is not allowed: it must be "):
            SamplingParams(**{field: value})


def test_every_field_is_checked():
    """A field added without a check would be the one that is silently ignored."""
    checked = test_what_cannot_be_honoured_raises_naming_the_field_and_the_rule.pytestmark[0].args
    assert {field for field, _ in checked[1]} == {
        field.name for field in dataclasses.fields(SamplingParams)
    }


@pytest.mark.parametrize("option", ["guided_decoding", "best_of", "use_beam_search", "temprature"])
def test_options_that_are_not_offered_are_refused(option):
    with pytest.raises(TypeError, match=option):
        SamplingParams(**{option: 1})


def test_more_minimum_than_maximum_tokens_raises():
    with pytest.raises(ValueError, match=r"min_tokens=5 .* max_tokens=4"):
        SamplingParams(min_tokens=5, max_tokens=4)
    SamplingParams(min_tokens=5, max_tokens=5)


def test_it_is_immutable_and_usable_as_a_key():
    params = SamplingParams(logit_bias={3: 1.0}, stop=["x"])
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.temperature = 0.5
    assert len({params, SamplingParams(logit_bias={3: 1.0}, stop="x")}) == 1


def test_copies_keep_every_other_field():
    params = SamplingParams(logit_bias={3: 1.0}, top_k=4)
    assert params.with_seed(8) == SamplingParams(logit_bias={3: 1.0}, top_k=4, seed=8)
    with pytest.raises(ValueError, match="seed=-8"):
        params.with_seed(-8)


def test_it_tells_which_switches_the_step_needs():
    assert SamplingParams(temperature=0).greedy
    assert not SamplingParams(temperature=1e-6).greedy
    for changed in ({"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}):
        assert SamplingParams(**changed).uses_filters
        assert not SamplingParams(**changed, temperature=0).uses_filters
    for changed in ("presence_penalty", "frequency_penalty", "repetition_penalty"):
        assert SamplingParams(**{changed: 1.1}).uses_penalties
    assert not SamplingParams(logit_bias={1: 1.0}).uses_penalties


def test_completions_of_one_prompt_have_seeds_of_their_own():
    seeds = {sample_seed(seed, index) for seed in range(50) for index in range(50)}
    assert len(seeds) == 2500
    assert all(0 <= seed < 2**64 for seed in seeds)
    assert sample_seed(7, 0) == 7


def test_ids_the_model_does_not_have_are_refused():
    validate_for_model(SamplingParams(stop_token_ids=[9], logit_bias={9: 1.0}), 10)
    with pytest.raises(ValueError, match=r"stop_token_ids=\[10\].* 10"):
        validate_for_model(SamplingParams(stop_token_ids=[3, 10]), 10)
    with pytest.raises(ValueError, match=r"logit_bias=\[11, 12\].* 10"):
        validate_for_model(SamplingParams(logit_bias={12: 1.0, 11: 1.0, 2: 1.0}), 10)
