"""Random steps for `fused_attention`, and a float64 oracle that reads like its contract."""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_kernels.fused_attention import (
    AttentionScores,
    CausalRows,
    CodedScores,
    DraftRows,
    draft_slots,
)
from pallas_kernels.fused_attention.scores import dense


@dataclass(frozen=True)
class Shape:
    """Static side of a step: its first page-table rows draft, the next verify, the last prefill."""

    n_kv_heads: int = 2
    lists: int = 1
    group: int = 2
    head_dim: int = 64
    context: int = 40
    n_drafts: int = 2
    n_selected: int = 12
    max_recent: int = 6
    n_verify: int = 2
    n_queries: int = 4
    n_prefill: int = 2
    chunk: int = 9
    n_scored: int = 0
    score_queries: int = 0
    layer: int = 1


@dataclass
class Step:
    arrays: dict[str, Any]
    statics: dict[str, Any]
    shape: Shape

    @property
    def arguments(self) -> dict[str, Any]:
        """Of `fused_attention`."""
        drafts = self.arrays["drafts"]
        if drafts is not None:
            page_table = self.arrays["page_table"]
            drafts = draft_slots(drafts, page_table, max_recent=self.shape.max_recent)
        return self.arrays | self.statics | {"drafts": drafts}

    def cast(self, dtype) -> "Step":
        arrays = {
            name: value.astype(dtype) if name in ("q", "k_pool", "v_pool") else value
            for name, value in self.arrays.items()
        }
        return Step(arrays, self.statics, self.shape)


def random_step(shape: Shape, rng: np.random.Generator, *, kind: str = "mixed") -> Step:
    """A step of a `kind`: "mixed", "padding" (no live row) or "shortest" (rows of length one)."""
    s = shape
    n_rows = s.n_drafts + s.n_verify + s.n_prefill
    n_slots = 1 + n_rows * s.context
    pools = rng.normal(size=(2, n_slots, s.n_kv_heads, s.head_dim)).astype(np.float32)
    pools[:, 0] = np.nan  # the trash slot may hold anything
    page_table = np.zeros((n_rows, s.context + 3), np.int32)
    page_table[:, : s.context] = 1 + rng.permutation(n_slots - 1).reshape(n_rows, s.context)

    def causal(first: int, n_causal: int, n: int) -> CausalRows:
        count = rng.integers(0, n + 1, n_causal)
        if kind == "mixed" and n_causal:
            count[0] = n
        count = {"mixed": count, "padding": 0 * count, "shortest": 0 * count + 1}[kind]
        start = rng.integers(0, s.context - count + 1)
        start[:1] = s.context - count[:1]  # one row fills the context to its end
        if kind == "shortest":
            start = 0 * start
        row = first + np.arange(n_causal)
        for r, begin, live in zip(row, start, count, strict=True):
            page_table[r, begin + live :] = 0
        return CausalRows(*(jnp.asarray(x, jnp.int32) for x in (row, start, count)))

    position = rng.integers(0, s.context, n_rows)
    position[:1] = s.context - 1
    n_recent = rng.integers(1, s.max_recent + 1, n_rows)
    if kind == "shortest":
        position, n_recent = 0 * position, 0 * n_recent + 1
    if kind == "padding":
        n_recent = 0 * n_recent
    recent_start = np.maximum(position - n_recent + 1, 0)
    count = np.minimum(rng.integers(0, s.n_selected + 1, n_rows), recent_start)
    count[:1] = np.minimum(s.n_selected, recent_start[:1])  # one row uses its whole budget
    if kind == "padding":
        count = 0 * count
    # What is not live in a list may be any position.
    selected = rng.integers(0, s.context, (s.layer + 1, n_rows, s.lists, s.n_selected))
    for r in range(s.n_drafts):
        page_table[r, position[r] + 1 :] = 0
        for index in np.ndindex(s.layer + 1, s.lists):
            chosen = rng.choice(recent_start[r], count[r], replace=False)
            selected[index[0], r, index[1], : count[r]] = np.sort(chosen)
    drafts = DraftRows(
        *(
            jnp.asarray(x, jnp.int32)
            for x in (
                np.arange(s.n_drafts),
                position[: s.n_drafts],
                selected,
                count,
                recent_start,
            )
        )
    )
    verify = causal(s.n_drafts, s.n_verify, s.n_queries)
    prefill = causal(s.n_drafts + s.n_verify, s.n_prefill, s.chunk)
    scored = np.resize(np.arange(s.n_prefill)[::-1], s.n_scored)
    scored[-1:] = -1 if s.n_scored > 1 else scored[-1:]
    n_tokens = s.n_drafts + s.n_verify * s.n_queries + s.n_prefill * s.chunk
    q = rng.normal(size=(n_tokens, s.n_kv_heads * s.group, s.head_dim)).astype(np.float32)
    arrays = {
        "q": jnp.asarray(q),
        "k_pool": jnp.asarray(pools[0]),
        "v_pool": jnp.asarray(pools[1]),
        "page_table": jnp.asarray(page_table),
        "drafts": drafts if s.n_drafts else None,
        "verify": verify if s.n_verify else None,
        "prefill": prefill if s.n_prefill else None,
        "scored": jnp.asarray(scored, jnp.int32) if s.n_scored else None,
    }
    statics = {
        "layer": s.layer,
        "n_queries": s.n_queries,
        "chunk": s.chunk,
        "score_queries": s.score_queries,
        "scale": 1.3 * s.head_dim**-0.5,
        "context": s.context,
        "n_layers": s.layer + 1,
    }
    return Step(arrays, statics, s)


def probabilities(step: Step, scores: AttentionScores | None) -> np.ndarray | None:
    """The layer's scores [R, Hkv, Q, C] of the queries and positions that exist, else 0."""
    if scores is None:
        return None
    s, rows = step.shape, []
    if s.n_verify:
        rows += list(zip(step.arrays["verify"].start, step.arrays["verify"].count, strict=True))
    for r in () if step.arrays["scored"] is None else step.arrays["scored"]:
        start, count = (int(x[r]) if r >= 0 else 0 for x in step.arrays["prefill"][1:])
        first = max(count - s.score_queries, 0)
        rows.append((start + first, count - first))
    start, count = np.array(rows, int).reshape(-1, 2).T
    if isinstance(scores, CodedScores):
        scores = dense(scores, jnp.asarray(start + count), s.group)
    query = np.arange(s.score_queries)
    seen = np.arange(s.context) <= (start[:, None] + query)[..., None]
    exists = seen & (query < count[:, None])[..., None]
    found = np.asarray(scores.probabilities[s.layer], np.float64)[..., : s.context]
    return np.where(exists[:, None], found, 0)


def oracle(step: Step) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Float64 output [T, Hq, D], which queries are live [T], and scores or None."""
    s = step.shape
    q, k_pool, v_pool = (
        np.asarray(step.arrays[name], np.float64) for name in ("q", "k_pool", "v_pool")
    )
    page_table = np.asarray(step.arrays["page_table"])
    out, live = np.zeros(q.shape), np.zeros(len(q), bool)

    def attend(token: int, row: int, head: int, positions: np.ndarray) -> np.ndarray:
        """Writes the output of a query for one KV head; returns its mean probabilities."""
        slots = page_table[row, positions]
        heads = slice(head * s.group, (head + 1) * s.group)
        logits = q[token, heads] @ k_pool[slots, head].T * step.statics["scale"]
        weights = np.exp(logits - logits.max(1, keepdims=True))
        weights /= weights.sum(1, keepdims=True)
        out[token, heads] = weights @ v_pool[slots, head]
        live[token] = True
        probabilities = np.zeros(s.context)
        probabilities[positions] = weights.mean(0)
        return probabilities

    token = 0
    if s.n_drafts:
        row, position, selected, count, recent_start = (
            np.asarray(x) for x in step.arrays["drafts"]
        )
        for r, p in zip(row, position, strict=True):
            recent = np.arange(recent_start[r], p + 1)
            for head in range(s.n_kv_heads if count[r] + len(recent) else 0):
                listed = selected[s.layer, r, head // (s.n_kv_heads // s.lists), : count[r]]
                attend(token, r, head, np.concatenate([listed, recent]))
            token += 1

    def causal(rows: CausalRows, n: int) -> np.ndarray:
        nonlocal token
        probabilities = np.zeros((len(rows.row), s.n_kv_heads, n, s.context))
        for i, (row, start, count) in enumerate(zip(*map(np.asarray, rows), strict=True)):
            for query in range(count):
                for head in range(s.n_kv_heads):
                    probabilities[i, head, query] = attend(
                        token + query, row, head, np.arange(start + query + 1)
                    )
            token += n
        return probabilities

    scores = []
    if s.n_verify:
        scores.append(causal(step.arrays["verify"], s.n_queries))
    if s.n_prefill:
        probabilities = causal(step.arrays["prefill"], s.chunk)
        if s.n_scored:
            count = np.asarray(step.arrays["prefill"].count)
            last = np.zeros((s.n_scored, s.n_kv_heads, s.score_queries, s.context))
            for f, r in enumerate(np.asarray(step.arrays["scored"])):
                n = min(count[r], s.score_queries) if r >= 0 else 0
                last[f, :, :n] = probabilities[r, :, count[r] - n : count[r]]
            scores.append(last)
    return out, live, np.concatenate(scores) if s.score_queries else None
