"""What an engine is doing and did, in numbers."""

from __future__ import annotations

import dataclasses

from sparsespec_jax.engine.executor import DispatchStats
from sparsespec_jax.kv.manager import KvStats


@dataclasses.dataclass
class StepCounters:
    """Sums over the engine's life.

    step_tokens: of all steps; `step_queries` counts padding, too.
    steps_with_moves: before which KV moved between pool and host memory.
    stalled: how often a row sat out a step for want of slots.
    device_wait_seconds: the engine's thread waited for results, the host's verification included.
    hidden_seconds: the host verified while the device still ran a later step.
    """

    output_tokens: int = 0
    step_tokens: int = 0
    step_queries: int = 0
    steps_with_moves: int = 0
    stalled: int = 0
    device_wait_seconds: float = 0.0
    hidden_seconds: float = 0.0


@dataclasses.dataclass(kw_only=True)
class EngineStats(StepCounters):
    """A snapshot of the engine: requests, KV slots, and what its steps did so far.

    parked: requests that sit out while their KV makes room. tokens_offloaded: in host memory.
    """

    running: int
    waiting: int
    parked: int
    slots: int
    slots_used: int
    tokens_offloaded: int
    kv: KvStats
    dispatch: DispatchStats
