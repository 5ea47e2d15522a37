"""Several processes that run one engine, each with some of the mesh's devices.

All make the same calls, and plan each step for themselves: plans are a function of the requests and
of what earlier steps emitted. What could tell the processes apart is when requests arrive, so the
first one leads: before a step it says how many it takes in, and the others take in as many. Before
a step runs anywhere, all compare what they are about to run.

Everything goes through the key-value store of `jax.distributed`, nothing through the devices: they
may be waiting for a process that never comes. Whoever fails says so there, and everybody looks
while waiting.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import time
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

_ENGINES = itertools.count()  # of several processes, which make theirs in the same order
PATIENCE = 600.0  # seconds that another process may take longer, compiling for one
GLANCE = 1.0  # seconds between looks at whether another process has failed, or wants to stop
_POLL = 2e-4
_KEPT = 64  # turns whose keys are deleted at once


@dataclasses.dataclass(frozen=True)
class Orders:
    """What the leader takes in before a step.

    arrived: how many new requests. cancelled: numbers of requests to end. choice: what the
    cycles that start draft. closed: whether the engine ends.
    """

    arrived: int = 0
    cancelled: tuple[int, ...] = ()
    choice: tuple[int, ...] | None = None
    closed: bool = False


class Processes:
    """The processes of a mesh. Where there is but one, it leads, and nothing else is done.

    Whatever waits raises RuntimeError once another process has failed, and TimeoutError if one
    does not come.
    """

    def __init__(self, mesh: Mesh):
        self._ids = sorted({device.process_index for device in mesh.devices.flat})
        self._own = jax.process_index()
        self.several = len(self._ids) > 1
        self.leads = self._own == self._ids[0]
        self._turn = self._block = self._step = 0
        self._looked = 0.0
        self._stopping = False
        self._history = hashlib.blake2b(digest_size=16)
        if self.several:
            from jax._src.distributed import global_state  # it has no public interface

            self._client = global_state.client
            self._space = f"sparsespec_jax/{next(_ENGINES)}"

    def smallest(self, name: str, value: int) -> int:
        """Of the values that the processes have."""
        if not self.several:
            return value
        self._set(f"{name}/{self._own}", str(value))
        return min(int(self._get(f"{name}/{process}")) for process in self._ids)

    def of_leader(self, name: str, value: int) -> int:
        """The value that the leader has."""
        if not self.several:
            return value
        if self.leads:
            self._set(name, str(value))
        return int(self._get(name))

    # Before a step.

    def give_orders(self, orders: Orders) -> None:
        """What the leader does; the others `take_orders`."""
        if self.several:
            self._turn += 1
            self._set(self._of_turn("orders"), json.dumps(dataclasses.asdict(orders)))

    def take_orders(self) -> Orders | None:
        """What the leader takes in now, or None if it has not said so yet: ask again."""
        self._turn += 1
        text = self._wait(self._of_turn("orders"))
        if text is None:
            self._turn -= 1
            return None
        orders = json.loads(text)
        return Orders(**orders | {"cancelled": tuple(orders["cancelled"])})

    def compare(self, *plan: Any) -> None:
        """Raises RuntimeError on every process unless all are about to run the same step.

        `plan`: what the step is, arrays and tuples. What was noted since the last step counts, too.
        """
        if not self.several:
            return
        self.note(plan)
        digest = self._history.hexdigest()
        self._set(self._of_turn(f"plans/{self._own}"), digest)
        for process in self._ids:
            if self._get(self._of_turn(f"plans/{process}")) != digest:
                raise RuntimeError(
                    f"step {self._step}: processes {self._own} and {process} have diverged; all "
                    "processes must make the same calls in the same order"
                )
        self._step += 1
        if self.leads:  # everybody has taken these orders and compared the step before
            for block in range(self._block, self._turn // _KEPT):
                self._client.key_value_delete(f"{self._space}/turns/{block}")
            self._block = self._turn // _KEPT

    def note(self, value: Any) -> None:
        """Remember arrays and tuples of arrays that all processes should have seen."""
        if not self.several:
            return
        if isinstance(value, tuple | list):
            self._history.update(f"{type(value).__name__} {len(value)}".encode())
            for item in value:
                self.note(item)
        else:
            self._history.update(np.asarray(value).tobytes() if value is not None else b"-")

    def wait_for(self, result: jax.Array) -> None:
        """Until a step's result is there, which is never if another process has failed."""
        while self.several and not result.is_ready():
            time.sleep(_POLL)
            self.check()

    # Failing and stopping.

    def fail(self, error: Exception) -> None:
        """Tell the others. Only the first failure counts."""
        if self.several:
            message = f"process {self._own}, step {self._step}: {type(error).__name__}: {error}"
            self._set("failed", message, once=True)

    def check(self) -> None:
        """Raises RuntimeError if another process has failed; looks now and then."""
        failure = self._glance("failed")
        if failure is not None:
            raise RuntimeError(f"another process has failed: {failure}")

    def ask_to_stop(self) -> None:
        """Of a process that does not lead: the leader is to end the engine."""
        if self.several and not self.leads:
            self._set("stop", str(self._own), once=True)

    def asked_to_stop(self) -> bool:
        """Whether one has asked the leader; looks now and then."""
        if self.several:
            self._stopping |= self._glance("stop") is not None
        return self._stopping

    # The store.

    def _of_turn(self, name: str) -> str:
        return f"turns/{self._turn // _KEPT}/{self._turn}/{name}"

    def _set(self, name: str, value: str, *, once: bool = False) -> None:
        try:
            self._client.key_value_set(f"{self._space}/{name}", value)
        except jax.errors.JaxRuntimeError as error:
            if not (once and "ALREADY_EXISTS" in str(error)):
                raise

    def _wait(self, name: str) -> str | None:
        """A value once it is set; None if that takes longer than a moment."""
        try:
            return self._client.blocking_key_value_get(f"{self._space}/{name}", int(1000 * GLANCE))
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
        self.check()
        return None

    def _get(self, name: str) -> str:
        deadline = time.monotonic() + PATIENCE
        while (value := self._wait(name)) is None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"step {self._step}: no process has set {name} in {PATIENCE} s")
        return value

    def _glance(self, name: str) -> str | None:
        """A value if it is set; None without looking, if the last look was just before."""
        now = time.monotonic()
        if now - self._looked < GLANCE:
            return None
        self._looked = now
        try:
            return self._client.key_value_try_get(f"{self._space}/{name}")
        except jax.errors.JaxRuntimeError as error:
            if "NOT_FOUND" not in str(error):
                raise
        return None
