"""Text to token ids and back, and chats to text, without transformers."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers

from sparsespec_jax.models import hub
from sparsespec_jax.models.chat_template import render

_REPLACEMENT = "\ufffd"
_WINDOW = 16


class Tokenizer:
    """A `tokenizers.Tokenizer` with the special tokens and the chat template of its model."""

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        *,
        special_tokens: dict[str, str] | None = None,
        chat_template: str | None = None,
        add_bos_token: bool = False,
    ):
        """special_tokens: the text of bos_token, eos_token, pad_token, unk_token where they exist.

        add_bos_token: `encode` starts with the bos id even if `tokenizer` does not add it itself.
        """
        self.backend = tokenizer
        self.special_tokens = special_tokens or {}
        self.chat_template = chat_template
        self.bos_token_id = self._special_id("bos_token")
        self.eos_token_id = self._special_id("eos_token")
        self.pad_token_id = self._special_id("pad_token")
        self._add_bos = add_bos_token and self.bos_token_id is not None

    @classmethod
    def load(cls, source: str | Path) -> Tokenizer:
        """The tokenizer of a model: a checkpoint directory, a GGUF file or a hub id."""
        path = hub.resolve(source, hub.TOKENIZER_FILES)
        if path.is_file():
            from sparsespec_jax.models.gguf_tokenizer import load_tokenizer

            return load_tokenizer(path)
        if not (path / "tokenizer.json").exists():
            raise FileNotFoundError(f"{path} has no tokenizer.json")
        config = hub.read_json(path / "tokenizer_config.json", default={})
        older = hub.read_json(path / "special_tokens_map.json", default={})
        special = {
            name: entry["content"] if isinstance(entry, dict) else entry
            for name, entry in (older | config).items()
            if name in ("bos_token", "eos_token", "pad_token", "unk_token") and entry is not None
        }
        template = config.get("chat_template")
        if isinstance(template, list):  # several, by name
            template = {entry["name"]: entry["template"] for entry in template}.get("default")
        if (path / "chat_template.jinja").exists():
            template = (path / "chat_template.jinja").read_text(encoding="utf-8")
        return cls(
            tokenizers.Tokenizer.from_file(str(path / "tokenizer.json")),
            special_tokens=special,
            chat_template=template,
            add_bos_token=bool(config.get("add_bos_token")),
        )

    def save(self, directory: str | Path) -> None:
        """Write tokenizer.json and tokenizer_config.json."""
        directory = Path(directory)
        self.backend.save(str(directory / "tokenizer.json"))
        config = {**self.special_tokens, "add_bos_token": self._add_bos}
        if self.chat_template is not None:
            config["chat_template"] = self.chat_template
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
        hub.write_json(directory / "tokenizer_config.json", config)

    @property
    def vocab_size(self) -> int:
        """Ids below this have a token; a model's embedding may be padded beyond it."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    @functools.cached_property
    def special_ids(self) -> frozenset[int]:
        """The ids that `decode` skips."""
        added = self.backend.get_added_tokens_decoder()
        return frozenset(index for index, token in added.items() if token.special)

    @functools.cached_property
    def byte_fallback_ids(self) -> frozenset[int]:
        """Tokens such as <0x0A>, if this tokenizer decodes a run of them as a whole."""
        if b'"ByteFallback"' not in self.backend.decoder.__getstate__():
            return frozenset()
        vocab = self.backend.get_vocab()
        return frozenset(i for text, i in vocab.items() if re.fullmatch("<0x[0-9A-F]{2}>", text))

    @property
    def has_chat_template(self) -> bool:
        return self.chat_template is not None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        ids = self.backend.encode(text, add_special_tokens=add_special_tokens).ids
        if add_special_tokens and self._add_bos and ids[:1] != [self.bos_token_id]:
            ids = [self.bos_token_id, *ids]
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def apply_chat_template(
        self, messages: Sequence[dict[str, Any]], add_generation_prompt: bool = True, **kwargs: Any
    ) -> str:
        """The prompt text of a chat. It holds its special tokens: encode it without adding more.

        kwargs: whatever else the template reads, such as `tools` or `enable_thinking`.
        """
        if self.chat_template is None:
            raise ValueError("this tokenizer has no chat template")
        variables = {**self.special_tokens, "tools": None, "documents": None, **kwargs}
        return render(
            self.chat_template,
            messages=list(messages),
            add_generation_prompt=add_generation_prompt,
            **variables,
        )

    def _special_id(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        if token is None:
            return None
        index = self.backend.token_to_id(token)
        if index is None:
            raise ValueError(f"{name} {token!r} is not in the tokenizer's vocabulary")
        return index


class StreamDecoder:
    """Decodes ids as they come: all that `push` returned, then `flush`, is `decode(all ids)`.

    A character may span tokens, and a token's text may depend on the one before. So new ids are
    decoded together with a window of earlier ones, whose text is subtracted, and text is held back
    while it ends in an incomplete character. The window is a few tokens, whatever the length.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True):
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._ids: list[int] = []  # the window: context, then ids whose text is not all out
        self._context = 0
        self._context_text = ""
        self._sent = 0  # characters of the window's text that are out

    def push(self, ids: Sequence[int]) -> str:
        """The text that `ids` complete."""
        known = self._tokenizer.backend.id_to_token  # `decode` passes over ids without a token
        ids = [i for i in ids if i not in self._skipped and known(i) is not None]
        self._ids += ids
        if not ids or ids[-1] in self._tokenizer.byte_fallback_ids:
            return ""
        text = self._decode(self._ids)
        complete = not text.endswith(_REPLACEMENT)
        stable = text if complete else text[:-1]
        piece = stable[self._sent :]
        self._sent = max(self._sent, len(stable))
        if complete and len(text) > len(self._context_text):
            self._start_window(self._context)
        elif not complete and len(self._ids) - self._context > _WINDOW:
            self._cut_window(text)
        return piece

    def flush(self) -> str:
        """What is still held back; the decoder then starts anew."""
        piece = self._decode(self._ids)[self._sent :]
        self._ids, self._context, self._context_text, self._sent = [], 0, "", 0
        return piece

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)

    def _start_window(self, start: int) -> None:
        """Keep the ids from `start` as context for those to come."""
        self._ids = self._ids[start:]
        self._context = len(self._ids)
        self._context_text = self._decode(self._ids)
        self._sent = len(self._context_text)

    def _cut_window(self, text: str) -> None:
        """In a long run of broken characters, drop ids that decode the same on their own."""
        middle = len(self._ids) - _WINDOW // 2
        head, tail = self._decode(self._ids[:middle]), self._decode(self._ids[middle:])
        if tail and head + tail == text:
            self._ids, self._context, self._context_text = self._ids[middle:], 0, ""
            self._sent -= len(head)
