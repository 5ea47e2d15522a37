"""SparseSpec in JAX: lossless self-speculative decoding with sparse attention."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sparsespec_jax.config import EngineConfig, SpeculationConfig
    from sparsespec_jax.llm import LLM
    from sparsespec_jax.outputs import Completion, RequestOutput, StreamOutput
    from sparsespec_jax.parallel.sharding import Placement
    from sparsespec_jax.sampling.params import SamplingParams

__all__ = [
    "LLM",
    "Completion",
    "EngineConfig",
    "Placement",
    "RequestOutput",
    "SamplingParams",
    "SpeculationConfig",
    "StreamOutput",
]

_HOMES = {
    "LLM": "sparsespec_jax.llm",
    "Completion": "sparsespec_jax.outputs",
    "EngineConfig": "sparsespec_jax.config",
    "Placement": "sparsespec_jax.parallel.sharding",
    "RequestOutput": "sparsespec_jax.outputs",
    "SamplingParams": "sparsespec_jax.sampling.params",
    "SpeculationConfig": "sparsespec_jax.config",
    "StreamOutput": "sparsespec_jax.outputs",
}


def __getattr__(name: str) -> Any:
    """Import a public name on first use (PEP 562): `generate --help` need not wait for JAX."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
