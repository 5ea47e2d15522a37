"""Drafters: one file each, behind the interface of `base`."""

from __future__ import annotations

from sparsespec_jax.config import Implementation, SpeculationConfig
from sparsespec_jax.drafters.base import Drafter
from sparsespec_jax.drafters.none import NoDrafter
from sparsespec_jax.drafters.pillar import PillarDrafter
from sparsespec_jax.models.config import ModelConfig


def make_drafter(
    model: ModelConfig,
    speculation: SpeculationConfig,
    max_context: int,
    implementation: Implementation,
) -> Drafter:
    """The drafter that `speculation.method` names."""
    if speculation.method == "none":
        return NoDrafter()
    return PillarDrafter(model, speculation, max_context, implementation)
