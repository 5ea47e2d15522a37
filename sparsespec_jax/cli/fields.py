"""Command-line options of a configuration dataclass: one per field.

Names and types come from the fields, help from the `Attributes:` section of the docstring, and
what is allowed from `__post_init__`: nothing is said twice.
"""

from __future__ import annotations

import argparse
import collections.abc
import dataclasses
import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Sequence
from typing import Any, Literal, Union

Group = argparse._ArgumentGroup


def add_fields(
    group: Group, cls: type, *, prefix: str, taken: set[str], defaults: dict[str, Any]
) -> dict[str, str]:
    """Add `--field-name` to `group` for every field of the dataclass `cls`.

    `defaults` are the caller's, for the help, where they are not those of the class.

    A name in `taken` becomes `--prefix-field-name`; the names used are added to `taken`. Options
    that are not given leave nothing in the namespace. Returns field name -> name in the namespace,
    for `field_values`.
    """
    hints, docs = typing.get_type_hints(cls), attribute_docs(cls)
    destinations = {}
    for field in dataclasses.fields(cls):
        name = f"{prefix}_{field.name}" if field.name in taken else field.name
        taken.add(name)
        destinations[field.name] = name
        group.add_argument(
            "--" + name.replace("_", "-"),
            dest=name,
            default=argparse.SUPPRESS,
            help=_help(docs[field.name], defaults.get(field.name, field.default)),
            **_reading(hints[field.name]),
        )
    return destinations


def attribute_docs(cls: type) -> dict[str, str]:
    """Field name -> its text in the `Attributes:` section of a docstring."""
    lines = inspect.cleandoc(cls.__doc__ or "").splitlines()
    docs, names = {}, []
    for line in lines[lines.index("Attributes:") + 1 :]:
        if line and not line.startswith(" "):
            break  # the next section
        entry = re.match(r"  (\w+(?:, \w+)*): (.*)", line)
        if entry:
            names = entry[1].split(", ")
            docs |= dict.fromkeys(names, entry[2])
        elif line.strip():
            docs |= {name: f"{docs[name]} {line.strip()}" for name in names}
    return docs


def field_values(namespace: argparse.Namespace, destinations: dict[str, str]) -> dict[str, Any]:
    """The fields that the command line gives, ready for the dataclass."""
    given = {
        field: getattr(namespace, name)
        for field, name in destinations.items()
        if hasattr(namespace, name)
    }
    return {field: _as_tuple(value) for field, value in given.items()}


def read_bias(value: Any) -> Any:
    """A logit bias as JSON has it, with its token ids as numbers again."""
    if isinstance(value, dict):
        return {int(token) if _is_digits(token) else token: bias for token, bias in value.items()}
    return value


def _as_tuple(value: Any) -> Any:
    if not isinstance(value, list):
        return value
    return None if value == [None] else tuple(value)


def _help(text: str, default: Any) -> str:
    if default is None or default == ():
        shown = "none"
    else:
        shown = str(default).lower() if isinstance(default, bool) else str(default)
    return f"{text} [{shown}]".replace("%", "%%")


def _reading(hint: Any) -> dict[str, Any]:
    """Keywords of `add_argument` for a value of type `hint`."""
    union = typing.get_origin(hint) in (Union, types.UnionType)
    kinds = typing.get_args(hint) if union else (hint,)
    optional = types.NoneType in kinds
    kinds = [kind for kind in kinds if kind is not types.NoneType]
    kind, origin = kinds[0], typing.get_origin(kinds[0])
    if kind is bool:
        return {"action": argparse.BooleanOptionalAction}
    if origin is Literal:
        names = typing.get_args(kind)
        return {"choices": (*names, None) if optional else names, "type": _reader(str, optional)}
    if origin is collections.abc.Mapping:
        return {"type": _reader(_bias, optional), "metavar": "JSON"}
    many = {"nargs": "+"} if origin is tuple else {}
    kind = typing.get_args(kind)[0] if origin is tuple else kind
    metavar = "N" if kind in (int, float) else "TEXT"
    words = [word for k in kinds if typing.get_origin(k) is Literal for word in typing.get_args(k)]
    read = _reader(_number if float in kinds else kind, optional, words)
    return {"type": read, "metavar": metavar, **many}


def _reader(
    read: Callable[[str], Any], optional: bool, words: Sequence[str] = ()
) -> Callable[[str], Any]:
    """`read`, but `words` are themselves, and `none` is None if the field is optional."""

    def reader(text: str) -> Any:
        if text in words:
            return text
        return None if optional and text == "none" else read(text)

    reader.__name__ = read.__name__.strip("_")  # argparse: "invalid <name> value"
    return reader


def _number(text: str) -> int | float:
    try:
        return int(text)
    except ValueError:
        return float(text)


def _bias(text: str) -> Any:
    return read_bias(json.loads(text))


def _is_digits(text: str) -> bool:
    return text.isascii() and text.isdigit()
