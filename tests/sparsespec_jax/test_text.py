"""Text as it is generated: stop strings, what may be shown, characters over several tokens."""

from __future__ import annotations

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from sparsespec_jax.engine.events import TokenLogprobs
from sparsespec_jax.models.tokenizer import Tokenizer
from sparsespec_jax.sampling.params import SamplingParams
from sparsespec_jax.text import TextAssembler

_WORDS = ["ab", "abc", "ca", "the", "é", " of"]


def _byte_level_tokenizer() -> Tokenizer:
    """A token for each byte, and for a few words of several bytes."""
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [byte_level.pre_tokenize_str(word)[0][0] for word in _WORDS]
    vocab = {text: index for index, text in enumerate([*alphabet, *words])}
    backend = tokenizers.Tokenizer(models.BPE(vocab, []))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<end>"])
    return Tokenizer(backend)


TOKENIZER = _byte_level_tokenizer()
_VOCAB = TOKENIZER.backend.get_vocab()
_BYTE_LEVEL = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


def spell(text: str) -> list[int]:
    """The tokens of a text, one per byte."""
    return [_VOCAB[char] for char in _BYTE_LEVEL.pre_tokenize_str(text)[0][0]] if text else []


def word(text: str) -> int:
    return _VOCAB[_BYTE_LEVEL.pre_tokenize_str(text)[0][0]]


def assemble(tokens, *, pieces=1, **params) -> tuple[TextAssembler, list[str]]:
    """Push `tokens`, so many at a time, until they end or stop; also returns what was shown."""
    assembler = TextAssembler(TOKENIZER, SamplingParams(**params))
    shown = []
    for start in range(0, len(tokens), pieces):
        new = tokens[start : start + pieces]
        shown.append(assembler.push(new, None, last=start + pieces >= len(tokens)))
        if assembler.stop_string is not None:
            break
    return assembler, shown


def stopped(tokens, stops, *, min_tokens=0, include=False) -> tuple[str, str | None, int]:
    """The specification, by brute force: text, stop string and number of tokens.

    The first character of the decoded text at which a stop string ends decides. One that ends with
    one of the first `min_tokens` tokens does not.
    """
    texts = [TOKENIZER.decode(tokens[:count]) for count in range(len(tokens) + 1)]
    whole, ends = texts[-1], [len(_stable(text)) for text in texts]
    ends[-1] = len(whole)
    for end in range(1, len(whole) + 1):
        count = next(count for count, reached in enumerate(ends) if reached >= end)
        found = [stop for stop in stops if whole[:end].endswith(stop)]
        if found and count > min_tokens:
            stop = max(found, key=len)
            return whole[: end if include else end - len(stop)], stop, count
    return whole, None, len(tokens)


def _stable(text: str) -> str:
    """Without a character that may still be completed."""
    return text.removesuffix("\ufffd")


_TEXTS = st.lists(st.sampled_from(["a", "b", "c", "ab", "abc", "ca"]), max_size=14)
_STOPS = st.lists(st.text("abc", min_size=1, max_size=4), max_size=4)


@settings(max_examples=400, deadline=None)
@given(_TEXTS, _STOPS, st.integers(1, 5), st.integers(0, 8), st.booleans())
def test_text_tokens_and_stop_string_are_those_of_the_specification(
    words, stops, pieces, min_tokens, include
):
    """However many tokens arrive at once."""
    tokens = [word(text) for text in words]
    assembler, shown = assemble(
        tokens,
        pieces=pieces,
        stop=stops,
        min_tokens=min_tokens,
        include_stop_str_in_output=include,
    )
    text, stop, count = stopped(tokens, stops, min_tokens=min_tokens, include=include)
    assert assembler.text == text
    assert assembler.stop_string == stop
    assert assembler.token_ids == tokens[:count]
    assert "".join(shown) == text


@settings(max_examples=300, deadline=None)
@given(_TEXTS, _STOPS, st.integers(1, 4), st.booleans())
def test_all_is_shown_but_what_may_begin_a_stop_string(words, stops, pieces, include):
    tokens = [word(text) for text in words]
    _, shown = assemble(tokens, pieces=pieces, stop=stops, include_stop_str_in_output=include)
    for count in range(1, len(shown)):
        text = "".join(words[: count * pieces])
        beginnings = {stop[:length] for stop in stops for length in range(1, len(stop))}
        held = max((len(start) for start in beginnings if text.endswith(start)), default=0)
        assert "".join(shown[:count]) == text[: len(text) - held]


@settings(max_examples=150, deadline=None)
@given(st.text("aé漢🙂 ", max_size=8), st.integers(1, 5), st.text("aé漢🙂", max_size=2))
def test_characters_over_several_tokens_come_out_whole(text, pieces, stop):
    stops = [stop] if stop else []
    assembler, shown = assemble(spell(text), pieces=pieces, stop=stops)
    expected = text.split(stop)[0] if stop else text
    assert "".join(shown) == assembler.text == expected
    assert all("\ufffd" not in piece for piece in shown)


def test_a_character_that_never_completes_comes_out_as_a_replacement_in_the_end():
    tokens = spell("a漢")[:-1]
    assembler, shown = assemble(tokens)
    assert shown == ["a", "", "\ufffd"]
    assert assembler.text == "a\ufffd"


def test_without_stop_strings_nothing_is_held_back():
    _, shown = assemble(spell("abc"))
    assert shown == ["a", "b", "c"]


def test_text_that_may_begin_a_stop_string_is_held_back_until_it_cannot():
    _, shown = assemble(spell("aabacd"), stop=["abc"])
    assert shown == ["", "a", "", "ab", "ac", "d"]


def test_what_was_held_back_comes_with_the_last_token():
    assembler, shown = assemble(spell("xab"), stop=["abc"])
    assert shown == ["x", "", "ab"]
    assert assembler.stop_string is None


def test_the_stop_string_that_completes_first_wins_whatever_the_order_given():
    for stops in (["bcd", "c"], ["c", "bcd"]):
        for pieces in (1, 2, 5):
            assembler, _ = assemble(spell("abcde"), pieces=pieces, stop=stops)
            assert (assembler.stop_string, assembler.text) == ("c", "ab")
            assert assembler.token_ids == spell("abc")


def test_of_stop_strings_that_complete_together_the_longest_wins():
    for stops in (["c", "abc", "bc"], ["abc", "bc", "c"]):
        assembler, _ = assemble(spell("xabcx"), stop=stops)
        assert (assembler.stop_string, assembler.text) == ("abc", "x")


def test_a_stop_string_may_be_kept():
    assembler, shown = assemble(spell("xabcd"), stop=["bc"], include_stop_str_in_output=True)
    assert assembler.text == "".join(shown) == "xabc"


def test_a_stop_string_inside_a_token_keeps_the_token_but_not_its_text():
    tokens = [word("the"), word("abc"), word(" of")]
    assembler, _ = assemble(tokens, stop=["b"])
    assert assembler.text == "thea"
    assert assembler.token_ids == tokens[:2]


@pytest.mark.parametrize(
    ("min_tokens", "text"), [(0, "x"), (1, "x"), (2, "xaxx"), (4, "xaxx"), (5, "xaxxaxx")]
)
def test_a_stop_string_within_min_tokens_does_not_count_but_a_later_one_does(min_tokens, text):
    assembler, _ = assemble(spell("xaxxaxxa"), stop=["a"], min_tokens=min_tokens)
    assert assembler.text == text


def test_a_stop_string_that_begins_within_min_tokens_may_complete_after_them():
    assembler, shown = assemble(spell("xabc"), stop=["abc"], min_tokens=3)
    assert assembler.text == "".join(shown) == "x"


def test_logprobs_end_with_the_tokens():
    logprobs = [TokenLogprobs(-float(index), ()) for index in range(5)]
    assembler = TextAssembler(TOKENIZER, SamplingParams(stop="c", logprobs=0))
    assembler.push(spell("abcde"), logprobs, last=False)
    assert assembler.token_ids == spell("abc")
    assert assembler.logprobs == logprobs[:3]


@pytest.mark.parametrize(("skip", "text"), [(True, "ab"), (False, "a<end>b")])
def test_special_tokens_are_left_out_unless_asked_for(skip, text):
    tokens = [*spell("a"), _VOCAB["<end>"], *spell("b")]
    assembler, _ = assemble(tokens, skip_special_tokens=skip)
    assert assembler.text == text


def test_no_tokens_at_all_are_no_text():
    assembler = TextAssembler(TOKENIZER, SamplingParams(stop="a"))
    assert assembler.push((), None, last=True) == ""
    assert assembler.text == ""
    assert assembler.stop_string is None
