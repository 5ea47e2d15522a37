"""Chat templates: the jinja2 dialect that Hugging Face tokenizers ship.

Templates come with checkpoints, from anywhere, so they run in jinja2's immutable sandbox.
"""

from __future__ import annotations

import datetime
import functools
import json
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox


def render(template: str, **variables: Any) -> str:
    """`template` filled in; a ValueError if it is broken or refuses the messages."""
    try:
        return _compile(template).render(**variables)
    except jinja2.TemplateError as error:
        raise ValueError(f"chat template: {error}") from error


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks, for training, what the assistant says; the body just renders."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's interface)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


@functools.lru_cache(maxsize=16)
def _compile(template: str) -> jinja2.Template:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment.from_string(template)


def _tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    """jinja2's own filter escapes HTML, which no prompt wants."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)
