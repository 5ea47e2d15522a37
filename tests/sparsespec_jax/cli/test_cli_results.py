"""Output files: whole lines, in order if asked for, and fit to be resumed from."""

import contextlib
import json
import signal
from pathlib import Path

import pytest

from sparsespec_jax.cli.errors import CommandError
from sparsespec_jax.cli.interrupt import uninterrupted
from sparsespec_jax.cli.results import ResultFile

on_linux = pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full is Linux's")


def entry(job_id, index=0, **more) -> dict:
    return {"id": job_id, "index": index, "text": "t", **more}


def write(path: Path, *entries, order=(), **how) -> None:
    with contextlib.closing(ResultFile(path, **how).open()) as writer:
        writer.keep_order(order)
        for item in entries:
            writer.add(item)
        writer.flush()


def keys(path: Path) -> list[tuple]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [(line["id"], line["index"]) for line in lines]


def test_a_line_is_in_the_file_as_soon_as_it_is_added(tmp_path):
    path = tmp_path / "out.jsonl"
    writer = ResultFile(path).open()
    writer.add(entry("a", text="é\n", metadata={"half": "\ud800"}))
    assert path.read_bytes().count(b"\n") == 1
    assert json.loads(path.read_bytes()) == entry("a", text="é\n", metadata={"half": "\ud800"})
    writer.close()


def test_ordered_results_wait_for_those_before_them(tmp_path):
    path = tmp_path / "out.jsonl"
    writer = ResultFile(path).open()
    writer.keep_order([("a", 0), ("a", 1), ("b", 0)])
    writer.add(entry("b"))
    writer.add(entry("a", 1))
    assert keys(path) == []
    writer.add(entry("a", 0))
    assert keys(path) == [("a", 0), ("a", 1), ("b", 0)]
    writer.close()


def test_ordered_results_that_still_wait_at_the_end_are_written_too(tmp_path):
    order = [("a", 0), ("b", 0), ("c", 0)]
    write(tmp_path / "out.jsonl", entry("c"), entry("b"), order=order)
    assert keys(tmp_path / "out.jsonl") == [("b", 0), ("c", 0)]


def test_an_existing_file_is_not_touched_unless_that_is_asked_for(tmp_path):
    path = tmp_path / "out.jsonl"
    write(path, entry("a"))
    with pytest.raises(CommandError, match="is not empty: pass --resume or --overwrite"):
        ResultFile(path)
    ResultFile(path, overwrite=True)  # only opening it replaces it
    assert keys(path) == [("a", 0)]
    write(path, entry("b"), overwrite=True)
    assert keys(path) == [("b", 0)]


def test_resuming_knows_what_is_finished_and_appends(tmp_path):
    path = tmp_path / "out.jsonl"
    write(path, entry("a", 0), entry("a", 1), entry(1))
    file = ResultFile(path, resume=True)
    assert file.finished == {("a", 0), ("a", 1), (1, 0)}
    write(path, entry("b"), resume=True)
    assert keys(path) == [("a", 0), ("a", 1), (1, 0), ("b", 0)]


def test_resuming_without_a_file_starts_one(tmp_path):
    write(tmp_path / "out.jsonl", entry("a"), resume=True)
    assert keys(tmp_path / "out.jsonl") == [("a", 0)]


def test_resuming_drops_a_line_cut_short_and_failed_requests(tmp_path):
    path = tmp_path / "out.jsonl"
    write(path, entry("a"), entry("b", error="out of luck"), entry("c"))
    path.write_bytes(path.read_bytes() + b'{"id": "d", "ind')
    assert ResultFile(path, resume=True).finished == {("a", 0), ("c", 0)}
    write(path, entry("b"), resume=True)
    assert keys(path) == [("a", 0), ("c", 0), ("b", 0)]
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("line", ["{", "[]", '{"text": "t"}', '"id"'])
def test_resuming_from_something_else_is_an_error(tmp_path, line):
    path = tmp_path / "out.jsonl"
    path.write_text(json.dumps(entry("a")) + "\n" + line + "\n")
    with pytest.raises(CommandError, match=r"out.jsonl:2 is not a result of this command"):
        ResultFile(path, resume=True)


def test_a_place_that_cannot_hold_a_file_is_an_error_at_once(tmp_path):
    with pytest.raises(CommandError, match="there is no directory"):
        ResultFile(tmp_path / "nowhere" / "out.jsonl")
    with pytest.raises(CommandError, match="is a directory"):
        ResultFile(tmp_path)


@on_linux
def test_a_full_disk_is_an_error_of_its_own_kind():
    with pytest.raises(CommandError, match="cannot write /dev/full: No space left") as error:
        write(Path("/dev/full"), entry("a"))
    assert error.value.exit_code == 1


def test_ctrl_c_waits_until_a_line_is_written():
    assert interrupted(times=1) == ["half a line", "the other half"]


def test_a_second_ctrl_c_does_not_wait():
    assert interrupted(times=2) == ["half a line"]


def interrupted(times: int) -> list[str]:
    """What is written if Ctrl-C comes in the middle."""
    written = []
    try:
        with uninterrupted():
            written.append("half a line")
            for _ in range(times):
                signal.raise_signal(signal.SIGINT)
            written.append("the other half")
    except KeyboardInterrupt:
        return written
    raise AssertionError("the interrupt is lost")
