"""Configurations: allowed values, and refusals that name field, value and choices."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from sparsespec_jax.config import EngineConfig, SpeculationConfig

_NAN = float("nan")
_BAD = {
    SpeculationConfig: {
        "method": (["eagle", "", None, "PILLAR", 1], "pillar, none"),
        "k": ([0, -1, 16, 2.0, "4", None, True], "an integer from 1 to 15 or `auto`"),
        "sparsity": (
            [0, 0.0, -0.1, 1.1, _NAN, math.inf, "0.1", None, True],
            r"a number in \(0.0, 1.0\] or `auto`",
        ),
        "min_budget": ([0, -5, 1.5, None, True], "an integer at least 1"),
        "score_rule": (["best", None], "paper"),
        "verification": (["greedy", None], "coupled, rejection"),
    },
    EngineConfig: {
        "tensor_parallel_size": ([0, -1, 2.0, None, True, "2"], "an integer at least 1"),
        "max_batch": ([0, -1, 4097, 1.0, None, True], "an integer from 1 to 4096"),
        "max_context": ([0, 1, -5, 100.0, "8k", True], "an integer at least 2"),
        "kv_cache_memory": (
            [0, -1, 0.0, 1.0, 1.5, -0.1, _NAN, 2e9, "1GB", True],
            r"a fraction in \(0, 1\) or a positive number of bytes",
        ),
        "max_host_kv_bytes": ([-1, 0.5, 2e9, "1GB", True], "an integer at least 0"),
        "kv_policy": (["oracle", "Aggressive", None, 1], "aggressive, conservative, recompute"),
        "phases": (["even", None, 0], "balanced, random, lockstep"),
        "dtype": (["fp8", "bf16", None, 16], "auto, float32, bfloat16, float16"),
        "prefill_chunk": ([0, -1, 1.5, "8", True], "an integer at least 1"),
        "prefill_rows": ([0, -1, 1.5, "8", True], "an integer at least 1"),
        "overlap": (["async", None], "resident, delayed, sync"),
        "implementation": (["cuda", None], "auto, pallas, xla"),
        "batch_buckets": (
            [(), (0,), (-1, 2), (4, 2), (2, 2), (1.0,), ("1",), 4, "14", (1, None), (True, 2)],
            "increasing positive integers",
        ),
        "context_buckets": ([(), (256, 128), 128, (128, "256")], "increasing positive integers"),
        "seed": ([-1, 2**64, 0.5, "0", True], f"an integer from 0 to {2**64 - 1}"),
    },
}
_CASES = [
    pytest.param(config, field, value, allowed, id=f"{field}={value!r}")
    for config, fields in _BAD.items()
    for field, (values, allowed) in fields.items()
    for value in values
]


@pytest.mark.parametrize(("config", "field", "value", "allowed"), _CASES)
def test_a_bad_value_is_refused_by_field_value_and_what_is_allowed(config, field, value, allowed):
    with pytest.raises(ValueError, match=allowed) as error:
        config(**{field: value})
    assert str(error.value).startswith(f"{field} must be ")
    assert str(error.value).endswith(f"got {value!r}")


@pytest.mark.parametrize("config", [SpeculationConfig, EngineConfig])
def test_every_field_but_free_text_is_checked(config):
    fields = {field.name for field in dataclasses.fields(config)}
    assert fields - _BAD[config].keys() <= {"compilation_cache_dir"}


@pytest.mark.parametrize("config", [SpeculationConfig, EngineConfig])
def test_the_defaults_are_valid_and_configurations_are_values(config):
    assert config() == config()
    assert hash(config()) == hash(config())
    field = dataclasses.fields(config)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(config(), field, 1)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_batch", 1),
        ("max_batch", 4096),
        ("max_context", 2),
        ("kv_cache_memory", 0.5),
        ("kv_cache_memory", 1),
        ("max_host_kv_bytes", None),
        ("max_host_kv_bytes", 0),
        ("max_host_kv_bytes", 2**40),
        ("kv_policy", "aggressive"),
        ("kv_policy", "conservative"),
        ("kv_policy", "recompute"),
        ("phases", "balanced"),
        ("phases", "random"),
        ("phases", "lockstep"),
        ("prefill_chunk", 1),
        ("batch_buckets", (1, 8, 64)),
        ("batch_buckets", [1, 8, 64]),
        ("context_buckets", (100,)),
        ("seed", 0),
        ("seed", 2**64 - 1),
        ("overlap", "sync"),
        ("overlap", "delayed"),
    ],
)
def test_values_at_the_edges_are_allowed(field, value):
    assert getattr(EngineConfig(**{field: value}), field) == value


def test_replacing_a_field_checks_it():
    with pytest.raises(ValueError, match="k must be an integer from 1 to 15 or `auto`, got 99"):
        dataclasses.replace(SpeculationConfig(), k=99)


def test_the_budget_is_a_share_of_the_context_but_at_least_the_minimum_and_at_most_all():
    speculation = SpeculationConfig(sparsity=0.05, min_budget=128)
    assert speculation.budget(50) == 50
    assert speculation.budget(1000) == 128
    assert speculation.budget(10_010) == 501
    assert SpeculationConfig(sparsity=1.0).budget(3000) == 3000
    budgets = [speculation.budget(length) for length in np.arange(1, 9000, 7).tolist()]
    assert budgets == sorted(budgets)


def test_what_is_left_to_the_engine_has_candidates_and_what_is_not_has_one():
    auto = SpeculationConfig(k="auto", sparsity="auto")
    assert (auto.ks, auto.sparsities) == ((8, 4, 2, 0), (0.05, 0.025, 0.1))
    assert [auto.budget(10_000, sparsity) for sparsity in range(3)] == [500, 250, 1000]
    paper = SpeculationConfig()
    assert (paper.ks, paper.sparsities) == ((8,), (0.05,))
    assert SpeculationConfig(k=4, sparsity="auto").ks == (4,)
    plain = SpeculationConfig(method="none", k="auto", sparsity="auto")
    assert (plain.ks, plain.sparsities) == ((0,), (0.05,))
