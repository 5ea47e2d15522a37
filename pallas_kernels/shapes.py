"""The shapes that matter, named once, with random inputs for each of them.

`H200` holds one layer of Qwen3-8B at batch 128 and 8K context, with 128 rows in a cycle of k drafts
and one verification; `TINY` is the same in small and runs anywhere.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from pallas_kernels.fused_attention import (
    CausalRows,
    CodedScores,
    DraftRows,
    DraftSlots,
    draft_slots,
)
from pallas_kernels.sample_tokens import SampleArgs


def _ints(x: Any) -> Array:
    return jnp.asarray(x, jnp.int32)


def _normal(shape: tuple[int, ...], dtype: str, seed: int) -> Array:
    return jax.random.normal(jax.random.key(seed), shape, dtype)


@dataclass(frozen=True)
class Attention:
    """Attention of one layer: draft rows of `selected + recent` keys, causal rows of `context`."""

    context: int
    n_drafts: int = 0
    selected: int = 1
    recent: int = 8
    n_verify: int = 0
    n_queries: int = 1
    n_prefill: int = 0
    chunk: int = 1
    scores: bool = False
    n_kv_heads: int = 8
    lists: int = 1
    group: int = 4
    head_dim: int = 128
    dtype: str = "bfloat16"

    @property
    def k(self) -> int:
        return self.n_queries - 1

    def bytes(self) -> int:
        """Keys and values of every row, once."""
        keys = self.n_drafts * (self.selected + self.recent)
        keys += (self.n_verify + self.n_prefill) * self.context
        return self.n_kv_heads * keys * 2 * self.head_dim * jnp.dtype(self.dtype).itemsize

    def inputs(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Array and static arguments of `fused_attention`, with slots scattered over the pool."""
        rng = np.random.default_rng(0)
        n_rows = self.n_drafts + self.n_verify + self.n_prefill
        n_slots = 1 + n_rows * self.context
        page_table = 1 + rng.permutation(n_slots - 1).reshape(n_rows, self.context)
        selected = np.empty((1, n_rows, self.lists, self.selected), np.int32)
        recent_start = self.context - self.recent
        for index in np.ndindex(selected.shape[:3]):
            selected[index] = np.sort(rng.choice(recent_start, self.selected, replace=False))

        def causal(first: int, n: int, live: int) -> CausalRows | None:
            full = np.full(n, live)
            rows = (first + np.arange(n), self.context - full, full)
            return CausalRows(*map(_ints, rows)) if n else None

        drafts = DraftRows(
            _ints(np.arange(self.n_drafts)),
            _ints(np.full(self.n_drafts, self.context - 1)),
            _ints(selected),
            _ints(np.full(n_rows, self.selected)),
            _ints(np.full(n_rows, recent_start)),
        )
        n_tokens = self.n_drafts + self.n_verify * self.n_queries + self.n_prefill * self.chunk
        pool = (n_slots, self.n_kv_heads, self.head_dim)
        arrays = {
            "q": _normal((n_tokens, self.n_kv_heads * self.group, self.head_dim), self.dtype, 0),
            "k_pool": _normal(pool, self.dtype, 1),
            "v_pool": _normal(pool, self.dtype, 2),
            "page_table": _ints(page_table),
            "drafts": self._draft_slots(drafts, _ints(page_table)) if self.n_drafts else None,
            "verify": causal(self.n_drafts, self.n_verify, self.n_queries),
            "prefill": causal(self.n_drafts + self.n_verify, self.n_prefill, self.chunk),
        }
        statics = {
            "n_queries": self.n_queries,
            "chunk": self.chunk,
            "score_queries": self.n_queries if self.scores else 0,
            "scored": None,
            "scale": self.head_dim**-0.5,
            "context": self.context,
        }
        return arrays, statics

    def _draft_slots(self, drafts: DraftRows, page_table: Array) -> DraftSlots:
        """With room for all the tokens that can be recent in a cycle."""
        return draft_slots(drafts, page_table, max_recent=max(self.recent, 2 * self.k + 1))


@dataclass(frozen=True)
class Append:
    """The projection of new tokens, in parts, which go to random slots of one layer's pool."""

    n_tokens: int
    n_slots: int
    n_kv_heads: int = 8
    group: int = 4
    head_dim: int = 128
    bias: bool = False
    norms: bool = True
    parts: int = 1
    dtype: str = "bfloat16"
    k: int | None = None
    context: int | None = None

    def bytes(self) -> int:
        """The projection read; queries, keys and values written."""
        row = self.n_kv_heads * (self.group + 2) * self.head_dim
        return (self.parts + 1) * self.n_tokens * row * jnp.dtype(self.dtype).itemsize

    def inputs(self) -> dict[str, Array | None]:
        """Array arguments of `append_kv`."""
        heads = self.n_kv_heads, self.group + 2, self.head_dim
        pool = self.n_slots, self.n_kv_heads, self.head_dim
        angle = 3 * _normal((self.n_tokens, self.head_dim // 2), "float32", 3)
        slots = 1 + np.random.default_rng(0).permutation(self.n_slots - 1)[: self.n_tokens]

        def norm(seed: int) -> Array | None:
            return _normal((self.head_dim,), self.dtype, seed) if self.norms else None

        return {
            "k_pool": _normal(pool, self.dtype, 0),
            "v_pool": _normal(pool, self.dtype, 1),
            "qkv": _normal((self.parts, self.n_tokens, *heads), self.dtype, 2),
            "slots": _ints(slots),
            "cos": jnp.cos(angle),
            "sin": jnp.sin(angle),
            "bias": _normal(heads, self.dtype, 4) if self.bias else None,
            "q_norm": norm(5),
            "k_norm": norm(6),
        }


@dataclass(frozen=True)
class AddNorm:
    """The tokens of one step, and the output of a matmul to add to each, whole or in parts."""

    n_tokens: int
    hidden: int
    dtype: str = "bfloat16"
    parts: int | None = None
    k: int | None = None
    context: int | None = None

    def bytes(self) -> int:
        """Stream and addend read; sum and norm written."""
        arrays = 3 + (self.parts or 1)
        return arrays * self.n_tokens * self.hidden * jnp.dtype(self.dtype).itemsize

    def inputs(self) -> tuple[Array, Array, Array]:
        """Arguments of `add_norm`."""
        shape = self.n_tokens, self.hidden
        whole = shape if self.parts is None else (self.parts, *shape)
        x, delta = _normal(shape, self.dtype, 0), _normal(whole, self.dtype, 1)
        return x, delta, _normal(shape[1:], self.dtype, 2)


@dataclass(frozen=True)
class Matmul:
    """The tokens of one step times a weight; in parts if the consumer adds them."""

    n_tokens: int
    inner: int
    columns: int
    in_parts: bool = False
    dtype: str = "bfloat16"
    k: int | None = None
    context: int | None = None

    def bytes(self) -> int:
        """Operands read, the product written, once. (Products alone take longer: 64 us of the
        `gate_up` of 8B at 800 TFLOP/s.)"""
        n, k, m = self.n_tokens, self.inner, self.columns
        return (n * k + k * m + n * m) * jnp.dtype(self.dtype).itemsize

    def inputs(self) -> tuple[Array, Array]:
        """Arguments of `matmul`."""
        x = _normal((self.n_tokens, self.inner), self.dtype, 0)
        return x, _normal((self.inner, self.columns), self.dtype, 1) * self.inner**-0.5


@dataclass(frozen=True)
class Select:
    """Scores of all layers of the rows that verified in one step."""

    n_layers: int
    n_rows: int
    context: int
    n_selected: int
    lists: int = 1
    dtype: str = "float16"
    k: int | None = None

    def bytes(self) -> int:
        """Scores once, lists once."""
        itemsize = jnp.dtype(self.dtype).itemsize
        lists = self.n_layers * self.n_rows * self.lists
        return lists * (self.context * itemsize + self.n_selected * 4)

    def inputs(self) -> tuple[Array, Array, Array]:
        """Scores like those of attention: most are tiny, a few hold nearly all the mass."""
        shape = (self.n_layers, self.n_rows, self.lists, self.context)
        scores = jnp.exp(4 * _normal(shape, "float32", 0) - 12).astype(self.dtype)
        rows = np.ones(self.n_rows)
        return scores, _ints(rows * self.context), _ints(rows * self.n_selected)


@dataclass(frozen=True)
class Rank:
    """Coded scores of all layers of the rows that verified in one step, k + 1 queries each."""

    n_layers: int
    n_rows: int
    context: int
    k: int
    shifted: bool = True
    n_kv_heads: int = 8
    lists: int = 1
    group: int = 4

    def bytes(self) -> int:
        """Codes once, the ranking once."""
        codes = self.n_kv_heads * (self.k + 1) * self.group
        return self.n_layers * self.n_rows * self.context * (codes + 2 * self.lists)

    def inputs(self) -> tuple[Any, ...]:
        """Array arguments of `rank_positions`, half of the drafts accepted."""
        n_queries, rows = self.k + 1, np.ones(self.n_rows)
        lead = (self.n_layers, self.n_rows, self.n_kv_heads, n_queries * self.group)
        size = -(-self.context // 32) * 32
        scores = CodedScores(
            jax.random.bits(jax.random.key(0), (*lead, size), jnp.uint8), jnp.full(lead, 2.0**-7)
        )
        weights = jnp.full((self.n_rows, n_queries), 1 / n_queries)
        ahead = weights if self.shifted else None
        committed = _ints(rows * (1 + self.k // 2))
        return scores, _ints(rows * self.context), weights, ahead, committed


@dataclass(frozen=True)
class Sample:
    """Rows of logits to sample from, or (logprobs) to report the log-probabilities of."""

    n_rows: int
    vocab: int
    temperature: float = 0.65
    top_k: int = 0
    top_p: float = 1.0
    logprobs: bool = False
    spread: float = 3.0  # standard deviation of the logits
    k: int | None = None
    context: int | None = None

    @property
    def filters(self) -> bool:
        return self.top_k > 0 or self.top_p < 1

    def bytes(self) -> int:
        """Logits once."""
        return 4 * self.n_rows * self.vocab

    def inputs(self) -> tuple[Array, SampleArgs]:
        """Logits like a model's: a bulk that hardly matters and some tokens far above it."""
        shape = self.n_rows, self.vocab
        logits = self.spread * _normal(shape, "float32", 0)
        best = jax.random.randint(jax.random.key(1), (self.n_rows, 20), 0, self.vocab)
        boost = self.spread * (3 + jax.random.exponential(jax.random.key(2), best.shape))
        logits = logits.at[jnp.arange(self.n_rows)[:, None], best].add(boost)
        row = np.arange(self.n_rows)

        def every(value: Any, dtype: Any) -> Array:
            return jnp.full((self.n_rows,), value, dtype)

        args = SampleArgs(
            position=_ints(1000 + row),
            temperature=every(self.temperature, jnp.float32),
            top_k=every(self.top_k, jnp.int32),
            top_p=every(self.top_p, jnp.float32),
            min_p=every(0, jnp.float32),
            seed=jnp.asarray(np.stack([row, row], 1), jnp.uint32),
            prompt_length=every(100, jnp.int32),
            min_length=every(0, jnp.int32),
            presence=every(0, jnp.float32),
            frequency=every(0, jnp.float32),
            repetition=every(1, jnp.float32),
            raw_logprobs=every(0, jnp.int32),
            withheld_ids=jnp.full((self.n_rows, 24), -1, jnp.int32),
            bias_ids=jnp.full((self.n_rows, 64), -1, jnp.int32),
            bias_values=jnp.zeros((self.n_rows, 64)),
        )
        return logits, args


_MIXED = Attention(8192, n_drafts=114, selected=402, recent=8, n_verify=14, n_queries=9)


def _with(case: Attention, **changes: Any) -> Attention:
    return Attention(**{**vars(case), **changes})


def _mixed_cases() -> dict[str, Attention]:
    """The mixed step with and without scores, at other contexts, k and groups."""
    cases = {"mixed": _MIXED, "mixed, k=7": _with(_MIXED, n_queries=8)}
    for context in (2048, 32768):  # 5%, at least 128
        selected = max(128, -(-context // 20)) - 8
        cases[f"mixed, {context // 1024}K"] = _with(_MIXED, context=context, selected=selected)
    for group in (2, 5, 8):
        cases[f"mixed, group {group}"] = _with(_MIXED, group=group)
    scored = {f"{name}, scores": _with(case, scores=True) for name, case in cases.items()}
    return cases | scored


H200 = {
    "fused_attention": {
        **_mixed_cases(),
        "drafts": Attention(8192, n_drafts=114, selected=402, recent=8),
        "verify": Attention(8192, n_verify=14, n_queries=9),
        "verify, scores": Attention(8192, n_verify=14, n_queries=9, scores=True),
        "verify, k=7": Attention(8192, n_verify=14, n_queries=8),
        "verify, k=7, scores": Attention(8192, n_verify=14, n_queries=8, scores=True),
        "decode": Attention(8192, n_verify=128),
        "decode, 2K": Attention(2048, n_verify=128),
        "decode, 32K": Attention(32768, n_verify=128),
        "prefill": Attention(8192, n_prefill=1, chunk=2048),
    },
    "append_kv": {
        "mixed": Append(248, n_slots=1 << 20),
        "mixed, 2 parts": Append(248, n_slots=1 << 20, parts=2),
        "mixed, Qwen2": Append(248, n_slots=1 << 20, group=7, bias=True, norms=False),
        "prefill": Append(2048, n_slots=1 << 20),
    },
    "add_norm": {
        "8B": AddNorm(256, 4096),
        "8B, 2 parts": AddNorm(256, 4096, parts=2),
        "8B, 4 parts": AddNorm(256, 4096, parts=4),
        "1.7B": AddNorm(256, 2048),
    },
    "matmul": {
        "8B, qkv": Matmul(256, 4096, 6144, in_parts=True),
        "8B, gate_up": Matmul(256, 4096, 24576),
        "8B, out": Matmul(256, 4096, 4096, in_parts=True),
        "8B, down": Matmul(256, 12288, 4096, in_parts=True),
    },
    "rank_positions": {
        "shifted": Rank(36, 15, context=8192, k=8),
        "paper": Rank(36, 15, context=8192, k=8, shifted=False, lists=8),
    },
    "select_positions": {
        "shared": Select(36, 15, context=8192, n_selected=410),
        "for each head": Select(36, 15, context=8192, n_selected=410, lists=8),
    },
    "sample_tokens": {
        "plain": Sample(248, 151_936),
        "greedy": Sample(248, 151_936, temperature=0),
        "top_k, top_p": Sample(248, 151_936, top_k=20, top_p=0.95),
        "top_p": Sample(248, 151_936, top_p=0.95),
        "top_p, flat": Sample(248, 151_936, temperature=1, top_p=0.95, spread=1),
        "logprobs": Sample(135, 151_936, logprobs=True),
    },
}

_TINY = Attention(
    256, n_drafts=3, selected=12, n_verify=2, n_queries=4, n_kv_heads=2, head_dim=64,
    dtype="float32",
)  # fmt: skip

TINY = {
    "fused_attention": {
        "mixed": _TINY,
        "mixed, scores": _with(_TINY, scores=True),
    },
    "append_kv": {"mixed": Append(11, n_slots=1024, n_kv_heads=2, head_dim=64, dtype="float32")},
    "add_norm": {"tiny": AddNorm(11, 96, dtype="float32")},
    "matmul": {"tiny": Matmul(11, 96, 64, dtype="float32")},
    "rank_positions": {
        "shifted": Rank(2, 3, context=256, k=3, n_kv_heads=2),
        "paper": Rank(2, 3, context=256, k=3, n_kv_heads=2, shifted=False, lists=2),
    },
    "select_positions": {"256": Select(2, 3, context=256, n_selected=12)},
    "sample_tokens": {
        "plain": Sample(3, 100),
        "top_k, top_p": Sample(3, 100, top_k=5, top_p=0.9),
        "logprobs": Sample(3, 100, logprobs=True),
    },
}
