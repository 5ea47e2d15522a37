"""The step's benchmark runs anywhere, and stays in the middle of its made-up run."""

import json
import sys

import numpy as np
import pytest

from benchmarks import step_time
from sparsespec_jax.engine.buckets import Buckets
from sparsespec_jax.engine.plan import Bucket


@pytest.mark.parametrize(("method", "devices"), [("pillar", 1), ("none", 1), ("pillar", 2)])
def test_a_row(method, devices, monkeypatch, tmp_path):
    command = (
        f"step_time --shape tiny --method {method} --batch 5 --context 40 --k 3 --slots 99"
        f" --tp {devices}"
        f" --steps 4 --windows 2 --json {tmp_path / 'rows'}"
    )
    monkeypatch.setattr(sys, "argv", command.split())
    step_time.main()
    [row] = map(json.loads, (tmp_path / "rows").read_text().splitlines())
    # Five rows in four phases: 5/4 verify 3 drafts in a step, the others draft.
    assert row["tokens_per_step"] == (5 if method == "none" else 5 * (4 + 3) / 4)
    assert row["tp"] == devices
    assert len(row["step_ms_windows"]) == 2
    for name in ("step_ms", "dispatch_ms", "kv_floor_ms", "matmul_floor_ms"):
        assert row[name] > 0


def test_each_row_drafts_k_times_and_verifies():
    buckets = Buckets(max_batch=7, max_context=64, k=2, chunk=1, prefill_rows=1)
    layout = buckets.layout(Bucket(7, 3, 0, 64))
    indices, verified = {row: [] for row in range(7)}, []
    for packed in step_time.cycle_of_plans(layout, batch=7, k=2):
        plan = layout.unpack(packed)
        for row, index in plan.drafts[plan.drafts[:, 0] != layout.trash_row]:
            indices[row].append(index)
        verified += plan.verifies[plan.verifies[:, 0] != layout.trash_row].tolist()
        assert not plan.chunks.size
    assert all(sorted(found) == [0, 1] for found in indices.values())
    np.testing.assert_array_equal(sorted(verified), [[row, 2] for row in range(7)])
