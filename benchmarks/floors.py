"""What a step cannot be faster than: the time to read what it must, and for its matmuls."""

from __future__ import annotations

import argparse
import math

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.timing import read_bandwidth, seconds
from sparsespec_jax.config import SpeculationConfig
from sparsespec_jax.engine.plan import PlanLayout
from sparsespec_jax.models.config import ModelConfig
from sparsespec_jax.models.parameters import describe


def floors(
    args: argparse.Namespace,
    model: ModelConfig,
    dtype: jnp.dtype,
    speculation: SpeculationConfig,
    plans: list[np.ndarray],
    layout: PlanLayout,
) -> dict:
    """What a step cannot be faster than, at the speeds given or measured just now."""
    live = [layout.unpack(packed) for packed in plans]
    drafts = np.mean([(plan.drafts[:, 0] != layout.trash_row).sum() for plan in live])
    verifies = np.mean([(plan.verifies[:, 0] != layout.trash_row).sum() for plan in live])
    tokens = float(drafts + verifies * layout.n_queries)
    # A draft also reads its own cycle's drafts up to itself: (k + 1) / 2 of them on average.
    draft_reads = speculation.budget(args.context) + layout.n_queries / 2
    kv_bytes = model.kv_bytes_per_token(dtype) * (drafts * draft_reads + verifies * args.context)

    specs = describe(model)
    matrices = [*jax.tree.leaves(specs["layers"]), specs.get("lm_head", specs["embedding"])]
    weights = sum(math.prod(spec.shape) for spec in matrices if spec.fan_in > 0)
    bandwidth, flops = 1e12 * (args.bandwidth or 0), 1e12 * (args.flops or 0)
    on_gpu = jax.default_backend() == "gpu"
    bandwidth = bandwidth or read_bandwidth(1 << 30 if on_gpu else 1 << 20, repeats=10)
    flops = flops or matmul_flops(8192 if on_gpu else 256, dtype)
    matmuls = max(2 * weights * tokens / flops, weights * dtype.itemsize / bandwidth)
    return {
        "tokens_per_step": tokens,
        "rows_per_step": layout.bucket.drafts + layout.bucket.verifies * layout.n_queries,
        "bandwidth": bandwidth / 1e12,
        "flops": flops / 1e12,
        "kv_floor_ms": 1e3 * kv_bytes / bandwidth / args.tp,
        "matmul_floor_ms": 1e3 * matmuls / args.tp,
    }


def matmul_flops(size: int, dtype: jnp.dtype) -> float:
    """Operations a second of one large matmul."""
    a, b = (jax.random.normal(jax.random.key(i), (size, size), dtype) for i in range(2))
    return 2 * size**3 / seconds(jax.jit(jnp.matmul), a, b, repeats=10)
