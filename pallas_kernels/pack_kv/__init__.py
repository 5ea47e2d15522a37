"""KV of some slots of every layer, as one array that can leave the device; and back again."""

from pallas_kernels.pack_kv.api import pack_kv, unpack_kv

__all__ = ["pack_kv", "unpack_kv"]
