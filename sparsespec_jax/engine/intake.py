"""What callers ask of an engine, on its way to the engine's thread: requests, cancels, an end.

Of several processes (`parallel/processes.py`) the first decides what is taken in before which step,
and the others take in the same.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque

from sparsespec_jax.engine.request import Request
from sparsespec_jax.parallel.processes import GLANCE, PATIENCE, Orders, Processes

_CLOSING = 30.0  # seconds that the first process may take to close as well


class Intake:
    """Methods but `take` are for any thread. `wake` keeps the engine from taking in anything."""

    def __init__(self, processes: Processes):
        self.wake = threading.Condition()
        self.closed = False
        self._processes = processes
        self._requests: deque[Request] = deque()
        self._cancelled: set[int] = set()
        self._numbers = itertools.count()

    def __len__(self) -> int:
        """Requests on their way."""
        return len(self._requests)

    def submit(self, request: Request) -> None:
        """Raises RuntimeError if the engine is closed."""
        with self.wake:
            if self.closed:
                raise RuntimeError("the engine is closed")
            request.number = next(self._numbers)
            self._requests.append(request)
            self.wake.notify()

    def cancel(self, request: Request) -> None:
        """Of several processes, only what the first one cancels is cancelled."""
        with self.wake:
            self._cancelled.add(request.number)
            self.wake.notify()

    def close(self) -> None:
        with self.wake:
            if not self.closed:
                self._processes.ask_to_stop()
            self.closed = True
            self.wake.notify()

    def empty(self) -> list[Request]:
        """Close, and return the requests that will never be taken in."""
        with self.wake:
            self.closed = True
            left = list(self._requests)
            self._requests.clear()
        return left

    def take(self, busy: bool, choice: tuple[int, ...] | None) -> tuple[list[Request], Orders]:
        """New requests, and what else to do before the next step; blocks while there is nothing.

        busy: whether there is a next step anyway. choice: what cycles that start draft, if this
        process is the first.
        """
        return self._lead(busy, choice) if self._processes.leads else self._follow()

    def _lead(self, busy: bool, choice: tuple[int, ...] | None) -> tuple[list[Request], Orders]:
        with self.wake:
            asked = self._processes.asked_to_stop
            while not (busy or self._requests or self._cancelled or self.closed or asked()):
                self.wake.wait(GLANCE if self._processes.several else None)
            self.closed |= asked()
            arrived, self._requests = list(self._requests), deque()
            cancelled, self._cancelled = tuple(sorted(self._cancelled)), set()
            orders = Orders(len(arrived), cancelled, choice, self.closed)
        self._processes.give_orders(orders)
        return arrived, orders

    def _follow(self) -> tuple[list[Request], Orders]:
        closing = None
        while (orders := self._processes.take_orders()) is None:
            if self.closed:
                closing = closing or time.monotonic()
                if time.monotonic() - closing > _CLOSING:
                    raise TimeoutError("the engine is closed, but not in the first process")
        deadline = time.monotonic() + PATIENCE
        with self.wake:
            while (missing := orders.arrived - len(self._requests)) > 0:
                self._processes.check()
                if self.closed or time.monotonic() > deadline:
                    raise RuntimeError(
                        f"{missing} requests were submitted to the first process, but not to this"
                    )
                self.wake.wait(GLANCE)
            arrived = [self._requests.popleft() for _ in range(orders.arrived)]
            self._cancelled.clear()
        if orders.closed:
            arrived += self.empty()
        return arrived, orders
