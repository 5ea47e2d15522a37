"""The figures of the bundled model's card, measured again with the engine.

    python -m checkpoints.countdown.eval

Solve rate, lengths, accepted drafts and speed on held-out problems, sampled as the model card says.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import jax

from sparsespec_jax import LLM, Completion, EngineConfig, SamplingParams, SpeculationConfig
from sparsespec_jax.countdown import Problem, check_answer, held_out

QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9)


def generate(
    model: Path | None, problems: Sequence[Problem], args: argparse.Namespace
) -> tuple[list[Completion], float]:
    """One completion a problem, and the seconds they took (without compilation)."""
    params = [
        SamplingParams(temperature=args.temperature, seed=args.seed + index)
        for index in range(len(problems))
    ]
    speculation = SpeculationConfig(
        method=args.method, k=args.k, score_rule=args.score_rule, min_budget=args.min_budget
    )
    engine = EngineConfig(max_batch=args.batch, batch_buckets=(args.batch,))
    with LLM(model, engine=engine, speculation=speculation) as llm:
        prompts = [llm.chat_prompt(problem.prompt()) for problem in problems]
        llm.warmup()
        began = time.perf_counter()
        outputs = llm.generate(prompts, params)
        return [output.outputs[0] for output in outputs], time.perf_counter() - began


def summarise(
    problems: Sequence[Problem], completions: Sequence[Completion], seconds: float
) -> dict:
    pairs = list(zip(problems, completions, strict=True))
    solved = [check_answer(problem, completion.text) for problem, completion in pairs]
    lengths = sorted(len(completion.token_ids) for completion in completions)
    cycles = sum(completion.stats.full_cycles for completion in completions)
    accepted = sum(completion.stats.full_accepted for completion in completions)
    return {
        "problems": len(problems),
        "solve_rate": sum(solved) / len(solved),
        "ended": sum(c.finish_reason == "stop" for c in completions) / len(completions),
        "tokens": sum(lengths),
        "length_quantiles": {str(q): lengths[int(q * len(lengths))] for q in QUANTILES},
        "length_mean": statistics.mean(lengths),
        "mean_accepted": accepted / cycles if accepted else None,
        "tokens_per_second": sum(lengths) / seconds,
    }


def main(argv: Sequence[str] | None = None) -> dict:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="checkpoint directory; default: the bundled one")
    parser.add_argument("--problems", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0, help="of the sampling, not of the problems")
    parser.add_argument("--temperature", type=float, default=0.65)
    parser.add_argument("--method", default="pillar", help="how to draft; none: plain decoding")
    parser.add_argument("--k", type=int, default=8, help="tokens drafted in a cycle")
    parser.add_argument("--min-budget", type=int, default=128, help="positions a draft reads")
    parser.add_argument("--score-rule", default="shifted", help="how queries' scores combine")
    parser.add_argument("--batch", type=int, default=64, help="requests that run at once")
    parser.add_argument("--json", type=Path, help="append the figures to this file")
    args = parser.parse_args(argv)

    problems = held_out(args.problems)
    completions, seconds = generate(args.model, problems, args)
    figures = summarise(problems, completions, seconds)
    print(f"solve rate      {figures['solve_rate']:.1%} of {len(problems)} held-out problems")
    print(f"ended           {figures['ended']:.1%} by themselves")
    quantiles = "  ".join(f"{q}: {n}" for q, n in figures["length_quantiles"].items())
    print(f"length          mean {figures['length_mean']:.0f}; quantiles {quantiles}")
    if figures["mean_accepted"] is not None:
        print(f"mean accepted   {figures['mean_accepted']:.2f} of {args.k}")
    print(f"speed           {figures['tokens_per_second']:.0f} tokens/s")
    if args.json:
        command = f"python -m checkpoints.countdown.eval {' '.join(argv or sys.argv[1:])}"
        device = jax.devices()[0].device_kind
        row = {"command": command, "device": device, "jax": jax.__version__, **figures}
        with args.json.open("a") as file:
            file.write(json.dumps(row) + "\n")
    return figures


if __name__ == "__main__":
    main()
