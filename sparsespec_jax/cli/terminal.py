"""Standard input, output and error, as the commands use them.

Standard output carries what was generated, in UTF-8, and nothing else; all other words go to
standard error.
"""

from __future__ import annotations

import os
import sys

from sparsespec_jax.cli.errors import FAILED, CommandError


def note(text: str) -> None:
    """A line on standard error."""
    print(text, file=sys.stderr, flush=True)


def write(text: str) -> None:
    """Text on standard output, at once."""
    try:
        sys.stdout.buffer.write(text.encode(errors="replace"))
        sys.stdout.buffer.flush()
    except OSError as error:
        raise CommandError(f"cannot write standard output: {error.strerror}", FAILED) from error


def read_text() -> str:
    """Standard input as text, without the newline that ends it."""
    try:
        return sys.stdin.buffer.read().decode().removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError as error:
        raise CommandError(f"standard input: invalid UTF-8 at byte {error.start + 1}") from error


def abandon_stdout() -> None:
    """After a failed write, let what is still buffered go nowhere, not fail again at exit."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, sys.stdout.fileno())
    os.close(devnull)
