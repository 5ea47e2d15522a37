"""Mean accepted drafts on open-ended chat prompts, with real weights.

    python -m benchmarks.acceptance --model SmolLM2-135M-Instruct.Q4_1.gguf --min-budget 64

Eight prompts, each continued for `--tokens` tokens whatever the model says (EOS is ignored, so that
all contexts grow equally long).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import jax
import numpy as np

from sparsespec_jax import LLM, EngineConfig, SamplingParams, SpeculationConfig

PROMPTS = (
    "Explain step by step how a bicycle stays upright while it is moving, and then explain it "
    "again for a child.",
    "A train leaves a station at 60 miles per hour and another follows an hour later at 80 miles "
    "per hour. When does the second catch up? Show all steps and check the answer.",
    "Write a long story about a lighthouse keeper who finds a map.",
    "List the planets of the solar system and describe each of them in detail.",
    "Write a detailed essay on the causes of the industrial revolution.",
    "Explain how to bake bread, from buying flour to serving, with the reasons for each step.",
    "Describe the rules of chess to someone who has never seen a board, then give an example game "
    "with comments.",
    "Write a dialogue between a doctor and a patient about sleep, with at least thirty exchanges.",
)


def measure(args: argparse.Namespace) -> dict:
    batch = len(PROMPTS)
    engine = EngineConfig(
        max_batch=batch, batch_buckets=(batch,), max_context=args.tokens + 256, kv_cache_memory=0.3
    )
    speculation = SpeculationConfig(
        method=args.method, k=args.k, score_rule=args.score_rule, min_budget=args.min_budget
    )
    params = SamplingParams(
        temperature=args.temperature, seed=1, max_tokens=args.tokens, ignore_eos=True
    )
    with LLM(args.model, engine=engine, speculation=speculation) as llm:
        llm.warmup()
        began = time.perf_counter()
        outputs = llm.generate([llm.chat_prompt(prompt) for prompt in PROMPTS], params)
        seconds = time.perf_counter() - began
        steps = llm.engine.stats().dispatch.steps
    stats = [output.outputs[0].stats for output in outputs]
    row = {"seconds": seconds, "tokens": sum(s.output_tokens for s in stats), "steps": steps}
    if args.method == "none":
        return row
    cycles = sum(s.full_cycles for s in stats)
    rates = np.sum([s.accepted_at for s in stats], 0) / np.sum([s.drafted_at for s in stats], 0)
    return {
        "mean_accepted": sum(s.full_accepted for s in stats) / cycles,
        "per_request": [round(s.mean_accepted, 2) for s in stats],
        "accepted_at": [round(float(rate), 3) for rate in rates],
        "cycles": cycles,
        **row,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--method", default="pillar")
    parser.add_argument("--k", type=int, default=8)
    parser.add_argument("--score-rule", default="shifted")
    parser.add_argument("--min-budget", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.65)
    parser.add_argument("--tokens", type=int, default=3000, help="tokens for each prompt")
    parser.add_argument("--json", type=Path, help="append the result to this file")
    args = parser.parse_args()
    command = f"python -m benchmarks.acceptance {' '.join(sys.argv[1:])}"
    device = jax.devices()[0].device_kind
    row = {"command": command, "device": device, "jax": jax.__version__, **measure(args)}
    print(json.dumps(row, indent=1))
    if args.json:
        with args.json.open("a") as file:
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
