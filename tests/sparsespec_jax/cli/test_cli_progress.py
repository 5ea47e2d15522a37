"""The progress line, on terminals and elsewhere."""

import os
import sys
import time
from types import SimpleNamespace

import pytest

from sparsespec_jax import StreamOutput
from sparsespec_jax.cli import progress

termios = pytest.importorskip("termios")


def show(file, monkeypatch: pytest.MonkeyPatch) -> None:
    """The progress of one request of two, whose first cycle accepts two drafts."""
    monkeypatch.setattr(sys, "stderr", file)
    monkeypatch.setattr(progress, "_REFRESH", 0.01)
    monkeypatch.setattr(progress, "_PLAIN_REFRESH", 0.01)
    stats = SimpleNamespace(running=1, slots_used=5, slots=10)
    with progress.Progress(2, lambda: stats) as shown:
        shown.update(StreamOutput(0, 0, "", (1,)))
        shown.update(StreamOutput(0, 0, "", (1, 2, 3), completion=object()))
        time.sleep(0.2)


@pytest.mark.parametrize("columns", [100, 0])
def test_a_bar_on_a_terminal_and_lines_on_one_of_unknown_width(columns, monkeypatch):
    reader, writer = os.openpty()
    termios.tcsetwinsize(writer, (40, columns))
    with os.fdopen(writer, "w") as terminal:
        show(terminal, monkeypatch)
        text = os.read(reader, 100_000).decode()
    os.close(reader)
    assert "tok/s, 2.00 accepted per verify, KV 50%" in text
    assert ("requests: 1/2 |" in text) == (columns > 0)
    assert ("1/2 requests, " in text) == (columns == 0)
