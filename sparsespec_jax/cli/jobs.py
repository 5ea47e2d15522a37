"""The prompts of a command: read from JSONL and checked line by line before anything runs."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from sparsespec_jax.cli.errors import CommandError
from sparsespec_jax.cli.fields import read_bias
from sparsespec_jax.sampling.params import SamplingParams

if TYPE_CHECKING:
    from sparsespec_jax.llm import LLM

_SHOWN_ERRORS = 10
_PROMPT_KEYS = "prompt", "messages", "prompt_token_ids"
_KEYS = {"id", "params", *_PROMPT_KEYS}

JobId = str | int
Key = tuple[JobId, int]  # a job, and which of its samples


@dataclasses.dataclass(frozen=True)
class Job:
    """One prompt: text, messages or token ids.

    `params` are the sampling fields of the command line and, over them, those of the line; what
    neither says is up to the checkpoint. `metadata` is whatever else the line holds.
    """

    id: JobId
    prompt: str | list[dict[str, Any]] | list[int]
    params: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def samples(self) -> int:
        return SamplingParams(**self.params).n

    def token_ids(self, llm: LLM, template: Template) -> list[int]:
        """The prompt as the model reads it. Raises ValueError if its template refuses it."""
        if isinstance(self.prompt, str) and template.raw:
            return llm.tokenizer.encode(self.prompt)
        if isinstance(self.prompt, list) and isinstance(self.prompt[0], int):
            return self.prompt
        messages = self.prompt
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        if template.system is not None:
            messages = [{"role": "system", "content": template.system}, *messages]
        return llm.chat_prompt(messages, **template.arguments)


@dataclasses.dataclass(frozen=True)
class Template:
    """How text and messages become a prompt: as they are (`raw`), or in the chat template."""

    raw: bool = False
    system: str | None = None
    arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def prompt_job(text: str, params: Mapping[str, Any]) -> Job:
    """The job of one prompt from the command line."""
    try:
        _check_text(text)
    except ValueError as error:
        raise CommandError(f"--prompt: {error}") from error
    return Job("prompt", text, params)


def read_jobs(lines: Iterable[bytes], name: str, params: Mapping[str, Any], raw: bool) -> list[Job]:
    """The jobs in the lines of a JSONL file, `name`; blank lines do not count.

    Raises CommandError with the number of every line that is not a job, up to a limit.
    """
    jobs, errors = [], []
    line_of: dict[JobId, int] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            job = _read_job(line, number, params, raw)
            if job.id in line_of:
                raise ValueError(f"id {job.id!r} is already on line {line_of[job.id]}")
            line_of[job.id] = number
            jobs.append(job)
        except ValueError as error:
            errors.append(f"{name}:{number}: {error}")
    if errors:
        shown = errors[:_SHOWN_ERRORS]
        if len(errors) > len(shown):
            shown.append(f"and {len(errors) - len(shown)} more lines")
        raise CommandError("\n  ".join(shown))
    if not jobs:
        raise CommandError(f"{name} holds no prompts")
    return jobs


def _read_job(line: bytes, number: int, params: Mapping[str, Any], raw: bool) -> Job:
    entry = _read_object(line)
    job_id = entry.get("id", number)
    if isinstance(job_id, bool) or not isinstance(job_id, str | int):
        raise ValueError(f"id must be a string or an integer, got {job_id!r}")
    own = entry.get("params") or {}
    if not isinstance(own, dict):
        raise ValueError(f"params must be an object, got {own!r}")
    return Job(
        id=job_id,
        prompt=_read_prompt(entry, raw),
        params=_read_params({**params, **own}),
        metadata={key: value for key, value in entry.items() if key not in _KEYS},
    )


def _read_object(line: bytes) -> dict[str, Any]:
    try:
        text = line.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"invalid UTF-8 at byte {error.start + 1}: {error.reason}") from error
    try:
        entry = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"malformed JSON at column {error.colno}: {error.msg}") from error
    except RecursionError:
        raise ValueError("malformed JSON: nested too deeply") from None
    if not isinstance(entry, dict):
        raise ValueError(f"expected a JSON object, got {text.strip()[:40]}")
    return entry


def _read_prompt(entry: dict[str, Any], raw: bool) -> str | list[dict[str, Any]] | list[int]:
    given = [key for key in _PROMPT_KEYS if entry.get(key) is not None]
    if len(given) != 1:
        raise ValueError(
            f"expected one of {', '.join(_PROMPT_KEYS)}, got {' and '.join(given) or 'none'}"
        )
    key, prompt = given[0], entry[given[0]]
    if key == "prompt":
        if not isinstance(prompt, str):
            raise ValueError(f"prompt must be a string, got {prompt!r}")
        _check_text(prompt)
    elif not isinstance(prompt, list):
        raise ValueError(f"{key} must be a list, got {prompt!r}")
    elif not prompt:
        raise ValueError(f"{key} is empty")
    elif key == "messages":
        _check_messages(prompt, raw)
    elif not all(isinstance(token, int) and not isinstance(token, bool) for token in prompt):
        raise ValueError("prompt_token_ids must hold integers")
    return prompt


def _check_text(text: str) -> None:
    if not text:
        raise ValueError("the prompt is empty")
    try:
        text.encode()
    except UnicodeEncodeError as error:  # half of a surrogate pair
        raise ValueError(f"invalid UTF-8 at character {error.start + 1} of the prompt") from error


def _check_messages(messages: list[Any], raw: bool) -> None:
    if raw:
        raise ValueError("messages need the chat template: drop --raw")
    if not all(isinstance(message, dict) and "role" in message for message in messages):
        raise ValueError("messages must be objects with a role and a content")
    try:
        json.dumps(messages, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ValueError("invalid UTF-8 in the messages") from error


def _read_params(fields: dict[str, Any]) -> dict[str, Any]:
    known = {field.name for field in dataclasses.fields(SamplingParams)}
    if unknown := [name for name in fields if name not in known]:
        raise ValueError(f"params: there is no sampling field {unknown[0]!r}")
    if "logit_bias" in fields:
        fields["logit_bias"] = read_bias(fields["logit_bias"])
    SamplingParams(**fields)
    return fields
