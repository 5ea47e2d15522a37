"""The bench runs anywhere and writes complete rows."""

import json
import sys

import pytest

from pallas_kernels import bench
from pallas_kernels.shapes import H200, TINY
from pallas_kernels.timing import case_time

KEYS = {
    "op", "case", "shape", "k", "context", "variant", "time_us", "bytes", "floor_us",
    "share_of_floor", "device", "jax", "commit",
}  # fmt: skip


def test_rows(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(bench, "H200", TINY)
    monkeypatch.setattr(
        sys, "argv", ["bench", "append_kv", "--variants", "xla", "--json", str(tmp_path / "rows")]
    )
    bench.main()
    [row] = map(json.loads, (tmp_path / "rows").read_text().splitlines())
    assert set(row) == KEYS
    assert row["time_us"] > 0
    assert "device=" in capsys.readouterr().out.splitlines()[0]


@pytest.mark.parametrize("op", bench.OPS)
def test_every_case_can_be_timed(op):
    for case in TINY[op].values():
        assert case_time(case, "xla", n_calls=2, repeats=1) > 0


def test_unknown_op(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["bench", "attention"])
    with pytest.raises(SystemExit):
        bench.main()
    assert "unknown op 'attention'" in capsys.readouterr().err


def test_floors():
    """The verify rows of the mixed step read 14 x 8192 keys and values of 8 heads of 128."""
    assert H200["fused_attention"]["verify"].bytes() == 14 * 8192 * 8 * 128 * 2 * 2
