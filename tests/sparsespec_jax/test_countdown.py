import collections
import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsespec_jax.countdown import (
    LARGEST_NUMBER,
    LARGEST_RESULT,
    TARGETS,
    Problem,
    check_answer,
    held_out,
    is_held_out,
    moves,
    reachable,
    sample_problem,
    solve,
)

states = st.lists(st.integers(1, LARGEST_NUMBER), min_size=2, max_size=4).map(sorted).map(tuple)


@given(states, st.booleans())
def test_moves_are_true_and_leave_a_sorted_state(state, descending):
    state = tuple(sorted(state, reverse=descending))
    for move in moves(state, descending):
        assert eval(f"{move.left}{move.op}{move.right}") == move.result
        assert 0 < move.result <= LARGEST_RESULT
        assert move.state == tuple(sorted(move.state, reverse=descending))
        expected = collections.Counter(state)
        expected.subtract([move.left, move.right])
        expected[move.result] += 1
        assert collections.Counter(move.state) == +expected


@given(states)
def test_both_orders_have_the_same_moves(state):
    def outcomes(state, descending):
        return {(m.result, tuple(sorted(m.state))) for m in moves(state, descending)}

    assert outcomes(state, False) == outcomes(state[::-1], True)


def test_moves_come_in_canonical_order():
    assert [str(move) for move in moves((2, 4, 4))] == [
        "2+4=6", "4-2=2", "2*4=8", "4/2=2", "4+4=8", "4*4=16", "4/4=1",
    ]  # fmt: skip


@settings(max_examples=30, deadline=None)
@given(states, st.integers(1, 150))
def test_solve_finds_what_is_reachable(numbers, target):
    problem = Problem(numbers, target)
    steps = solve(problem)
    assert (steps is not None) == (target in reachable(numbers))
    if steps is not None:
        assert check_answer(problem, "Answer: " + ", ".join(steps))


@pytest.mark.parametrize("count", [3, 4, None])
def test_sampled_problems_are_solvable(count):
    rng = random.Random(0)
    for _ in range(20):
        problem = sample_problem(rng, count)
        assert len(problem.numbers) == (count or len(problem.numbers))
        assert problem.target in TARGETS
        assert solve(problem) is not None


def test_sampling_is_reproducible():
    """On every platform and in every Python version: the model card's problems depend on it."""
    rng = random.Random(0)
    assert [sample_problem(rng) for _ in range(3)] == [
        Problem((23, 13, 8, 16), 49),
        Problem((10, 15, 18, 28), 74),
        Problem((23, 19, 8, 28), 147),
    ]


def test_held_out_problems_are_never_trained_on():
    problems = held_out(40)
    assert problems == held_out(40)
    assert problems[:10] == held_out(10)
    assert problems != held_out(40, seed=1)
    assert len({(tuple(sorted(p.numbers)), p.target) for p in problems}) == 40
    rng = random.Random(0)
    for problem in problems:
        for numbers in itertools.permutations(problem.numbers):
            assert is_held_out(Problem(numbers, problem.target))
        assert not is_held_out(sample_problem(rng, split="train"))


PROBLEM = Problem((25, 3, 12, 7), 180)


@pytest.mark.parametrize(
    "text",
    [
        "Answer: 3+7=10, 25-10=15, 12*15=180",
        "Answer: 7+3=10,25 - 10 = 15 , 15*12=180 \n",
        "<think>\nAnswer: 1+1=2\n</think>\nAnswer: 3+7=10, 25-10=15, 12*15=180\nDone.",
        "Answer: 3+7=10, 25-10=15, 12*15=180\r\n",
    ],
)
def test_right_answers(text):
    assert check_answer(PROBLEM, text)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "nothing"),
        ("12*15=180", "no answer line"),
        ("Answer: none", "gave up"),
        ("Answer: 3+7=10, 25-10=15", "a number and the target are left"),
        ("Answer: 3+7=10, 25-10=15, 12*15=180, 180/1=180", "a number that is not there"),
        ("Answer: 3+7=11, 25-11=14, 12*14=168", "false"),
        ("Answer: 3+7=10, 25-10=15, 12*15=181", "false"),
        ("Answer: 12*15=180", "a number out of nowhere"),
        ("Answer: 3+3=6", "one number twice"),
        ("Answer: 3+7=10, 25-10=15, 12*15=180\nAnswer: none", "the last line counts"),
        ("Answer: 7/3=2, 25-2=23, 12*15=180", "inexact division"),
        ("Answer: (25-(3+7))*12=180", "steps were asked for"),
        ("Answer: 3+7=10; 25-10=15; 12*15=180", "not separated by commas"),
        ("My Answer: 3+7=10, 25-10=15, 12*15=180", "not a line of its own"),
        ("Answer: __import__('os')", "code"),
        ("Answer: 9**9=1", "no such operation"),
        ("Answer: " + "9" * 5000 + "+1=2", "huge"),
    ],
)
def test_wrong_answers(text, why):
    assert not check_answer(PROBLEM, text), why


def test_division():
    assert check_answer(Problem((4, 12), 3), "Answer: 12/4=3")
    assert not check_answer(Problem((5, 12), 2), "Answer: 12/5=2")
    assert not check_answer(Problem((5, 5, 5), 5), "Answer: 5-5=0, 5/0=5")
    assert not check_answer(Problem((3, 5), 2), "Answer: 3-5=-2")


@given(st.text())
def test_any_text_can_be_checked(text):
    assert not check_answer(Problem((2, 2), 9), "Answer: " + text)


@given(st.text(alphabet="0123456789+-*/= ,()\n"))
def test_false_sums_never_pass(text):
    assert not check_answer(Problem((2, 2), 9), "Answer: " + text)


def test_prompt_names_numbers_and_target():
    assert PROBLEM.prompt() == (
        "Use each of the numbers 25, 3, 12, 7 exactly once to make 180. Answer with the steps."
    )


@pytest.mark.parametrize(("numbers", "target"), [((), 5), ((0, 1), 1), ((1, 2), 0)])
def test_impossible_problems_raise(numbers, target):
    with pytest.raises(ValueError, match="positive"):
        Problem(numbers, target)
