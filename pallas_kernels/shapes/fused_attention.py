"""Mixed steps, at several contexts, k and groups, and each kind of their rows alone."""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from pallas_kernels.fused_attention import CausalRows, DraftRows, DraftSlots, draft_slots
from pallas_kernels.shapes.arrays import ints, normal


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
            return CausalRows(*map(ints, rows)) if n else None

        drafts = DraftRows(
            ints(np.arange(self.n_drafts)),
            ints(np.full(self.n_drafts, self.context - 1)),
            ints(selected),
            ints(np.full(n_rows, self.selected)),
            ints(np.full(n_rows, recent_start)),
        )
        n_tokens = self.n_drafts + self.n_verify * self.n_queries + self.n_prefill * self.chunk
        pool = (n_slots, self.n_kv_heads, self.head_dim)
        arrays = {
            "q": normal((n_tokens, self.n_kv_heads * self.group, self.head_dim), self.dtype, 0),
            "k_pool": normal(pool, self.dtype, 1),
            "v_pool": normal(pool, self.dtype, 2),
            "page_table": ints(page_table),
            "drafts": self._draft_slots(drafts, ints(page_table)) if self.n_drafts else None,
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
}

_TINY = Attention(
    256, n_drafts=3, selected=12, n_verify=2, n_queries=4, n_kv_heads=2, head_dim=64,
    dtype="float32",
)  # fmt: skip

TINY = {
    "mixed": _TINY,
    "mixed, scores": _with(_TINY, scores=True),
}
