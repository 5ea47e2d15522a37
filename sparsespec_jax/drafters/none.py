"""Plain decoding: cycles of no drafts and a verification that emits one token."""

from __future__ import annotations

import jax

from sparsespec_jax.drafters.base import Verified


class NoDrafter:
    k = 0
    max_recent = 1
    state_axes = None

    def init_state(self, rows: int) -> None:
        return None

    def draft_rows(self, state: None, row: jax.Array, position: jax.Array):
        raise AssertionError("plain decoding has no draft rows")

    def update(self, state: None, verified: Verified) -> None:
        return None
