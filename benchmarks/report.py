"""How a benchmark's result leaves the process: one JSON row that says where it was measured."""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path

import jax

from pallas_kernels.bench import commit


def environment() -> dict:
    return {
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "python": platform.python_version(),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "commit": commit(),
    }


def peak_memory_gib() -> float:
    memory = jax.devices()[0].memory_stats() or {}
    return memory.get("peak_bytes_in_use", 0) / 2**30


def write(row: dict, path: Path | None, *, show: bool = True) -> None:
    """Print a row if `show`, and append it to the file at `path` if there is one."""
    if show:
        print(json.dumps(row, indent=1))
    if path:
        with path.open("a") as file:
            file.write(json.dumps(row) + "\n")
