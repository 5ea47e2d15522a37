"""Where a model comes from: a path, or the id of a repository on the Hugging Face hub."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

CONFIG_FILES = ("config.json", "generation_config.json")
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)
WEIGHT_FILES = ("model*.safetensors", "model.safetensors.index.json")

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def resolve(source: str | Path, files: Sequence[str]) -> Path:
    """The local path of `source`; of a hub id, `files` (glob patterns) are downloaded first."""
    path = Path(source).expanduser()
    if path.exists():
        return path
    name = str(source)
    if isinstance(source, Path) or name.endswith(".gguf") or not _HUB_ID.fullmatch(name):
        raise FileNotFoundError(f"no model at {path}: no such file or directory")

    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=list(files)))
    except Exception as error:  # HTTP, proxy, offline, gated, unknown: one message for all
        raise FileNotFoundError(
            f"no model {name!r}: there is no such file or directory, and it cannot be had from the "
            f"Hugging Face hub ({type(error).__name__}: {str(error).strip()})"
        ) from error


def read_json(path: Path, *, default: dict[str, Any] | None = None) -> dict[str, Any]:
    """The object in a JSON file; a file that is absent reads as `default`, if one is given."""
    if default is not None and not path.exists():
        return default
    if not path.exists():
        raise FileNotFoundError(f"{path.parent} has no {path.name}")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
