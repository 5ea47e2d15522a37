"""Attention of draft, verify and prefill rows over one token-granular KV pool."""

from pallas_kernels.fused_attention.api import fused_attention
from pallas_kernels.fused_attention.rows import CausalRows, DraftRows

__all__ = ["CausalRows", "DraftRows", "fused_attention"]
