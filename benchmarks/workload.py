"""Requests as long as those of reasoning models on AIME problems, and drafts accepted at random."""

from __future__ import annotations

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np

from sparsespec_jax.engine import emission, host_verification

# Of the drafts of a cycle, by place, on SmolLM2-135M-Instruct: 6.1 of 8.
ACCEPTED = (0.98, 0.94, 0.87, 0.81, 0.74, 0.65, 0.60, 0.52)


@dataclasses.dataclass(frozen=True)
class Workload:
    """Prompt and output tokens of each request, and the output tokens that are there already."""

    prompts: np.ndarray
    outputs: np.ndarray
    done: np.ndarray
    longest: int

    @classmethod
    def aime(cls, count: int, scale: float, midway: int = 0) -> Workload:
        """`midway`: requests that are running, the first ones."""
        rng = np.random.default_rng(0)
        mean, std, longest = 13_000 * scale, 7_600 * scale, int(32_768 * scale)
        shape = (mean / std) ** 2
        outputs = rng.gamma(shape, mean / shape, count).clip(8, longest).astype(int)
        done = np.zeros(count, int)
        if midway:
            many = rng.gamma(shape, mean / shape, 8 * midway).clip(8, longest)
            outputs[:midway] = rng.choice(many, midway, p=many / many.sum())
            done[:midway] = rng.random(midway) * outputs[:midway]
        return cls(rng.integers(80, 240, count), outputs, done, longest)


def draw_acceptance(probabilities: tuple[float, ...]) -> None:
    """From now on drafts are accepted at random: by a hash of the target's tokens, anywhere."""

    def accepted(xp, drafts, n_drafts, sampled):
        words = sampled.astype(xp.uint32).sum(1, dtype=xp.uint32) * xp.uint32(2654435761)
        u = ((words ^ (words >> 15)) * xp.uint32(2246822519) >> 8).astype(xp.float32) / 2**24
        places = xp.arange(drafts.shape[1])
        thresholds = xp.asarray(probabilities, xp.float32)[: drafts.shape[1]]
        found = (u[:, None] < thresholds) & (places < n_drafts[:, None])
        return found.sum(1, dtype=xp.int32)

    emission.accept_coupled = lambda drafts, n, sampled: (
        accepted(jnp, drafts, n, sampled),
        sampled,
    )
    host_verification.accept_coupled = functools.partial(accepted, np)
