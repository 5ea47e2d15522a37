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

from pallas_kernels.fused_attention import CausalRows, DraftRows
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
    group: int = 4
    head_dim: int = 128
    dtype: str = "bfloat16"

    @property
    def k(self) -> int:
        return self.n_queries - 1

    def bytes(self) -> int:
        """Keys and values of every row once, scores once."""
        keys = self.n_drafts * (self.selected + self.recent)
        keys += (self.n_verify + self.n_prefill) * self.context
        key_bytes = 2 * self.head_dim * jnp.dtype(self.dtype).itemsize
        scores = self.n_verify * self.n_queries * self.context if self.scores else 0
        return self.n_kv_heads * (keys * key_bytes + scores * 2)

    def inputs(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Array and static arguments of `fused_attention`, with slots scattered over the pool."""
        rng = np.random.default_rng(0)
        n_rows = self.n_drafts + self.n_verify + self.n_prefill
        n_slots = 1 + n_rows * self.context
        page_table = 1 + rng.permutation(n_slots - 1).reshape(n_rows, self.context)
        selected = np.empty((1, n_rows, self.n_kv_heads, self.selected), np.int32)
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
            "drafts": drafts if self.n_drafts else None,
            "verify": causal(self.n_drafts, self.n_verify, self.n_queries),
            "prefill": causal(self.n_drafts + self.n_verify, self.n_prefill, self.chunk),
        }
        statics = {
            "layer": 0,
            "n_queries": self.n_queries,
            "chunk": self.chunk,
            "score_queries": self.n_queries if self.scores else 0,
            "scored": None,
            "scale": self.head_dim**-0.5,
            "max_recent": self.recent,
            "context": self.context,
        }
        return arrays, statics


@dataclass(frozen=True)
class Append:
    """New tokens at random slots of one layer's pool."""

    n_tokens: int
    n_slots: int
    n_kv_heads: int = 8
    head_dim: int = 128
    dtype: str = "bfloat16"
    k: int | None = None
    context: int | None = None

    def bytes(self) -> int:
        """Read and write, keys and values."""
        row_bytes = self.n_kv_heads * self.head_dim * jnp.dtype(self.dtype).itemsize
        return 4 * self.n_tokens * row_bytes

    def inputs(self) -> tuple[Array, ...]:
        pool, new = ((n, self.n_kv_heads, self.head_dim) for n in (self.n_slots, self.n_tokens))
        slots = 1 + np.random.default_rng(0).permutation(self.n_slots - 1)[: self.n_tokens]
        arrays = (_normal(shape, self.dtype, i) for i, shape in enumerate((pool, pool, new, new)))
        return (*arrays, _ints(slots))


@dataclass(frozen=True)
class Select:
    """Scores of all layers of the rows that verified in one step."""

    n_layers: int
    n_rows: int
    context: int
    n_selected: int
    n_kv_heads: int = 8
    dtype: str = "float16"
    k: int | None = None

    def bytes(self) -> int:
        """Scores once, lists once."""
        itemsize = jnp.dtype(self.dtype).itemsize
        lists = self.n_layers * self.n_rows * self.n_kv_heads
        return lists * (self.context * itemsize + self.n_selected * 4)

    def inputs(self) -> tuple[Array, Array, Array]:
        """Scores like those of attention: most are tiny, a few hold nearly all the mass."""
        shape = (self.n_layers, self.n_rows, self.n_kv_heads, self.context)
        scores = jnp.exp(4 * _normal(shape, "float32", 0) - 12).astype(self.dtype)
        rows = np.ones(self.n_rows)
        return scores, _ints(rows * self.context), _ints(rows * self.n_selected)


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

H200 = {
    "fused_attention": {
        "mixed": _MIXED,
        "mixed, scores": Attention(**{**vars(_MIXED), "scores": True}),
        "mixed, scores, k=7": Attention(**{**vars(_MIXED), "scores": True, "n_queries": 8}),
        "drafts": Attention(8192, n_drafts=114, selected=402, recent=8),
        "verify": Attention(8192, n_verify=14, n_queries=9),
        "verify, scores": Attention(8192, n_verify=14, n_queries=9, scores=True),
        "decode": Attention(8192, n_verify=128),
        "prefill": Attention(8192, n_prefill=1, chunk=2048),
    },
    "append_kv": {"mixed": Append(248, n_slots=1 << 20)},
    "select_positions": {"8K": Select(36, 15, context=8192, n_selected=410)},
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
        "mixed, scores": Attention(**{**vars(_TINY), "scores": True}),
    },
    "append_kv": {"mixed": Append(11, n_slots=1024, n_kv_heads=2, head_dim=64, dtype="float32")},
    "select_positions": {"256": Select(2, 3, context=256, n_selected=12, n_kv_heads=2)},
    "sample_tokens": {
        "plain": Sample(3, 100),
        "top_k, top_p": Sample(3, 100, top_k=5, top_p=0.9),
        "logprobs": Sample(3, 100, logprobs=True),
    },
}
