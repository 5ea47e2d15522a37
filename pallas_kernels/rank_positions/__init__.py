"""Turns the attention of scored queries into one ranking of the positions, for every layer."""

from pallas_kernels.rank_positions.api import rank_positions

__all__ = ["rank_positions"]
