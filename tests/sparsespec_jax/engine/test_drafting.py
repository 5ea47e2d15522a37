"""What the engine tells adaptive drafting: the times of ordinary steps, and nothing else's."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from sparsespec_jax.config import EngineConfig, SpeculationConfig
from sparsespec_jax.engine.adaptive import Choice
from sparsespec_jax.engine.drafting import Drafting
from sparsespec_jax.engine.plan import Bucket
from sparsespec_jax.engine.planned import PlannedStep
from sparsespec_jax.kv.space import Forget

CHOICE = Choice(8)
BUCKET = Bucket(56, 8, 0, 4096, False, False, -1)
ORDINARY = PlannedStep(BUCKET, np.zeros(0), [], [], [], 64, CHOICE, 64, 64_000, 128, 0)
SECONDS = 0.006


class Run:
    """Steps that take as long as is said, read one after the other."""

    def __init__(self):
        speculation = SpeculationConfig(k="auto")
        clock = {"clock": lambda: self._now}
        self.drafting = Drafting(speculation, EngineConfig(), alone=True, **clock)
        self._now = 0.0
        self._compiled = 0

    def step(self, seconds: float, *, compiled: int = 0, **changes) -> None:
        self._now += seconds
        self._compiled += compiled
        self.drafting.note_step(dataclasses.replace(ORDINARY, **changes), self._compiled)

    def pause(self, seconds: float) -> None:
        self.drafting.pause()
        self._now += seconds


DISTURBANCES = {
    "a prompt": lambda run: run.step(0.05, bucket=BUCKET._replace(chunks=8)),
    "moves of KV": lambda run: run.step(0.05, moves=[Forget(0)]),
    "another choice": lambda run: run.step(0.05, choice=Choice(4)),
    "compiling": lambda run: run.step(0.05, compiled=1),
    "nothing to do": lambda run: run.pause(0.05),
}


@pytest.mark.parametrize("disturb", DISTURBANCES.values(), ids=DISTURBANCES)
def test_what_happens_between_ordinary_steps_is_not_in_their_times(disturb):
    run = Run()
    for _ in range(7):
        run.step(SECONDS)
        run.step(SECONDS)
        disturb(run)
    assert run.drafting.choice == CHOICE, "nothing else has been tried yet"
    assert run.drafting.workload.seconds(CHOICE) == pytest.approx(SECONDS)
