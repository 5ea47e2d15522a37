"""Results as JSONL, one line per finished sample, and resuming from such a file."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from sparsespec_jax.cli.errors import FAILED, CommandError
from sparsespec_jax.cli.interrupt import uninterrupted
from sparsespec_jax.cli.jobs import Job, Key

if TYPE_CHECKING:
    from sparsespec_jax.engine.request import RequestStats
    from sparsespec_jax.outputs import Completion


def result(job: Job, index: int, completion: Completion) -> dict[str, Any]:
    """What the output says about sample `index` of `job`."""
    entry: dict[str, Any] = {"id": job.id, "index": index}
    if job.metadata:
        entry["metadata"] = job.metadata
    entry |= {
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
    }
    if completion.error is not None:
        entry["error"] = str(completion.error) or type(completion.error).__name__
    if completion.logprobs is not None:
        entry["logprobs"] = [
            {"logprob": token.logprob, "top": token.top} for token in completion.logprobs
        ]
    if completion.stats is not None:
        entry["usage"] = {
            "prompt_tokens": completion.stats.prompt_tokens,
            "completion_tokens": len(completion.token_ids),
        }
        entry["stats"] = _stats(completion.stats)
    return entry


def _stats(stats: RequestStats) -> dict[str, Any]:
    """Times in seconds since the request was submitted, and how its drafts fared."""

    def since_submission(moment: float | None) -> float | None:
        return None if moment is None else round(moment - stats.submitted, 6)

    return {
        "queue_time": since_submission(stats.admitted),
        "ttft": since_submission(stats.first_token),
        "time": since_submission(stats.finished or time.monotonic()),
        "cycles": stats.cycles,
        "mean_accepted": stats.mean_accepted,
        "drafted_at": [] if stats.drafted_at is None else stats.drafted_at.tolist(),
        "accepted_at": [] if stats.accepted_at is None else stats.accepted_at.tolist(),
    }


class ResultFile:
    """A JSONL file of results that may exist already.

    Opening it is left to `open`, so that a run that cannot start leaves the old file as it was.
    """

    def __init__(self, path: str | Path, *, resume: bool = False, overwrite: bool = False):
        """Check that `path` can be written.

        With `resume`, `finished` says what it already holds.
        """
        self.path = Path(path)
        self.finished: set[Key] = set()
        self._kept: bytes | None = None  # with which to replace the file
        self._mode = "ab" if resume else "wb"
        if not self.path.parent.is_dir():
            raise CommandError(f"--output: there is no directory {self.path.parent}")
        if self.path.is_dir():
            raise CommandError(f"--output: {self.path} is a directory")
        if self.path.is_file() and self.path.stat().st_size:
            if resume:
                self._read()
            elif not overwrite:
                raise CommandError(f"{self.path} is not empty: pass --resume or --overwrite")

    def is_same(self, other: str | Path) -> bool:
        return self.path.exists() and Path(other).exists() and self.path.samefile(other)

    def open(self) -> ResultWriter:
        """Start writing."""
        try:
            if self._kept is not None:
                temporary = self.path.with_name(self.path.name + ".part")
                temporary.write_bytes(self._kept)
                os.replace(temporary, self.path)
            return ResultWriter(open(self.path, self._mode, buffering=0), str(self.path))
        except OSError as error:
            raise CommandError(f"cannot write {self.path}: {error.strerror}", FAILED) from error

    def _read(self) -> None:
        """Note what is finished; failed results, and a last line cut short, are to be dropped."""
        content = self.path.read_bytes()
        lines, kept = content.splitlines(keepends=True), []
        for number, line in enumerate(lines, 1):
            if not line.endswith(b"\n"):
                continue  # the end of a run that was killed
            try:
                entry = json.loads(line)
                key = entry["id"], entry["index"]
                failed = "error" in entry
            except (ValueError, TypeError, KeyError) as error:
                raise CommandError(
                    f"--resume: {self.path}:{number} is not a result of this command"
                ) from error
            if not failed:
                self.finished.add(key)
                kept.append(line)
        if len(kept) < len(lines):
            self._kept = b"".join(kept)


class ResultWriter:
    """Writes results, each a whole line, at once or in the order that was asked for."""

    def __init__(self, file: BinaryIO, name: str):
        """file: unbuffered, or flushed after every line."""
        self._file = file
        self._name = name
        self._order: list[Key] = []
        self._waiting: dict[Key, dict[str, Any]] = {}

    def close(self) -> None:
        self._file.close()

    def keep_order(self, order: Iterable[Key]) -> None:
        """From now on, hold a result back until those before it in `order` are written."""
        self._order = list(reversed(list(order)))

    def add(self, entry: dict[str, Any]) -> None:
        """Write a result, now or when its turn comes."""
        if not self._order:
            self._write_line(entry)
            return
        self._waiting[entry["id"], entry["index"]] = entry
        while self._order and self._order[-1] in self._waiting:
            self._write_line(self._waiting[self._order[-1]])
            del self._waiting[self._order.pop()]

    def flush(self) -> None:
        """Write what waits for results that will not come, still in order."""
        for key in reversed(self._order):
            if key in self._waiting:
                self._write_line(self._waiting.pop(key))
        self._order = []

    def _write_line(self, entry: dict[str, Any]) -> None:
        line = json.dumps(entry, ensure_ascii=False, default=_plain) + "\n"
        # Half of a surrogate pair, in metadata, becomes the JSON escape that it came as.
        rest = line.encode(errors="backslashreplace")
        try:
            with uninterrupted():
                while rest:
                    rest = rest[self._file.write(rest) :]
                self._file.flush()
        except OSError as error:
            raise CommandError(f"cannot write {self._name}: {error.strerror}", FAILED) from error


def _plain(value: Any) -> Any:
    return dataclasses.asdict(value) if dataclasses.is_dataclass(value) else list(value)
