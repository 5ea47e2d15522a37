"""A request in the device batch, as the host knows it."""

from __future__ import annotations

import dataclasses

from sparsespec_jax.engine.acceptance import Acceptance
from sparsespec_jax.engine.request import Request
from sparsespec_jax.kv.manager import Holding


@dataclasses.dataclass(eq=False)
class Row:
    """A request that runs, or is parked until there is room for its KV again.

    kv: what it holds of the KV cache, and how long it is.
    announced: whether the device knows of the request.
    prefilled: tokens whose KV is written or dispatched to be, while it prefills.
    phase: 0..k-1 the draft it makes next, k it verifies; None while it prefills.
    first_phase: where in its cycle it started: cycles can be short.
    start: where its last cycle would have started, had it not joined the emptiest phase.
    scored: whether its last verification chose what its drafts attend to.
    sparsity: of that choice, among the speculation's sparsities.
    drafts: of its cycle, if that started in no later phase; apart: whether others make more.
    waited: steps for a place among those that verify.
    acceptance: of its own drafts. cycles_apart, retries: how long it has drafted less than others,
      and how often it tried again what they do.
    sits_out: whether the host is about to verify it (delayed verification); its phase counts on.
    """

    request: Request
    kv: Holding
    announced: bool = False
    prefilled: int = 0
    phase: int | None = None
    first_phase: int = 0
    start: int = 0
    scored: bool = False
    sparsity: int = 0
    drafts: int = 0
    apart: bool = False
    waited: int = 0
    acceptance: Acceptance | None = None
    cycles_apart: int = 0
    retries: int = 0
    sits_out: bool = False

    @property
    def index(self) -> int:
        return self.kv.row

    @property
    def computed(self) -> int:
        """Tokens that it need not prefill: it has, or shares a prefix that is there."""
        shares = not self.kv.mapped and self.kv.prefix.ready
        return len(self.kv.prefix) if shares else self.prefilled

    @property
    def longest(self) -> int:
        """The most tokens the row can have, given the results not read yet."""
        return min(self.kv.length + self.kv.unread, self.request.max_length)

    @property
    def drafted(self) -> int:
        """Drafts of the current cycle."""
        return self.phase - self.first_phase
