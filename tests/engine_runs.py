"""Small engines, requests that run through them, and what came out of two runs, compared."""

import queue

import jax
import numpy as np

from sparsespec_jax.engine.engine import Engine
from sparsespec_jax.models.config import ModelConfig
from sparsespec_jax.models.parameters import Params, init_params
from sparsespec_jax.sampling.params import SamplingParams

# Of an engine with few steps to compile.
SMALL = dict(
    max_batch=6,
    prefill_chunk=16,
    prefill_rows=2,
    batch_buckets=(6,),
    context_buckets=(384,),
    seed=0,
)


def sharp_params(model: ModelConfig) -> Params:
    """Random weights, larger than usual: attention has favourites, so that drafts can be wrong."""
    return jax.tree.map(lambda w: 1.6 * w, init_params(model, jax.random.key(1)))


def run(engine: Engine, requests: list[tuple[np.ndarray, SamplingParams]]) -> list[dict]:
    """Tokens, logprobs, top ids, finish reason and stats of each request, run all at once."""
    events = queue.SimpleQueue()
    with engine._intake.wake:  # the engine takes all of them before its next step, or none
        submitted = [engine.submit(prompt, params, events.put) for prompt, params in requests]
    found = {
        request.request_id: dict(tokens=[], logprobs=[], top=[], reason=None, stats=request.stats)
        for request in submitted
    }
    running = len(found)
    while running:
        event = events.get(timeout=300)
        assert event.error is None, event.error
        entry = found[event.request_id]
        entry["tokens"] += event.tokens
        for logprobs in event.logprobs or ():
            entry["logprobs"].append(logprobs.logprob)
            entry["top"].append([token for token, _ in logprobs.top])
        if event.finish_reason is not None:
            entry["reason"] = event.finish_reason
            running -= 1
    return list(found.values())


def assert_same(found: list[dict], expected: list[dict]) -> None:
    for number, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert a["tokens"] == b["tokens"], f"request {number}"
        assert a["reason"] == b["reason"], f"request {number}"
        assert a["top"] == b["top"], f"request {number}"
        np.testing.assert_allclose(a["logprobs"], b["logprobs"], atol=1e-4, err_msg=f"{number}")
