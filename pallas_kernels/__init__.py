"""GPU kernels of sparse self-speculative decoding, each with an XLA reference behind one contract.

| op | what it does |
| --- | --- |
| `fused_attention` | attention of draft, verify and prefill rows over one KV pool; scores |
| `add_norm` | a residual stream takes a matmul's output; its RMS norm for the next one |
| `matmul` | a layer's matmuls, where all blocks of a kernel run at once; parts of sums |
| `append_kv` | norms and rotation of a qkv projection; keys and values into the pool, in place |
| `pack_kv`, `unpack_kv` | KV of some slots of all layers, as one array; back into the pools |
| `rank_positions` | scores of several queries -> one ranking of the positions |
| `select_positions` | exact top-K positions per layer, row and KV head |
| `sample_tokens` | penalties, filters, noise and argmax over the vocabulary; logprobs |

A folder per op: `api.py` is the contract and picks the implementation, `reference.py` is plain JAX,
`pallas_triton.py` the kernel (`mosaic_gpu.py` of `matmul`).
"""

from pallas_kernels.add_norm import add_norm
from pallas_kernels.all_reduce import all_reduce, all_reduce_add_norm
from pallas_kernels.append_kv import append_kv
from pallas_kernels.fused_attention import (
    AttentionScores,
    CausalRows,
    CodedScores,
    DenseScores,
    DraftRows,
    DraftSlots,
    draft_slots,
    fused_attention,
    sliding_window,
)
from pallas_kernels.matmul import matmul, matmul_parts
from pallas_kernels.pack_kv import pack_kv, unpack_kv
from pallas_kernels.rank_positions import rank_positions
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
    "AttentionScores",
    "CausalRows",
    "CodedScores",
    "DenseScores",
    "DraftRows",
    "DraftSlots",
    "SampleArgs",
    "Sampled",
    "add_norm",
    "all_reduce",
    "all_reduce_add_norm",
    "append_kv",
    "draft_slots",
    "fused_attention",
    "matmul",
    "matmul_parts",
    "pack_kv",
    "rank_positions",
    "sample",
    "sample_tokens",
    "sampling_logprobs",
    "select_positions",
    "sliding_window",
    "token_logprobs",
    "unpack_kv",
]
