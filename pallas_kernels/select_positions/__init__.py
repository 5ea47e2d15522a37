"""Picks the positions with the highest scores, for every layer, row and KV head at once."""

from pallas_kernels.select_positions.api import select_positions

__all__ = ["select_positions"]
