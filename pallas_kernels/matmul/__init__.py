"""The matmuls of a layer; as parts still to be added where that fills the GPU better."""

from pallas_kernels.matmul.api import matmul, matmul_parts

__all__ = ["matmul", "matmul_parts"]
