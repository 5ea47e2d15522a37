"""Between devices: the sum of what each holds of a layer's output, and the norm that follows."""

from pallas_kernels.all_reduce.api import all_reduce, all_reduce_add_norm
from pallas_kernels.all_reduce.peers import Peers, connect

__all__ = ["Peers", "all_reduce", "all_reduce_add_norm", "connect"]
