"""The Countdown game: combine all the given numbers with + - * / to reach a target.

Generator, solver and checker for the bundled model, the notebooks and the reinforcement learning
examples. Results of operations are positive integers; a division must be exact. Pure Python, and
reproducible from a seed on any platform.

    problem = sample_problem(random.Random(0))
    problem.prompt()              # what the user asks
    check_answer(problem, text)   # is the model's text a correct answer?
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import random
import re
from collections.abc import Iterator
from typing import Literal

LARGEST_NUMBER = 30  # of the numbers that `sample_problem` gives
TARGETS = range(10, 151)  # that it asks for
LARGEST_RESULT = 199  # of an operation that `moves` considers
FOUR_NUMBERS = 0.95  # share of problems with four numbers, the rest has three
_HELD_OUT_SHARE = 16  # one problem in this many is never trained on

State = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Problem:
    """Numbers to combine, each exactly once, and the target to reach."""

    numbers: tuple[int, ...]
    target: int

    def __post_init__(self):
        if not self.numbers or any(n < 1 for n in (*self.numbers, self.target)):
            raise ValueError(f"numbers and target must be positive, got {self}")

    def prompt(self) -> str:
        """The text of the user message."""
        numbers = ", ".join(map(str, self.numbers))
        return (
            f"Use each of the numbers {numbers} exactly once to make {self.target}. "
            "Answer with the steps."
        )


@dataclasses.dataclass(frozen=True)
class Move:
    """One arithmetic step, `left op right = result`, and the numbers left after it."""

    left: int
    op: str
    right: int
    result: int
    state: State

    def __str__(self) -> str:
        return f"{self.left}{self.op}{self.right}={self.result}"


def moves(state: State, descending: bool = False) -> Iterator[Move]:
    """Every useful step from `state`, in the canonical order; `state` and results are sorted.

    Pairs go left to right, equal pairs once, operations in the order + - * /. Left out are results
    of 0 or above `LARGEST_RESULT`, and division by 1, which is multiplication by 1.
    """
    seen = set()
    for i, x in enumerate(state):
        for j in range(i + 1, len(state)):
            y = state[j]
            if (x, y) in seen:
                continue
            seen.add((x, y))
            rest = state[:i] + state[i + 1 : j] + state[j + 1 :]
            high, low = (x, y) if x >= y else (y, x)
            for op, left, right, result in (
                ("+", x, y, x + y),
                ("-", high, low, high - low),
                ("*", x, y, x * y),
                ("/", high, low, high // low if low > 1 and high % low == 0 else 0),
            ):
                if 0 < result <= LARGEST_RESULT:
                    after = tuple(sorted((*rest, result), reverse=descending))
                    yield Move(left, op, right, result, after)


def solve(problem: Problem) -> tuple[str, ...] | None:
    """The steps of the first solution in canonical order, None if there is none."""

    def search(state: State) -> tuple[str, ...] | None:
        if len(state) == 1:
            return () if state[0] == problem.target else None
        for move in moves(state):
            steps = search(move.state)
            if steps is not None:
                return (str(move), *steps)
        return None

    return search(tuple(sorted(problem.numbers)))


def reachable(numbers: tuple[int, ...]) -> set[int]:
    """Every target that `numbers` can make."""
    layer = {tuple(sorted(numbers))}
    for _ in numbers[1:]:
        layer = {move.state for state in layer for move in moves(state)}
    return {state[0] for state in layer}


def sample_problem(
    rng: random.Random,
    count: Literal[3, 4] | None = None,
    split: Literal["train", "held_out"] | None = None,
) -> Problem:
    """A random solvable problem of `count` numbers (None: mostly 4), of either split by default."""
    if count is None:
        count = 4 if rng.random() < FOUR_NUMBERS else 3
    while True:
        numbers = tuple(1 + _below(rng, LARGEST_NUMBER) for _ in range(count))
        problems = [Problem(numbers, t) for t in sorted(reachable(numbers)) if t in TARGETS]
        if split is not None:
            problems = [p for p in problems if is_held_out(p) == (split == "held_out")]
        if problems:
            return problems[_below(rng, len(problems))]


def held_out(n: int, seed: int = 0, count: Literal[3, 4] | None = None) -> list[Problem]:
    """`n` different problems that the bundled model was never trained on."""
    rng = random.Random(seed)
    problems: dict[tuple[State, int], Problem] = {}
    while len(problems) < n:
        problem = sample_problem(rng, count, split="held_out")
        problems.setdefault(_identity(problem), problem)
    return list(problems.values())


def is_held_out(problem: Problem) -> bool:
    """Whether `problem` belongs to evaluation, whatever the order of its numbers."""
    digest = hashlib.sha256(repr(_identity(problem)).encode()).digest()
    return digest[0] % _HELD_OUT_SHARE == 0


def check_answer(problem: Problem, text: str) -> bool:
    """Whether the last line `Answer: a+b=c, ...` of `text` solves `problem`.

    Every step must be true and take numbers that are given or left by earlier steps; in the end
    nothing but the target may be left. Division must be exact.
    """
    lines = re.findall(r"^Answer:(.*)$", text.replace("\r\n", "\n"), re.MULTILINE)
    if not lines:
        return False
    left = collections.Counter(problem.numbers)
    for step in lines[-1].split(","):
        match = re.fullmatch(r"\s*(\d{1,9}) ?([-+*/]) ?(\d{1,9}) ?= ?(\d{1,9})\s*", step, re.ASCII)
        if not match:
            return False
        x, y, result = int(match[1]), int(match[3]), int(match[4])
        left.subtract((x, y))
        if left[x] < 0 or left[y] < 0 or not _is_true(x, match[2], y, result):
            return False
        left[result] += 1
    return list(left.elements()) == [problem.target]


def _is_true(x: int, op: str, y: int, result: int) -> bool:
    if op == "/":
        return y != 0 and x == y * result
    return result == {"+": x + y, "-": x - y, "*": x * y}[op]


def _identity(problem: Problem) -> tuple[State, int]:
    return tuple(sorted(problem.numbers)), problem.target


def _below(rng: random.Random, n: int) -> int:
    """A random integer in [0, n); only `random()` is the same in every Python version."""
    return int(rng.random() * n)
