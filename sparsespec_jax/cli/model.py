"""The model of a command line, loaded."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
import traceback
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from sparsespec_jax.cli import terminal
from sparsespec_jax.cli.errors import CommandError
from sparsespec_jax.cli.options import Options

if TYPE_CHECKING:
    from sparsespec_jax.llm import LLM


@contextlib.contextmanager
def load(options: Options, **engine_defaults: Any) -> Iterator[LLM]:
    """The model, ready; a CommandError if there is none or it cannot be loaded.

    `engine_defaults` are for what the command line leaves open.
    """
    if options.verbose:
        logging.basicConfig(format="%(asctime)s %(name)s: %(message)s", level=logging.INFO)
    if not options.quiet:
        terminal.note(f"loading {options.model or 'the bundled Countdown model'}")
    start = time.monotonic()
    try:
        from sparsespec_jax.llm import LLM

        llm = LLM(
            options.model,
            engine=options.engine_config(**engine_defaults),
            speculation=options.speculation,
            progress=sys.stderr.isatty() and not options.quiet,
        )
    except Exception as error:
        if options.verbose:
            traceback.print_exc()
        raise CommandError(f"cannot load the model: {error}") from error
    with llm:
        if not options.quiet:
            seconds = time.monotonic() - start
            terminal.note(f"loaded in {seconds:.1f} s; steps compile when they are first needed")
        yield llm
