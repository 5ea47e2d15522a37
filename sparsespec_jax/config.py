"""How the engine runs: frozen dataclasses, one per concern, checked when they are made."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any, Literal, get_args

KvPolicy = Literal["aggressive", "conservative", "recompute"]
Phases = Literal["balanced", "random", "lockstep"]
Overlap = Literal["resident", "delayed", "sync"]
Verification = Literal["coupled", "rejection"]
Method = Literal["pillar", "none"]
ScoreRule = Literal["paper", "shifted"]
Implementation = Literal["auto", "pallas", "xla"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]

AUTO_KS = (8, 4, 2, 0)
AUTO_SPARSITIES = (0.05, 0.025, 0.1)  # in the order in which they are tried


@dataclasses.dataclass(frozen=True)
class SpeculationConfig:
    """How tokens are drafted and verified. None of this changes what is generated, only how fast.

    Attributes:
      method: `pillar` drafts with sparse attention over the positions that the last verification
        scored highest (PillarAttn, SparseSpec 2026); `none` is plain decoding.
      k: tokens drafted in a cycle, 1 to 15, or `auto`: 8, 4, 2 or none, whatever emits most tokens
        a second as measured while running (compiles steps for each).
      sparsity: share of the KV cache that a draft reads, or `auto`: 0.025, 0.05 or 0.1, by the same
        measure (compiles no further steps).
      min_budget: positions that a draft reads at least, whatever the share.
      score_rule: how the scores of a verification's queries combine into one ranking: `paper` is
        their mean, as published; `shifted` also expects attention to move on with the text.
      verification: `coupled` shares the sampling noise between draft and target, so that the
        output is a function of prompt, parameters and seed alone; `rejection` is the standard rule
        (Leviathan et al., 2023).
    """

    method: Method = "pillar"
    k: int | Literal["auto"] = 8
    sparsity: float | Literal["auto"] = 0.05
    min_budget: int = 128
    score_rule: ScoreRule = "shifted"
    verification: Verification = "coupled"

    def __post_init__(self):
        _check_choice("method", self.method, Method)
        _check_choice("score_rule", self.score_rule, ScoreRule)
        _check_choice("verification", self.verification, Verification)
        if self.k != "auto":
            _check_int("k", self.k, 1, 15, or_else="`auto`")
        _check_int("min_budget", self.min_budget, 1)
        if self.sparsity != "auto":
            _check_float("sparsity", self.sparsity, 0.0, 1.0, open_low=True, or_else="`auto`")

    @property
    def ks(self) -> tuple[int, ...]:
        """The lengths that a cycle can have, the largest first; 0 drafts nothing."""
        if self.method == "none":
            return (0,)
        return AUTO_KS if self.k == "auto" else (self.k,)

    @property
    def sparsities(self) -> tuple[float, ...]:
        """The shares of the KV cache that drafts can read; the first is where a search begins."""
        if self.sparsity != "auto":
            return (self.sparsity,)
        return AUTO_SPARSITIES[:1] if self.method == "none" else AUTO_SPARSITIES

    def budget(self, context: int, sparsity: int = 0) -> int:
        """Positions that a draft over `context` cached tokens reads; `sparsity`: which of them."""
        share = self.sparsities[sparsity]
        return min(context, max(self.min_budget, math.ceil(share * context)))

    def cycle_reads(self, context: int, k: int, sparsity: int = 0) -> int:
        """Of `context` cached tokens, by k drafts and the verification after them."""
        return k * self.budget(context, sparsity) + context


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """Sizes and modes of the engine.

    Attributes:
      tensor_parallel_size: devices that share the model, each with a part of every layer's heads
        and columns, of the vocabulary and of the KV pool.
      max_batch: requests that run at once.
      max_context: tokens of prompt and output that one request may hold; None: what the model was
        trained for.
      kv_cache_memory: memory of each device for the KV pool: a fraction (0, 1) of what is free
        once the weights are loaded, or a number of bytes. None: 0.85 on a GPU; on a CPU, what
        `max_batch` full contexts need, up to 2 GiB.
      max_host_kv_bytes: host memory for KV that leaves the device for a while; None: half of what
        is free, as far as `max_batch` full contexts can need it; 0: none, such KV is computed
        again.
      kv_policy: `aggressive` admits requests while there are slots, and moves the KV of the
        youngest to host memory when they run out; `recompute` drops it and computes it again;
        `conservative` admits only what fits at its maximum length, or at the length that
        `Engine.submit` is told to expect.
      phases: `balanced` spreads the rows over the phases of the cycle, so that all steps have about
        as many tokens; `random` and `lockstep` (all draft, then all verify) are for comparison.
      dtype: of weights and KV cache: `auto` (the checkpoint's; float32 on a CPU), `float32`,
        `bfloat16` or `float16`.
      prefill_chunk: prompt tokens in one prefill row of a step; None: 256 on a GPU, 64 on a CPU.
      prefill_rows: prefill rows in one step, so that a step takes up to `prefill_chunk *
        prefill_rows` prompt tokens; None: 8 on a GPU, 2 on a CPU.
      overlap: `resident` verifies on the device and dispatches ahead of the results; `delayed`
        verifies on the host while the next step runs without the rows concerned, as SparseSpec
        does; `sync` waits for each step (debugging). The output is the same.
      implementation: of the kernels: `pallas` on GPUs and `xla` elsewhere by default.
      batch_buckets, context_buckets: row counts and context widths that steps are compiled for;
        None: `max_batch` and three quarters, half of it and so on; `max_context`, a quarter of it
        and so on, down to 1K on a CPU and 32K on a GPU.
      seed: the seeds of requests without one derive from it; None: from the operating system.
      compilation_cache_dir: keeps compiled steps between runs; None: what jax is set to.
    """

    tensor_parallel_size: int = 1
    max_batch: int = 64
    max_context: int | None = None
    kv_cache_memory: float | int | None = None
    max_host_kv_bytes: int | None = None
    kv_policy: KvPolicy = "aggressive"
    phases: Phases = "balanced"
    dtype: Dtype = "auto"
    prefill_chunk: int | None = None
    prefill_rows: int | None = None
    overlap: Overlap = "resident"
    implementation: Implementation = "auto"
    batch_buckets: tuple[int, ...] | None = None
    context_buckets: tuple[int, ...] | None = None
    seed: int | None = None
    compilation_cache_dir: str | None = None

    def __post_init__(self):
        _check_int("tensor_parallel_size", self.tensor_parallel_size, 1)
        _check_int("max_batch", self.max_batch, 1, 4096)
        for name, least in (("max_context", 2), ("prefill_chunk", 1), ("prefill_rows", 1)):
            if getattr(self, name) is not None:
                _check_int(name, getattr(self, name), least)
        _check_memory(self.kv_cache_memory)
        if self.max_host_kv_bytes is not None:
            _check_int("max_host_kv_bytes", self.max_host_kv_bytes, 0)
        _check_choice("kv_policy", self.kv_policy, KvPolicy)
        _check_choice("phases", self.phases, Phases)
        _check_choice("dtype", self.dtype, Dtype)
        _check_choice("overlap", self.overlap, Overlap)
        _check_choice("implementation", self.implementation, Implementation)
        for name in ("batch_buckets", "context_buckets"):
            _check_buckets(name, getattr(self, name))
        if self.seed is not None:
            _check_int("seed", self.seed, 0, 2**64 - 1)


def _check_choice(name: str, value: Any, choices: Any) -> None:
    if value not in get_args(choices):
        raise ValueError(f"{name} must be one of {', '.join(get_args(choices))}, got {value!r}")


def _check_int(
    name: str, value: Any, low: int, high: int | None = None, *, or_else: str = ""
) -> None:
    allowed = f"at least {low}" if high is None else f"from {low} to {high}"
    allowed += or_else and f" or {or_else}"
    is_int = isinstance(value, int) and not isinstance(value, bool)
    if not is_int or value < low or (high is not None and value > high):
        raise ValueError(f"{name} must be an integer {allowed}, got {value!r}")


def _check_float(
    name: str, value: Any, low: float, high: float, *, open_low: bool = False, or_else: str = ""
) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    inside = is_number and (low < value if open_low else low <= value) and value <= high
    if not inside:
        bracket = "(" if open_low else "["
        allowed = f"in {bracket}{low}, {high}]" + (or_else and f" or {or_else}")
        raise ValueError(f"{name} must be a number {allowed}, got {value!r}")


def _check_memory(value: Any) -> None:
    if value is None:
        return
    fraction = isinstance(value, float) and 0 < value < 1
    size = isinstance(value, int) and not isinstance(value, bool) and value >= 1
    if not (fraction or size):
        raise ValueError(
            "kv_cache_memory must be a fraction in (0, 1) or a positive number of bytes, "
            f"got {value!r}"
        )


def _check_buckets(name: str, value: Any) -> None:
    if value is None:
        return
    integers = isinstance(value, list | tuple) and all(type(v) is int and v > 0 for v in value)
    if not integers or not value or any(low >= high for low, high in itertools.pairwise(value)):
        raise ValueError(f"{name} must be increasing positive integers, got {value!r}")
