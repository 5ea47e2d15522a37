"""Mean accepted drafts by the rule that selects positions, in the engine, with real weights.

    python -m benchmarks.selection_rules --smollm2 SmolLM2-135M-Instruct.Q4_1.gguf --json FILE

Runs `checkpoints.countdown.eval` (bundled model, held-out problems) and `benchmarks.acceptance`
(chat prompts) once for each rule. None of the rules changes what is generated.
"""

from __future__ import annotations

import argparse
import json
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import acceptance
from checkpoints.countdown import eval as countdown
from sparsespec_jax import drafters
from sparsespec_jax.countdown import held_out
from sparsespec_jax.drafters.base import Verified
from sparsespec_jax.drafters.pillar import PillarDrafter
from sparsespec_jax.drafters.score_rules import SCORE_RULES, Rule, Weights, paper, shifted

PAGE = 4


def first_and_last(queries: jax.Array, committed: jax.Array, n: int) -> Weights:
    """The mean of two queries: scores of the others need not be kept."""
    query, last = jnp.arange(n), queries[:, None] - 1
    ends = ((query == 0) | (query == last)) & (query <= last)
    return Weights(ends / jnp.maximum(ends.sum(axis=1, keepdims=True), 1.0), None)


def pages(ranking: jax.Array) -> jax.Array:
    """Every position counts as much as its page; only the last page of a list may be cut."""
    context = ranking.shape[-1]
    padded = jnp.pad(ranking.astype(jnp.float32), [(0, 0)] * 3 + [(0, -context % PAGE)])
    sums = padded.reshape(*ranking.shape[:3], -1, PAGE).sum(axis=-1)
    return jnp.repeat(sums, PAGE, axis=-1)[..., :context]


class Selection(NamedTuple):
    rule: Rule
    adjust: Callable[[jax.Array], jax.Array] = lambda ranking: ranking

    def drafter(self) -> type[PillarDrafter]:
        class Drafter(PillarDrafter):
            def _ranking(drafter, verified: Verified) -> jax.Array:
                return self.adjust(super()._ranking(verified))

        return Drafter


SELECTIONS = {
    "paper": Selection(Rule(paper, shared=False)),
    "paper, first and last query": Selection(Rule(first_and_last, shared=False)),
    "paper, one list a layer": Selection(Rule(paper, shared=True)),
    "paper, pages of 4": Selection(Rule(paper, shared=False), pages),
    "shifted, one list a layer": Selection(Rule(shifted, shared=True)),
    "shifted, a list for each head": Selection(Rule(shifted, shared=False)),
    "shifted, pages of 4": Selection(Rule(shifted, shared=False), pages),
}


def rows(args: Namespace) -> Iterator[dict]:
    """The rules on each model. Which rule the configuration names does not matter."""
    settings = {"k": args.k, "min_budget": args.min_budget, "temperature": args.temperature}
    speculation = {"method": "pillar", "score_rule": "paper"}
    for name in args.rules or SELECTIONS:
        selection = SELECTIONS[name]
        with (
            mock.patch.dict(SCORE_RULES, paper=selection.rule),
            mock.patch.object(drafters, "PillarDrafter", selection.drafter()),
        ):
            if args.problems:
                more = Namespace(**settings, **speculation, seed=0, batch=args.batch)
                yield {"rule": name, "model": "countdown", **settings, **on_countdown(args, more)}
            if args.smollm2:
                more = Namespace(**settings, **speculation, model=args.smollm2, tokens=args.tokens)
                measured = acceptance.measure(more)
                yield {"rule": name, "model": Path(args.smollm2).stem, **settings, **measured}


def on_countdown(args: Namespace, more: Namespace) -> dict:
    problems = held_out(args.problems)
    completions, seconds = countdown.generate(None, problems, more)
    stats = [completion.stats for completion in completions]
    rates = np.sum([s.accepted_at for s in stats], 0) / np.sum([s.drafted_at for s in stats], 0)
    return {
        **countdown.summarise(problems, completions, seconds),
        "accepted_at": [round(float(rate), 3) for rate in rates],
        "cycles": sum(s.full_cycles for s in stats),
        "seconds": seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rules", nargs="+", choices=SELECTIONS, help="default: all")
    parser.add_argument("--problems", type=int, default=500, help="of Countdown; 0: none")
    parser.add_argument("--batch", type=int, default=64, help="of Countdown")
    parser.add_argument("--smollm2", help="checkpoint for the chat prompts; default: none of them")
    parser.add_argument("--tokens", type=int, default=3000, help="for each chat prompt")
    parser.add_argument("--k", type=int, default=8)
    parser.add_argument("--min-budget", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.65)
    parser.add_argument("--json", type=Path, help="append the rows to this file")
    args = parser.parse_args()
    for row in rows(args):
        row |= {"device": jax.devices()[0].device_kind, "jax": jax.__version__}
        print(json.dumps(row), flush=True)
        if args.json:
            with args.json.open("a") as file:
                file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
