"""The live progress line of a run: a bar on a terminal, now and then a plain line elsewhere."""

from __future__ import annotations

import collections
import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from tqdm import tqdm

from sparsespec_jax.cli import terminal

if TYPE_CHECKING:
    from sparsespec_jax.engine.stats import EngineStats
    from sparsespec_jax.outputs import StreamOutput

_REFRESH = 0.5  # seconds between updates of the bar
_PLAIN_REFRESH = 5.0  # seconds between plain lines
_WINDOW = 5.0  # seconds over which tok/s is measured


class Progress:
    """Requests done, tok/s, accepted drafts per verification and KV use, on standard error.

    A thread of its own keeps it live while the caller waits, for a compilation for instance.
    """

    def __init__(self, total: int, stats: Callable[[], EngineStats], *, enabled: bool = True):
        self._total = total
        self._stats = stats
        self._done = self._tokens = 0
        self._cycles = self._accepted = 0
        self._started: set[tuple[int, int]] = set()
        self._marks = collections.deque([(time.monotonic(), 0)])
        self._bar = None
        self._stop = threading.Event()
        self._thread = None
        if not enabled:
            return
        if _has_width():
            form = "{desc}: {n_fmt}/{total_fmt} |{bar:20}| {elapsed}{postfix}"
            self._bar = tqdm(total=total, desc="requests", bar_format=form, dynamic_ncols=True)
        self._thread = threading.Thread(target=self._keep_live, name="progress", daemon=True)

    def __enter__(self) -> Progress:
        if self._thread is not None:
            self._thread.start()
        return self

    def __exit__(self, *exc) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        if self._bar is not None:
            self._show()
            self._bar.close()

    def update(self, news: StreamOutput) -> None:
        """Take note of what a stream says."""
        self._tokens += len(news.token_ids)
        self._done += news.completion is not None
        key = news.prompt_index, news.index
        if key in self._started and news.token_ids:  # the first token comes from the prefill
            self._cycles += 1
            self._accepted += len(news.token_ids) - 1
        self._started.add(key)

    def aside(self) -> contextlib.AbstractContextManager:
        """In its block something else may be written to the terminal."""
        return contextlib.nullcontext() if self._bar is None else tqdm.external_write_mode()

    def line(self) -> str:
        """Everything but the number of requests."""
        stats = self._stats()
        if not self._tokens:
            return "compiling" if stats.running else "starting"
        parts = [f"{self._rate():,.1f} tok/s"]
        if self._cycles:
            parts.append(f"{self._accepted / self._cycles:.2f} accepted per verify")
        parts.append(f"KV {100 * stats.slots_used / stats.slots:.0f}%")
        return ", ".join(parts)

    def _rate(self) -> float:
        """Tokens a second, of late."""
        now = time.monotonic()
        self._marks.append((now, self._tokens))
        while len(self._marks) > 2 and now - self._marks[1][0] > _WINDOW:
            self._marks.popleft()
        since, tokens = self._marks[0]
        return (self._tokens - tokens) / max(now - since, 1e-9)

    def _keep_live(self) -> None:
        while not self._stop.wait(_PLAIN_REFRESH if self._bar is None else _REFRESH):
            self._show()

    def _show(self) -> None:
        if self._bar is None:
            terminal.note(f"{self._done}/{self._total} requests, {self.line()}")
            return
        self._bar.n = self._done
        self._bar.set_postfix_str(self.line())


def _has_width() -> bool:
    """Whether standard error is a terminal that says how wide it is; tqdm shows nothing if not."""
    return sys.stderr.isatty() and os.get_terminal_size(sys.stderr.fileno()).columns > 0
