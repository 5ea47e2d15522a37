"""Without arguments: the bundled model, here the tiny one, solves sample problems."""

import pytest

from sparsespec_jax import Completion
from sparsespec_jax.cli import batch, demo
from sparsespec_jax.cli.jobs import Job
from sparsespec_jax.countdown import is_held_out, solve
from sparsespec_jax.generate import main


def test_no_arguments_solve_a_few_problems(load, capsys, monkeypatch):
    monkeypatch.setattr(demo, "PROBLEMS", demo.PROBLEMS[:3])
    assert main([]) == 0
    assert [asked["model"] for asked in load] == [None]
    output = capsys.readouterr()
    assert output.out.startswith("Problem 1: Use each of the numbers ")
    assert "\n2. " in output.out
    assert "\n3. " in output.out
    assert output.out.endswith(" of 3 answers are right.\n")
    assert "requests       3 of 3\n" in output.err


def test_the_command_line_applies_to_the_demo_too(load, capsys, monkeypatch):
    monkeypatch.setattr(demo, "PROBLEMS", demo.PROBLEMS[:1])
    assert main(["--max-tokens", "1", "--ignore-eos", "--k", "2", "--max-batch", "3"]) == 0
    assert "(wrong, 1 tokens)" in capsys.readouterr().out
    assert load[0]["speculation"].k == 2
    assert load[0]["engine"].max_batch == 3


@pytest.mark.parametrize("right", [True, False])
def test_answers_are_checked(right, capsys):
    problem = demo.PROBLEMS[0]
    steps = ", ".join(solve(problem)) if right else "none"
    score = demo.Score({1: problem})
    completion = Completion(0, f"<think>\n</think>\nAnswer: {steps}", (5, 6), "stop")
    score.judge(batch.Sample(Job(1, problem.prompt()), 0), completion)
    verdict = "right" if right else "wrong"
    assert f"Answer: {steps}  ({verdict}, 2 tokens)" in capsys.readouterr().out
    assert (score.judged, score.right) == (1, right)


def test_the_sample_problems_were_never_trained_on():
    assert all(is_held_out(problem) and solve(problem) for problem in demo.PROBLEMS)
