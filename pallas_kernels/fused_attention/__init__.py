"""Attention of draft, verify and prefill rows over one token-granular KV pool."""

from pallas_kernels.fused_attention.api import fused_attention
from pallas_kernels.fused_attention.rows import (
    CausalRows,
    DraftRows,
    DraftSlots,
    draft_slots,
    sliding_window,
)
from pallas_kernels.fused_attention.scores import AttentionScores, CodedScores, DenseScores

__all__ = [
    "AttentionScores",
    "CausalRows",
    "CodedScores",
    "DenseScores",
    "DraftRows",
    "DraftSlots",
    "draft_slots",
    "fused_attention",
    "sliding_window",
]
