"""Ctrl-C, held back while a line is written."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Ctrl-C inside the block raises at its end; a second one raises at once."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread is ever interrupted
        return
    interrupts = []

    def hold_back(*_) -> None:
        interrupts.append(None)
        if len(interrupts) > 1:
            raise KeyboardInterrupt

    previous = signal.signal(signal.SIGINT, hold_back)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
    if interrupts:
        raise KeyboardInterrupt
