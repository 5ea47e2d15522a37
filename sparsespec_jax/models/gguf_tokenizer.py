"""The byte-level BPE tokenizer that a GGUF file describes in its metadata."""

from __future__ import annotations

from pathlib import Path

from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

from sparsespec_jax.models.gguf import open_gguf, read_metadata
from sparsespec_jax.models.tokenizer import Tokenizer

_CONTROL, _USER_DEFINED = 3, 4  # entries of tokenizer.ggml.token_type

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _split(digits: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS % digits), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _gpt2(*before: pre_tokenizers.PreTokenizer) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [*before, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    )


_PRE_TOKENIZERS = {
    "gpt-2": lambda: _gpt2(),
    "smollm": lambda: _gpt2(pre_tokenizers.Digits(individual_digits=True)),
    "llama-bpe": lambda: _split(r"\p{N}{1,3}"),
    "qwen2": lambda: _split(r"\p{N}"),
    "deepseek-r1-qwen": lambda: _split(r"\p{N}"),
}


def load_tokenizer(path: Path) -> Tokenizer:
    metadata = read_metadata(open_gguf(path))

    def get(key: str, default=None):
        return metadata.get(f"tokenizer.ggml.{key}", default)

    model, pre = get("model"), get("pre", "unnamed")
    if model != "gpt2":
        raise ValueError(
            f"{path} has tokenizer model {model!r}; supported: gpt2 (byte-level BPE). "
            "Give the directory of a Hugging Face tokenizer instead"
        )
    if pre not in _PRE_TOKENIZERS:
        supported = ", ".join(_PRE_TOKENIZERS)
        raise ValueError(f"{path} has pre-tokenizer {pre!r}; supported: {supported}")

    texts, kinds = get("tokens"), get("token_type", [])
    llama, qwen = pre == "llama-bpe", "qwen" in pre
    backend = Backend(
        BPE(
            {text: index for index, text in enumerate(texts)},
            [tuple(merge.split(" ")) for merge in get("merges")],
            ignore_merges=llama,
        )
    )
    if qwen:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = _PRE_TOKENIZERS[pre]()
    backend.decoder = decoders.ByteLevel()
    added = [
        AddedToken(text, special=kind == _CONTROL, normalized=False)
        for text, kind in zip(texts, kinds, strict=False)
        if kind in (_CONTROL, _USER_DEFINED)
    ]
    backend.add_tokens(added)

    special = {}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown")):
        index = get(f"{key}_token_id")
        if index is not None:
            special[f"{name}_token"] = texts[index]
    return Tokenizer(
        backend,
        special_tokens=special,
        chat_template=metadata.get("tokenizer.chat_template"),
        add_bos_token=bool(get("add_bos_token", llama)),
    )
