"""The command line of `python -m sparsespec_jax.generate`."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from sparsespec_jax.cli.errors import CommandError
from sparsespec_jax.cli.fields import add_fields, field_values
from sparsespec_jax.config import EngineConfig, SpeculationConfig
from sparsespec_jax.sampling.params import SamplingParams

PROGRAM = "python -m sparsespec_jax.generate"
STANDARD = "-"  # as a file name: standard input or output

_DESCRIPTION = """\
Generate text with sparse self-speculative decoding: faster, and the same text as without it.

Without arguments, the bundled model solves a few problems of the Countdown game."""

_SAMPLING = (
    "What is not given is as the checkpoint's generation_config.json recommends, else as shown in "
    "brackets. The word none unsets an optional field, here and below."
)

_EPILOG = f"""\
examples:
  {PROGRAM}
  {PROGRAM} --model Qwen/Qwen3-8B --prompt "How many primes are below 100?"
  {PROGRAM} --model Qwen/Qwen3-8B --input prompts.jsonl --output out.jsonl
  {PROGRAM} --model Qwen/Qwen3-8B --input prompts.jsonl --output out.jsonl --resume

input: one JSON object a line, with
  prompt            text; or messages: [{{"role": ..., "content": ...}}, ...];
                    or prompt_token_ids: [...]
  id                string or integer, unique [the line number]
  params            sampling fields of this line, over those of the command line
  any other key     comes back in the output line, under metadata

output: one JSON object per finished sample, written as it finishes, with
  id, index, text, token_ids, finish_reason, stop_reason, usage, stats;
  logprobs if asked for; error instead of text where a request failed

exit codes:
  0    everything was generated
  1    some requests failed, or the output could not be written
  2    bad arguments, model or input; nothing was generated
  130  interrupted by Ctrl-C; what had finished is written"""


@dataclasses.dataclass(frozen=True)
class Options:
    """A checked command line. `sampling` and `engine` hold only what was given."""

    model: str | None
    prompt: str | None
    input: str | None
    raw: bool
    system: str | None
    template_args: dict[str, Any]
    output: str | None
    overwrite: bool
    resume: bool
    ordered: bool
    quiet: bool
    verbose: bool
    engine: dict[str, Any]
    speculation: SpeculationConfig
    sampling: dict[str, Any]

    @property
    def demo(self) -> bool:
        """Whether nothing says what to generate."""
        return self.prompt is None and self.input is None

    def engine_config(self, **defaults: Any) -> EngineConfig:
        """The engine's configuration; `defaults` are for what the command line leaves open."""
        return EngineConfig(**{**defaults, **self.engine})


def parse(arguments: Sequence[str] | None = None) -> Options:
    """Read the command line. Raises CommandError; `--help` prints and raises SystemExit."""
    parser = _Parser(
        prog=PROGRAM,
        usage=f"{PROGRAM} [--model MODEL] [--prompt TEXT | --input FILE] [--output FILE] ...",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=_HelpFormatter,
        allow_abbrev=False,
        add_help=False,
    )
    _add_prompts(parser)
    _add_output(parser)
    engine_defaults = {"compilation_cache_dir": _compilation_cache()}
    taken = {action.dest for action in parser._actions}
    destinations = {}
    for name, title, cls, defaults in (
        ("sampling", _SAMPLING, SamplingParams, {}),
        ("speculation", "Changes the speed, never the output.", SpeculationConfig, {}),
        ("engine", None, EngineConfig, engine_defaults),
    ):
        group = parser.add_argument_group(name, title)
        destinations[name] = add_fields(group, cls, prefix=name, taken=taken, defaults=defaults)

    namespace = parser.parse_args(arguments)
    groups = {name: field_values(namespace, fields) for name, fields in destinations.items()}
    groups["engine"] = {**engine_defaults, **groups["engine"]}
    try:
        SamplingParams(**groups["sampling"])
        EngineConfig(**groups["engine"])
        groups["speculation"] = SpeculationConfig(**groups["speculation"])
    except ValueError as error:
        raise CommandError(str(error)) from error
    names = [field.name for field in dataclasses.fields(Options) if field.name not in groups]
    options = Options(**{name: getattr(namespace, name) for name in names}, **groups)
    return _check(_with_input(options))


def _add_prompts(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("prompts")
    group.add_argument(
        "--model",
        help="a Hugging Face directory or hub id, an Orbax directory of sparsespec_jax.convert, or "
        "a .gguf file [the bundled Countdown model]",
    )
    source = group.add_mutually_exclusive_group()
    source.add_argument(
        "--prompt",
        metavar="TEXT",
        help="one prompt, whose text is streamed to standard output; - reads it from standard "
        "input, as plain text",
    )
    source.add_argument(
        "--input",
        metavar="FILE",
        help="many prompts, as JSONL; - is standard input, which is also read if a model or an "
        "output is named but no prompt",
    )
    group.add_argument(
        "--raw", action="store_true", help="prompts are complete: do not apply the chat template"
    )
    group.add_argument("--system", metavar="TEXT", help="system message in front of each prompt")
    group.add_argument(
        "--template-args",
        metavar="JSON",
        type=_template_args,
        default={},
        help="what else the chat template reads, such as '{\"enable_thinking\": false}'",
    )


def _add_output(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("output")
    group.add_argument(
        "--output", metavar="FILE", help="JSONL of the results; - is standard output"
    )
    existing = group.add_mutually_exclusive_group()
    existing.add_argument(
        "--overwrite", action="store_true", help="replace an output file that is not empty"
    )
    existing.add_argument(
        "--resume",
        action="store_true",
        help="keep what an earlier run finished and add the rest; failed requests run again",
    )
    group.add_argument(
        "--ordered", action="store_true", help="results in the order of the input, not as they end"
    )
    group.add_argument("--quiet", action="store_true", help="no progress and no summary")
    group.add_argument("--verbose", action="store_true", help="log what the engine does")
    group.add_argument("-h", "--help", action="help", help="show this message and exit")


def _with_input(options: Options) -> Options:
    """`options` with standard input as the source of prompts where that is what is meant."""
    if not options.demo or (options.model is None and options.output is None):
        return options
    if sys.stdin is None or sys.stdin.isatty():
        raise CommandError("nothing to generate: give --prompt TEXT or --input FILE")
    return dataclasses.replace(options, input=STANDARD)


def _check(options: Options) -> Options:
    if options.raw and (options.system is not None or options.template_args):
        raise CommandError("--system and --template-args need the chat template: drop --raw")
    if options.demo and (options.raw or options.system is not None):
        raise CommandError("--raw and --system need a --prompt or an --input")
    if options.output in (None, STANDARD) and (options.resume or options.overwrite):
        raise CommandError("--resume and --overwrite need an --output file")
    return options


def _template_args(text: str) -> dict[str, Any]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"expected a JSON object, got {text}")
    return value


def _compilation_cache() -> str | None:
    """Where compiled steps are kept between runs, unless JAX has been told already."""
    if "JAX_COMPILATION_CACHE_DIR" in os.environ:
        return None
    caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return str(Path(caches) / "sparsespec-jax" / "xla")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise CommandError(f"{message} (see --help)")


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str):
        super().__init__(prog, max_help_position=30, width=100)
