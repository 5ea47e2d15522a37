import random
import re

import pytest
from tokenizers import Tokenizer

from checkpoints.countdown_traces import (
    MAX_LENGTH,
    Encoder,
    Plan,
    prompt,
    trace,
    training_example,
    vocabulary,
    write_tokenizer,
)
from sparsespec_jax.countdown import Problem, check_answer, held_out, is_held_out, sample_problem
from sparsespec_jax.models.tokenizer import Tokenizer as ChatTokenizer

PLANS = [Plan(breadth, descending) for breadth in (False, True) for descending in (False, True)]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(directory)
    return directory


@pytest.fixture(scope="module")
def tokenizer(directory):
    return Tokenizer.from_file(str(directory / "tokenizer.json"))


def problems(n: int, seed: int = 0) -> list[Problem]:
    rng = random.Random(seed)
    return [sample_problem(rng, 3 if index % 3 == 0 else 4) for index in range(n)]


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_every_trace_solves_its_problem(plan):
    for problem in problems(30):
        text = "".join(trace(problem, plan))
        assert text.startswith("<think>\n")
        thinking, answer = text.removesuffix("<|im_end|>").split("</think>\n")
        assert check_answer(problem, answer)
        assert thinking.endswith(f"={problem.target} found\n")


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_every_line_is_true(plan):
    for problem in problems(15, seed=1):
        text = "".join(trace(problem, plan))
        sums = re.findall(r"(\d+)([-+*/])(\d+)=(\d+)", text)
        assert sums
        for left, op, right, result in sums:
            assert eval(f"{left}{op}{right}") == int(result)


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_every_line_restates_a_state_that_was_opened(plan):
    problem = Problem((4, 22, 20, 7), 44)
    opened = {}
    for line in "".join(trace(problem, plan)).split("</think>")[0].splitlines()[2:]:
        index, rest = line.split(": ")
        if index.startswith("#"):
            opened[index[1:]] = rest.split(" | ")[1]
        else:
            assert rest.split(" | ")[0] == opened[index]


def test_breadth_first_opens_everything_before_it_extends_anything():
    text = "".join(trace(Problem((4, 22, 20, 7), 44), Plan(True, False)))
    assert text.rindex("#") < text.index("\n1: ")


def test_searches_have_dead_ends():
    lines = "".join(trace(Problem((4, 22, 20, 7), 44), Plan(False, False))).splitlines()
    assert len([line for line in lines if line.startswith("#")]) == 7
    assert len(lines) > 40


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_unsolvable_problems_end_in_none(plan):
    text = "".join(trace(Problem((2, 2, 2), 150), plan))
    assert text.endswith("</think>\nAnswer: none<|im_end|>")
    assert not check_answer(Problem((2, 2, 2), 150), text.removesuffix("<|im_end|>"))


def test_training_examples_fit_and_leave_the_held_out_problems_alone(tokenizer):
    rng, ids = random.Random(0), Encoder()
    lengths = []
    for _ in range(60):
        tokens, start = training_example(rng, ids)
        lengths.append(len(tokens))
        text = tokenizer.decode(tokens[:start], skip_special_tokens=False)
        assert text.endswith("<|im_start|>assistant\n")
        numbers, target = re.search(r"numbers (.*) exactly once to make (\d+)\.", text).groups()
        problem = Problem(tuple(map(int, numbers.split(", "))), int(target))
        assert tokens[:start] == ids.prompt(problem)
        assert tokens[start] == tokenizer.token_to_id("<think>")
        assert tokens[-1] == tokenizer.token_to_id("<|im_end|>")
        if "Answer: none" not in tokenizer.decode(tokens):
            assert not is_held_out(problem)
    assert max(lengths) <= MAX_LENGTH
    assert sorted(lengths)[30] > 500


def test_training_examples_are_reproducible():
    first, second = (training_example(random.Random(3), Encoder()) for _ in range(2))
    assert first == second


def test_tokenizer_splits_text_into_the_pieces_of_the_trace(tokenizer):
    ids = Encoder()
    for problem, plan in zip(held_out(12), PLANS * 3, strict=True):
        pieces = trace(problem, plan)
        text = prompt(problem) + "".join(pieces)
        expected = ids.prompt(problem) + ids(pieces)
        assert tokenizer.encode(text).ids == expected
        assert tokenizer.decode(expected, skip_special_tokens=False) == text
        assert len(expected) == len(ids.prompt(problem)) + len(pieces)


@pytest.mark.parametrize(
    "text", ["Any text: 300 + 12345!", "tabs\tand\r\nlines  ", "Zwölf ≠ 12, 数 🙂", " 007_x", ""]
)
def test_tokenizer_takes_any_text(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_vocabulary_has_no_duplicates_and_fits_the_model(tokenizer):
    tokens = vocabulary()
    assert len(set(tokens)) == len(tokens) <= 512
    assert tokenizer.get_vocab() == {token: index for index, token in enumerate(tokens)}


def test_chat_template_renders_the_training_prompt(directory):
    chat = ChatTokenizer.load(directory)
    problem = held_out(1)[0]
    text = chat.apply_chat_template([{"role": "user", "content": problem.prompt()}])
    assert text == prompt(problem)
    assert chat.encode(text) == Encoder().prompt(problem)
    assert chat.vocab_size == len(vocabulary())
    think = chat.encode("<think>")
    assert chat.decode([*think, chat.eos_token_id]) == "<think>"
