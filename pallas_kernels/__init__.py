"""GPU kernels of sparse self-speculative decoding, each with an XLA reference behind one contract.

| op | what it does |
| --- | --- |
| `fused_attention` | attention of draft, verify and prefill rows over one KV pool; scores |
| `append_kv` | new keys and values into the pool, in place |
| `select_positions` | exact top-K positions per layer, row and KV head |
| `sample_tokens` | penalties, filters, noise and argmax over the vocabulary; logprobs |

A folder per op: `api.py` is the contract and picks the implementation, `reference.py` is plain JAX,
`pallas_triton.py` the kernel.
"""

from pallas_kernels.append_kv import append_kv
from pallas_kernels.fused_attention import CausalRows, DraftRows, fused_attention
from pallas_kernels.sample_tokens import (
    SampleArgs,
    Sampled,
    sample,
    sample_tokens,
    sampling_logprobs,
    token_logprobs,
)
from pallas_kernels.select_positions import select_positions

__all__ = [
    "CausalRows",
    "DraftRows",
    "SampleArgs",
    "Sampled",
    "append_kv",
    "fused_attention",
    "sample",
    "sample_tokens",
    "sampling_logprobs",
    "select_positions",
    "token_logprobs",
]
