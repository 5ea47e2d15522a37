"""`benchmarks.all_reduce` runs: what every formulation returns is what a chain should."""

import json
import os
import subprocess
import sys

CASES = ["none", "psum", "permute", "gather", "scatter", "words"]
FUSED = ["none_add_norm", "psum_add_norm"]


def test_formulations_on_cpus(tmp_path):
    path = tmp_path / "rows.jsonl"
    env = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
        "PYTHONPATH": ".",
    }
    command = [sys.executable, "-m", "benchmarks.all_reduce", "--quiet", "--json", str(path)]
    command += ["--rows", "8", "--hidden", "64", "--calls", "3", "--repeats", "1"]
    command += ["--cases", *CASES, *FUSED]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    rows = {row["case"]: row for row in map(json.loads, path.read_text().splitlines())}
    assert list(rows) == CASES + FUSED
    assert "AttributeError" in rows.pop("words")["failed"]  # there are no peers
    for row in rows.values():
        assert row["chain_error"] < 1e-2, row
        assert row["repeatable"], row
        assert row.get("error", 0) < 1e-2, row
        assert row.get("same_bits", True), row
        assert "us_alone" in row, row
