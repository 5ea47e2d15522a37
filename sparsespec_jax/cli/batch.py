"""Jobs on their way through a model, each of their samples a request of its own."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from sparsespec_jax.cli.jobs import Job, Key, Template
from sparsespec_jax.cli.progress import Progress
from sparsespec_jax.cli.summary import Summary
from sparsespec_jax.sampling.params import SamplingParams, sample_seed

if TYPE_CHECKING:
    from sparsespec_jax.llm import LLM
    from sparsespec_jax.outputs import Completion, StreamOutput


@dataclasses.dataclass(frozen=True)
class Sample:
    """One of the `n` completions that a job asks for."""

    job: Job
    index: int

    @property
    def key(self) -> Key:
        return self.job.id, self.index

    def params(self, defaults: SamplingParams) -> SamplingParams:
        """Parameters of this sample alone: the same completion as among the n of its job."""
        params = dataclasses.replace(defaults, **self.job.params)
        seed = None if params.seed is None else sample_seed(params.seed, self.index)
        return dataclasses.replace(params, n=1, seed=seed)


def samples_of(jobs: Iterable[Job], finished: Iterable[Key] = ()) -> list[Sample]:
    """Every sample of `jobs` that is not in `finished`, in order."""
    finished = set(finished)
    samples = (Sample(job, index) for job in jobs for index in range(job.samples))
    return [sample for sample in samples if sample.key not in finished]


def run(
    llm: LLM,
    samples: Sequence[Sample],
    template: Template,
    summary: Summary,
    *,
    on_done: Callable[[Sample, Completion], None],
    on_text: Callable[[str], None] | None = None,
    quiet: bool = False,
) -> bool:
    """Generate `samples` and call `on_done` as each ends; false if Ctrl-C ended it early.

    A sample that cannot run, such as one whose prompt is too long, ends with an error of its own.
    With `on_text`, which gets all text as it comes, there is no progress line.
    """
    enabled = on_text is None and not quiet
    try:
        with Progress(len(samples), llm.engine.stats, enabled=enabled) as progress:
            for sample, news in _news(llm, samples, template):
                progress.update(news)
                if on_text is not None and news.text:
                    on_text(news.text)
                if news.completion is not None:
                    summary.add(sample.job.id, news.completion)
                    with progress.aside():
                        on_done(sample, news.completion)
    except KeyboardInterrupt:
        return False
    return True


def _news(
    llm: LLM, samples: Sequence[Sample], template: Template
) -> Iterator[tuple[Sample, StreamOutput]]:
    sent, prompts, params = [], [], []
    job, token_ids = None, []
    for sample in samples:
        try:
            if sample.job is not job:
                token_ids, job = sample.job.token_ids(llm, template), sample.job
            params.append(sample.params(llm.default_params))
        except ValueError as error:
            yield sample, _refusal(error)
            continue
        prompts.append(token_ids)
        sent.append(sample)
    with contextlib.closing(llm.stream(prompts, params, errors="report")) as stream:
        for news in stream:
            yield sent[news.prompt_index], news


def _refusal(error: ValueError) -> StreamOutput:
    from sparsespec_jax.outputs import Completion, StreamOutput  # imports JAX

    return StreamOutput(-1, 0, "", (), Completion(0, "", (), "error", error=error))
