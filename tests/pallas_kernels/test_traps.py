"""What no kernel may use, since some supported version of jax gets it wrong."""

from pathlib import Path

import pytest

import pallas_kernels

SOURCES = sorted(Path(pallas_kernels.__file__).parent.rglob("*.py"))


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("num_programs", "stale when a kernel is reused with another grid (jax 0.11)"),
        ("pallas.ops.gpu", "removed from newer versions of jax"),
        ("pl.load", "removed; plt.load"),
        ("pl.store", "removed; plt.store"),
        ("io_callback", "stalls the step and cannot be captured in a command buffer"),
    ],
)
def test_it_is_not_used(name, why):
    users = [source.name for source in SOURCES if f"{name}(" in source.read_text()]
    users += [source.name for source in SOURCES if f"import {name}" in source.read_text()]
    assert not users, why
