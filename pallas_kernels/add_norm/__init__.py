"""Between two matmuls of a layer: the residual stream takes the last one's output, and its norm."""

from pallas_kernels.add_norm.api import add_norm

__all__ = ["add_norm"]
