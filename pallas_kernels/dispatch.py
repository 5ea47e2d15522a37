"""Which implementation of an op runs, decided in one place.

Every op takes `implementation="auto" | "pallas" | "xla"` and `interpret=None | True | False`. "xla"
is the op's `reference.py`: plain `jax.numpy`, the oracle of the tests and what CPUs run. "pallas"
is the GPU kernel; on a CPU it runs in Pallas' interpreter unless `interpret=False` asks for the
real lowering (see `pallas_kernels.lowering`). "auto" is "pallas" on a GPU, else "xla".
"""

from typing import Literal

import jax

Implementation = Literal["auto", "pallas", "xla"]


def resolve(implementation: str, interpret: bool | None) -> tuple[bool, bool]:
    """Returns (run the Pallas kernel, in the interpreter) for the arguments every op takes."""
    if implementation not in ("auto", "pallas", "xla"):
        raise ValueError(
            f"implementation={implementation!r}, but it must be 'auto', 'pallas' or 'xla'"
        )
    backend = jax.default_backend()
    pallas = implementation == "pallas" or (implementation == "auto" and backend == "gpu")
    return pallas, backend == "cpu" if interpret is None else interpret


def check(condition: bool, message: str) -> None:
    """Raises ValueError(message) unless `condition`, which is static."""
    if not condition:
        raise ValueError(message)
