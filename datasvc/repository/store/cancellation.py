"""Cancellation of blocking reads: one thread sets a token, and reads with this token in other threads end.

A closed cache cancels its requests by a token; otherwise a program could wait at its exit for a silent server.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class CancellationToken:
    """Token that cancels reads. Any thread may set it; it is never cleared."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[], object]] = []

    @property
    def is_set(self) -> bool:
        """Whether the token is set."""
        return self._event.is_set()

    def wait(self, timeout_s: float) -> bool:
        """Wait until the token is set or the timeout expires, and return whether it is set."""
        return self._event.wait(timeout_s)

    def set(self) -> None:
        """Cancel all present and future reads with this token."""
        with self._lock:
            self._event.set()
            for callback in self._callbacks:
                callback()

    @contextmanager
    def on_cancel(self, callback: Callable[[], object]) -> Iterator[None]:
        """Call `callback` if the token is set before or during the block.

        Args:
            callback: function that unblocks the read in the block, such as a socket's shutdown. It must not block,
                because it is called under the lock of the token.
        """
        with self._lock:
            self._callbacks.append(callback)
            if self._event.is_set():
                callback()
        try:
            yield
        finally:
            # Take the lock, so that `callback` does not run after the block, when its socket may serve another read.
            with self._lock:
                self._callbacks.remove(callback)
