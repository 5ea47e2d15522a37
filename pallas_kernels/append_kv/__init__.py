"""Between a layer's qkv projection and its attention: norms, rotation, keys and values in place."""

from pallas_kernels.append_kv.api import append_kv

__all__ = ["append_kv"]
