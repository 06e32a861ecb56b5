"""How one thread ends what others wait for: once set, what has begun is cut off and what begins ends at once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class CancellationToken:
    """Set once, from any thread, and never cleared."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._lock = threading.Lock()
        self._cuts: list[Callable[[], None]] = []

    @property
    def is_set(self) -> bool:
        """Whether it was set."""
        return self._event.is_set()

    def wait(self, timeout_s: float) -> bool:
        """Wait until it is set, but so long at most; returns whether it is."""
        return self._event.wait(timeout_s)

    def set(self) -> None:
        """Cut off whatever is under way."""
        with self._lock:
            self._event.set()
            for cut in self._cuts:
                cut()

    @contextmanager
    def cutting(self, cut: Callable[[], None]) -> Iterator[None]:
        """Let `cut` be called when it is set inside the block: it wakes who waits there, and does not wait itself."""
        with self._lock:
            self._cuts.append(cut)
            if self._event.is_set():
                cut()
        try:
            yield
        finally:
            # Once this has the lock nobody cuts any more: what was cut may be used for something else then.
            with self._lock:
                self._cuts.remove(cut)
