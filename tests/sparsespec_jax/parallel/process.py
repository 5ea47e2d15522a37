"""One of several processes that run engines together: `process.py NUMBER PROCESSES PORT SCENARIOS`.

Prints what each scenario has seen, as one line of JSON.
"""

import itertools
import json
import queue
import sys
import threading
from collections.abc import Callable

import jax
import numpy as np

from sparsespec_jax import config as config_module
from sparsespec_jax.config import SpeculationConfig
from sparsespec_jax.engine import intake as intake_module
from sparsespec_jax.engine.engine import Engine
from sparsespec_jax.engine.executor import Executor
from sparsespec_jax.kv import offload as offload_module
from sparsespec_jax.parallel import processes as processes_module
from sparsespec_jax.sampling.params import SamplingParams
from tests.engine_runs import run
from tests.sparsespec_jax.parallel.test_tensor_parallel import TOKEN_BYTES, make_engine
from tests.sparsespec_jax.test_lossless import prompts_and_params

DEVICES = 4
COMPILED = {}


def tokens(number: int) -> dict:
    """KV that moves, cycles as long as the first process finds best, requests without seeds."""
    offload_module.CHUNK_BYTES = 16 * TOKEN_BYTES // 2
    config_module.AUTO_KS = (4, 0)
    speculation = SpeculationConfig(k="auto", min_budget=12)
    engine = make_engine(DEVICES, speculation, kv_cache_memory=165 * TOKEN_BYTES // 2, seed=None)
    found = [entry["tokens"] for entry in run(engine, prompts_and_params())]
    unseeded = SamplingParams(temperature=0.9, max_tokens=8)
    requests = [(np.arange(9, 40), unseeded)] * 2
    drawn = [entry["tokens"] for entry in run(engine, requests)]
    stats = engine.stats()
    engine.close()
    return {"tokens": found, "drawn": drawn, "evicted": stats.kv.evicted}


def small_engine() -> Engine:
    engine = make_engine(DEVICES)
    engine._executor._compiled = COMPILED
    return engine


def last_event(engine: Engine, prompt: np.ndarray, on_start: Callable | None = None) -> dict:
    """How a long request ends; `on_start` is called when it has begun."""
    events = queue.SimpleQueue()
    params = SamplingParams(seed=1, max_tokens=220, ignore_eos=True)
    engine.submit(prompt, params, events.put)
    event = events.get(timeout=120)
    if on_start is not None:
        assert event.tokens
        threading.Thread(target=on_start).start()
    while event.finish_reason is None:
        event = events.get(timeout=120)
    return {"reason": event.finish_reason, "error": str(event.error)}


def diverged(number: int) -> dict:
    """The same calls, but for one token of a prompt."""
    engine = small_engine()
    seen = last_event(engine, np.array([7, 8, 9 + number]))
    return seen | closed(engine)


def missing(number: int) -> dict:
    """A call that only the first process makes."""
    intake_module.PATIENCE = 0.5
    engine = small_engine()

    def another():
        engine.submit([7, 8], SamplingParams(), lambda event: None)

    seen = last_event(engine, np.arange(6, 30), another if number == 0 else None)
    return seen | closed(engine)


def failing(number: int) -> dict:
    """A step that the second process cannot dispatch, and the first runs already."""
    dispatch, steps = Executor.dispatch, itertools.count()

    def fail(self, bucket, packed):
        if next(steps) == 5 and number == 1:
            raise MemoryError("no memory left")
        return dispatch(self, bucket, packed)

    Executor.dispatch = fail
    return last_event(small_engine(), np.arange(6, 30))


def stopped(number: int) -> dict:
    """The second process closes its engine in the middle of a run."""
    processes_module.GLANCE = 0.02
    engine = small_engine()
    seen = last_event(engine, np.arange(6, 30), engine.close if number == 1 else None)
    engine._thread.join(60)
    return seen | closed(engine)


def closed(engine: Engine) -> dict:
    """What a call says after the end."""
    engine.close()
    try:
        engine.submit([7], SamplingParams(), print)
    except RuntimeError as error:
        return {"closed": str(error)}
    return {}


def main() -> None:
    number, processes, port, scenarios = sys.argv[1:]
    jax.distributed.initialize(f"localhost:{port}", int(processes), int(number))
    seen = {name: globals()[name](int(number)) for name in scenarios.split(",")}
    print(json.dumps(seen), flush=True)


if __name__ == "__main__":
    main()
