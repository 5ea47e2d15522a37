"""Generate text from the command line: `python -m sparsespec_jax.generate --help`."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from sparsespec_jax.cli import batch, demo, terminal
from sparsespec_jax.cli.errors import FAILED, INTERRUPTED, OK, CommandError
from sparsespec_jax.cli.jobs import Job, Template, prompt_job, read_jobs
from sparsespec_jax.cli.model import load
from sparsespec_jax.cli.options import STANDARD, Options, parse
from sparsespec_jax.cli.results import ResultFile, ResultWriter, result
from sparsespec_jax.cli.summary import Summary

if TYPE_CHECKING:
    from sparsespec_jax.outputs import Completion


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    try:
        options = parse(arguments)
        return demo.play(options) if options.demo else generate(options)
    except CommandError as error:
        terminal.note(f"error: {error}")
        return error.exit_code
    except KeyboardInterrupt:
        terminal.note("interrupted")
        return INTERRUPTED


def generate(options: Options) -> int:
    """Generate for the prompts of the command line."""
    jobs = _read_jobs(options)
    file = None
    if options.output not in (None, STANDARD):
        file = ResultFile(options.output, resume=options.resume, overwrite=options.overwrite)
        if options.input not in (None, STANDARD) and file.is_same(options.input):
            raise CommandError("--input and --output are the same file")
    samples = batch.samples_of(jobs, file.finished if file else ())
    if not samples:
        terminal.note(f"{options.output} is complete: there is nothing left to generate")
        return OK

    as_text = options.prompt is not None and options.output != STANDARD
    alone = as_text and len(samples) == 1
    with load(options) as llm, contextlib.ExitStack() as stack:
        writer = None
        if file is not None:
            writer = stack.enter_context(contextlib.closing(file.open()))
        elif not as_text:
            writer = ResultWriter(sys.stdout.buffer, "standard output")
        if writer is not None and options.ordered:
            writer.keep_order(sample.key for sample in samples)

        def on_done(sample: batch.Sample, completion: Completion) -> None:
            if as_text:
                text = "" if alone else completion.text
                terminal.write(text if completion.text.endswith("\n") else text + "\n")
            if writer is not None:
                writer.add(result(sample.job, sample.index, completion))

        summary = Summary(len(samples))
        try:
            completed = batch.run(
                llm,
                samples,
                Template(options.raw, options.system, options.template_args),
                summary,
                on_done=on_done,
                on_text=terminal.write if alone else None,
                quiet=options.quiet,
            )
            if writer is not None:
                writer.flush()
        finally:
            if not options.quiet:
                terminal.note("\n" + summary.table(llm.engine.stats()))
        return summary.exit_code(completed)


def _read_jobs(options: Options) -> list[Job]:
    if options.prompt is not None:
        text = terminal.read_text() if options.prompt == STANDARD else options.prompt
        return [prompt_job(text, options.sampling)]
    if options.input == STANDARD:
        return read_jobs(sys.stdin.buffer, "standard input", options.sampling, options.raw)
    try:
        with open(options.input, "rb") as lines:
            return read_jobs(lines, options.input, options.sampling, options.raw)
    except OSError as error:
        raise CommandError(f"cannot read {options.input}: {error.strerror}") from error


def _leave(exit_code: int) -> None:
    """End the process without waiting: for a step that compiles, for a full disk, for a reader."""
    if exit_code == FAILED:
        terminal.abandon_stdout()
    if exit_code == INTERRUPTED:
        os._exit(exit_code)
    sys.exit(exit_code)


if __name__ == "__main__":
    _leave(main())
