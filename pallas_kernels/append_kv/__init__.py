"""Writes the keys and values of new tokens into the KV pool, in place."""

from pallas_kernels.append_kv.api import append_kv

__all__ = ["append_kv"]
