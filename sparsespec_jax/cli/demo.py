"""What the command does without arguments: the bundled model plays Countdown."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from sparsespec_jax.cli import batch, terminal
from sparsespec_jax.cli.jobs import Job, Template
from sparsespec_jax.cli.model import load
from sparsespec_jax.cli.options import Options
from sparsespec_jax.cli.summary import Summary
from sparsespec_jax.countdown import Problem, check_answer

if TYPE_CHECKING:
    from sparsespec_jax.outputs import Completion

# None of them was trained on. Searches of some hundred tokens, and one of well over a thousand.
PROBLEMS = (
    Problem((17, 28, 14, 16), 36),
    Problem((25, 21, 2, 30), 128),
    Problem((29, 15, 26, 8), 65),
    Problem((15, 27, 8, 10), 122),
    Problem((4, 7, 25, 29), 26),
    Problem((11, 29, 20, 19), 72),
    Problem((2, 23, 22, 20), 41),
    Problem((18, 21, 13, 12), 75),
)
SAMPLING = {"seed": 0}
# One row count, so that few steps have to be compiled: on a CPU that is much of the time.
ENGINE = {"max_batch": len(PROBLEMS), "batch_buckets": (len(PROBLEMS),)}


def play(options: Options) -> int:
    """Solve one problem before the user's eyes, then the others as a batch; the exit code."""
    problems = dict(enumerate(PROBLEMS, 1))
    params = {**SAMPLING, **options.sampling}
    jobs = [Job(number, problem.prompt(), params) for number, problem in problems.items()]
    samples = batch.samples_of(jobs)
    score = Score(problems)
    summary = Summary(len(samples))
    template = Template(arguments=options.template_args)
    with load(options, **ENGINE) as llm:
        try:
            terminal.write(f"Problem 1: {jobs[0].prompt}\n\n")
            first, others = samples[:1], samples[1:]
            completed = batch.run(
                llm, first, template, summary, on_done=score.judge_first, on_text=terminal.write
            ) and batch.run(
                llm, others, template, summary, on_done=score.judge, quiet=options.quiet
            )
        finally:
            if not options.quiet:
                terminal.note("\n" + summary.table(llm.engine.stats()))
        terminal.write(f"\n{score.right} of {score.judged} answers are right.\n")
        return summary.exit_code(completed)


@dataclasses.dataclass
class Score:
    """Judges answers, and says so."""

    problems: dict[int, Problem]
    judged: int = 0
    right: int = 0

    def judge_first(self, sample: batch.Sample, completion: Completion) -> None:
        terminal.write(f"\n\n{self._verdict(sample, completion)}\n")
        terminal.write("\nThe other problems at once:\n")

    def judge(self, sample: batch.Sample, completion: Completion) -> None:
        problem = self.problems[sample.job.id]
        answer = completion.text.strip().rpartition("\n")[2][:60]
        task = f"{', '.join(map(str, problem.numbers))} to make {problem.target}"
        verdict = self._verdict(sample, completion)
        terminal.write(f"{sample.job.id}. {task}: {answer}  {verdict}\n")

    def _verdict(self, sample: batch.Sample, completion: Completion) -> str:
        right = check_answer(self.problems[sample.job.id], completion.text)
        self.judged += 1
        self.right += right
        tokens = len(completion.token_ids)
        return f"({'right' if right else 'wrong'}, {tokens:,} tokens)"
