"""The shapes that matter, named once, with random inputs for each of them.

`H200` holds one layer of Qwen3-8B at batch 128 and 8K context, with 128 rows in a cycle of k drafts
and one verification; `TINY` is the same in small and runs anywhere. Each op has a file: the
class of its cases, and its cases of both.
"""

from pallas_kernels.shapes import (
    add_norm,
    append_kv,
    fused_attention,
    matmul,
    pack_kv,
    rank_positions,
    sample_tokens,
    select_positions,
)
from pallas_kernels.shapes.add_norm import AddNorm
from pallas_kernels.shapes.append_kv import Append
from pallas_kernels.shapes.fused_attention import Attention
from pallas_kernels.shapes.matmul import Matmul
from pallas_kernels.shapes.pack_kv import Pack
from pallas_kernels.shapes.rank_positions import Rank
from pallas_kernels.shapes.sample_tokens import Sample
from pallas_kernels.shapes.select_positions import Select

__all__ = [
    "H200",
    "TINY",
    "AddNorm",
    "Append",
    "Attention",
    "Matmul",
    "Pack",
    "Rank",
    "Sample",
    "Select",
]

_OPS = {
    "fused_attention": fused_attention,
    "append_kv": append_kv,
    "add_norm": add_norm,
    "matmul": matmul,
    "rank_positions": rank_positions,
    "select_positions": select_positions,
    "sample_tokens": sample_tokens,
    "pack_kv": pack_kv,
}

H200 = {op: shapes.H200 for op, shapes in _OPS.items()}
TINY = {op: shapes.TINY for op, shapes in _OPS.items()}
