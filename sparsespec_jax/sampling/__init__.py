"""From a request's `SamplingParams` to emitted tokens."""

from sparsespec_jax.sampling.params import SamplingParams, sample_seed, validate_for_model
from sparsespec_jax.sampling.processors import sample_args, sample_history
from sparsespec_jax.sampling.rows import ROW_WORDS, RowSampling, pack_row, scatter, unpack_rows
from sparsespec_jax.sampling.verification import accept_coupled, accept_rejection, truncate

__all__ = [
    "ROW_WORDS",
    "RowSampling",
    "SamplingParams",
    "accept_coupled",
    "accept_rejection",
    "pack_row",
    "sample_args",
    "sample_history",
    "sample_seed",
    "scatter",
    "truncate",
    "unpack_rows",
    "validate_for_model",
]
