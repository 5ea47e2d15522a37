"""Launches cut in any way compute the same, lower for CUDA, and the script writes its rows."""

import functools
import json
import sys

import jax
import jax.numpy as jnp
import pytest

from benchmarks import attention_launches
from benchmarks.attention_launches import BASELINE, THREE, TOLERANCE, errors, layers, variants
from pallas_kernels.lowering import lower_for_cuda
from pallas_kernels.shapes import Attention

CASE = functools.partial(
    Attention, 512, n_drafts=3, selected=40, n_verify=2, n_queries=9, n_kv_heads=2, head_dim=64
)


def inputs(case):
    arrays, statics = case.inputs()
    return (arrays.pop("q"), arrays.pop("drafts"), arrays), statics


def test_variants_agree():
    """Also where drafts fill 4 of 64 rows, and with verify rows cut in shares."""
    case = CASE(scores=True)
    arrays, statics = inputs(case)
    results = {
        name: layers(attend, 1, statics)(*arrays)
        for name, attend in variants(case, interpret=True).items()
    }
    expected = results.pop(BASELINE)
    assert len(results) == 9
    for result in results.values():
        assert jnp.isfinite(result[0][0]).all()
        found = errors(case, result, expected)
        assert found.keys() == TOLERANCE.keys()
        for name, (error, largest) in found.items():
            assert error <= TOLERANCE[name] * largest


@pytest.mark.parametrize("scores", [False, True])
def test_they_lower_for_cuda(scores):
    case = CASE(scores=scores)
    arrays, statics = inputs(case)
    arrays = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arrays)
    for name, attend in variants(case, interpret=False).items():
        text = lower_for_cuda(layers(attend, 1, statics), *arrays).as_text()
        assert text.count("__gpu$xla.gpu.triton") == (3 if name == THREE else 2)


def test_rows(monkeypatch, tmp_path):
    def two(case, **how):
        return {name: variants(case, **how)[name] for name in (BASELINE, THREE)}

    monkeypatch.setattr(attention_launches, "variants", two)
    monkeypatch.setattr(sys, "argv", ["attention_launches", "--json", str(tmp_path / "rows")])
    attention_launches.main()
    rows = list(map(json.loads, (tmp_path / "rows").read_text().splitlines()))
    assert [row["case"] for row in rows] == ["mixed"] * 3 + ["mixed, scores"] * 3
    for row in rows:
        assert row["time_us"] > 0
        assert row["floor_us"] > 0
        assert {"variant", "ratio", "max_error", "device", "jax", "commit", "command"} <= set(row)
