"""Lets the bytes of requests that nobody can end in time through to a sink, until nobody wants them."""

from __future__ import annotations

import threading
from collections.abc import Callable

from datasvc.repository.store.cancellation import CancellationToken

Sink = Callable[[int, memoryview], None]
"""Takes the bytes at an offset of the object; the view is valid during the call only."""


class Gate:
    """Lets bytes through until it is closed; nobody is inside any more when `close` returns.

    Args:
        sink: gets the bytes.

    Attributes:
        interrupt: closes it, too, without waiting for who is inside.
    """

    def __init__(self, sink: Sink) -> None:
        self.interrupt = CancellationToken()
        self._sink = sink
        self._num_inside = 0
        self._changed = threading.Condition()

    def deliver(self, offset: int, view: memoryview) -> None:
        """Hand bytes to the sink, or drop them where it is closed. What the sink raises passes through."""
        with self._changed:
            if self.interrupt.is_set:
                return
            self._num_inside += 1
        try:
            self._sink(offset, view)
        finally:
            with self._changed:
                self._num_inside -= 1
                self._changed.notify_all()

    def close(self) -> None:
        """End the requests that can be ended, and let nothing through of the others."""
        with self._changed:
            self.interrupt.set()
            self._changed.wait_for(lambda: self._num_inside == 0)
