import json
import random

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, pre_tokenizers

from sparsespec_jax.models.tokenizer import StreamDecoder, Tokenizer

CHATML = (
    "{%- if messages[0]['role'] == 'system' %}\n"
    "    {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}\n"
    "{%- endif %}\n"
    "{%- for message in messages if message['role'] != 'system' %}\n"
    "    {%- if message['role'] not in ('user', 'assistant') %}\n"
    "        {{- raise_exception('unknown role ' + message['role']) }}\n"
    "    {%- endif %}\n"
    "    {{- '<|im_start|>' + message['role'] + '\\n' }}\n"
    "    {%- generation %}{{- message['content'] | trim }}{% endgeneration %}\n"
    "    {%- if message.tool %}{{ message.tool | tojson }}{% endif %}\n"
    "    {{- eos_token + '\\n' }}\n"
    "    {%- if loop.index > 8 %}{% break %}{% endif %}\n"
    "{%- endfor %}\n"
    "{% if add_generation_prompt %}\n"
    "    {{- '<|im_start|>assistant\\n' }}\n"
    "    {%- if enable_thinking is defined and enable_thinking is false %}\n"
    "    {{- '<think>\\n\\n</think>\\n\\n' }}\n"
    "    {%- endif %}\n"
    "{% endif %}\n"
)
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "  3 < 4 & é? ", "tool": {"name": "é<", "n": [1]}},
    {"role": "assistant", "content": "Yes."},
]


def byte_level() -> tokenizers.Tokenizer:
    """A BPE tokenizer that knows every byte, so that ids can split characters anywhere."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(["the cat, the hat and the 猫 😀 é " * 4], trainer)
    backend.add_tokens([tokenizers.AddedToken("<think>", normalized=False)])
    return backend


def byte_fallback() -> tokenizers.Tokenizer:
    """In SentencePiece's manner: spaces as a letter, unknown characters as runs of byte tokens."""
    vocab = {"<unk>": 0} | {f"<0x{byte:02X}>": 1 + byte for byte in range(256)}
    for piece in ("▁", "▁the", "a", "b", "é", "猫", "▁▁"):
        vocab[piece] = len(vocab)
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, [], byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens(["<s>"])
    return backend


@pytest.fixture
def directory(tmp_path):
    byte_level().save(str(tmp_path / "tokenizer.json"))
    config = {
        "bos_token": None,
        "eos_token": {"__type": "AddedToken", "content": "<|im_end|>", "special": True},
        "pad_token": "<|im_start|>",
        "chat_template": CHATML,
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path


def test_ids_and_texts(directory):
    tokenizer = Tokenizer.load(str(directory))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (None, 1, 0)
    assert tokenizer.special_ids == {0, 1}
    assert tokenizer.vocab_size == 279
    text = "the 猫 sat <think>\n\té😀"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode([*ids, 1]) == text
    assert tokenizer.decode([*ids, 1], skip_special_tokens=False) == text + "<|im_end|>"
    assert tokenizer.encode("<|im_start|>the")[0] == 0
    assert tokenizer.encode("") == []


def test_save_and_load(directory, tmp_path):
    first = Tokenizer.load(directory)
    (tmp_path / "saved").mkdir()
    first.save(tmp_path / "saved")
    second = Tokenizer.load(tmp_path / "saved")
    assert second.special_tokens == first.special_tokens
    assert second.chat_template == first.chat_template
    assert second.encode("the <think> 猫") == first.encode("the <think> 猫")


def test_bos_is_added_when_the_config_asks(directory):
    config = {"bos_token": "<|im_start|>", "add_bos_token": True}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer.load(directory)
    plain = tokenizer.encode("the", add_special_tokens=False)
    assert tokenizer.encode("the") == [0, *plain]
    assert tokenizer.encode("<|im_start|>the") == [0, *plain]


def test_chat_template(directory):
    tokenizer = Tokenizer.load(directory)
    assert tokenizer.has_chat_template
    assert tokenizer.apply_chat_template(MESSAGES[:2], enable_thinking=False) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        '<|im_start|>user\n3 < 4 & é?{"name": "é<", "n": [1]}<|im_end|>\n'
        "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )
    assert tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=False).endswith(
        "<|im_start|>assistant\nYes.<|im_end|>\n"
    )


def test_chat_template_file_and_named_templates(directory):
    config = {
        "chat_template": [{"name": "tools", "template": "t"}, {"name": "default", "template": "d"}]
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    assert Tokenizer.load(directory).apply_chat_template([]) == "d"
    (directory / "chat_template.jinja").write_text("{{ strftime_now('%Y') | length }}")
    assert Tokenizer.load(directory).apply_chat_template([]) == "4"


def test_chat_template_faults(directory):
    tokenizer = Tokenizer.load(directory)
    with pytest.raises(ValueError, match="chat template: unknown role tool"):
        tokenizer.apply_chat_template([{"role": "tool", "content": "x"}])
    for template in ("{% if %}", "{{ messages.append(1) }}", "{{ ''.__class__.__mro__ }}"):
        tokenizer.chat_template = template
        with pytest.raises(ValueError, match="chat template: "):
            tokenizer.apply_chat_template([])
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="no chat template"):
        tokenizer.apply_chat_template(MESSAGES)


@pytest.mark.filterwarnings("ignore")  # transformers' own
def test_chat_template_renders_as_in_transformers(directory):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(directory)
    ours = Tokenizer.load(directory)
    for options in ({}, {"add_generation_prompt": True}, {"enable_thinking": False}):
        options = {"add_generation_prompt": False, **options}
        expected = theirs.apply_chat_template(MESSAGES, tokenize=False, **options)
        assert ours.apply_chat_template(MESSAGES, **options) == expected
    assert ours.encode(expected) == theirs.encode(expected)


def test_missing_files(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"has no tokenizer.json"):
        Tokenizer.load(tmp_path)
    byte_level().save(str(tmp_path / "tokenizer.json"))
    config = tmp_path / "tokenizer_config.json"
    config.write_text('{"eos_token": "</s>"}')
    with pytest.raises(ValueError, match="eos_token '</s>' is not in the tokenizer's vocabulary"):
        Tokenizer.load(tmp_path)


def _stream(tokenizer, ids, sizes, skip):
    decoder, pieces = StreamDecoder(tokenizer, skip_special_tokens=skip), []
    while ids:
        size = sizes.randint(0, 3)
        pieces.append(decoder.push(ids[:size]))
        ids = ids[size:]
    return [*pieces, decoder.flush()]


BACKENDS = {
    "byte level": Tokenizer(byte_level()),
    "byte fallback": Tokenizer(byte_fallback()),
}


@pytest.mark.parametrize("kind", BACKENDS)
@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_pieces_join_to_the_whole(kind, data):
    """For ids that no text has: broken characters, special tokens, ids beyond the vocabulary."""
    tokenizer = BACKENDS[kind]
    top = tokenizer.vocab_size + 3
    some = st.sampled_from(data.draw(st.lists(st.integers(0, top), min_size=1, max_size=4)))
    ids = data.draw(st.lists(st.integers(0, top) | some, max_size=60))
    skip, seed = data.draw(st.booleans()), data.draw(st.integers(0, 9))
    pieces = _stream(tokenizer, ids, random.Random(seed), skip)
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("kind", BACKENDS)
def test_text_comes_out_without_broken_characters(kind):
    tokenizer = BACKENDS[kind]
    text = "the 猫😀 猫 aébé\ufffdb" if kind == "byte level" else "the 猫 ab日é本b"
    decoder = StreamDecoder(tokenizer)
    ids = tokenizer.encode(text.replace(" ", "▁") if kind == "byte fallback" else text)
    pieces = [decoder.push([token]) for token in ids]
    assert "".join(pieces) == text
    assert decoder.flush() == ""
    genuine = [piece for piece in pieces if "\ufffd" in piece]
    assert genuine == (["\ufffdb"] if kind == "byte level" else [])


def test_flush_gives_the_incomplete_rest_and_starts_anew():
    tokenizer = BACKENDS["byte level"]
    decoder = StreamDecoder(tokenizer)
    (first, *_) = tokenizer.encode("日")
    assert decoder.push([first]) == ""
    assert decoder.flush() == "\ufffd"
    assert decoder.push(tokenizer.encode("cat")) == "cat"


@pytest.mark.parametrize("text", ["the cat", "broken"])
def test_work_per_token_does_not_grow(text):
    """Tokens decoded over a long stream, good or broken, are a few times those pushed."""

    class Counting:
        def __init__(self, tokenizer):
            self.tokenizer, self.count = tokenizer, 0

        def __getattr__(self, name):
            return getattr(self.tokenizer, name)

        def decode(self, ids, **options):
            self.count += len(ids)
            return self.tokenizer.decode(ids, **options)

    tokenizer = Counting(BACKENDS["byte level"])
    ids = tokenizer.encode("日")[:1] * 2000 if text == "broken" else tokenizer.encode(text * 400)
    decoder = StreamDecoder(tokenizer)
    pieces = [decoder.push([token]) for token in ids]
    assert "".join(pieces) + decoder.flush() == BACKENDS["byte level"].decode(ids)
    assert tokenizer.count < 20 * len(ids)
