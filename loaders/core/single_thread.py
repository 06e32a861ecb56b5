"""Raises an error if two threads use a loader at the same time, or if a forked process uses it."""

from __future__ import annotations

import os
import threading

from datasvc.errors import ConfigError


class SingleThreadGuard:
    """A context manager that one thread at a time may enter, in the process that created the manager.

    `with guard` raises ConfigError while another thread is inside the block. It also does so in a forked child,
    because a fork does not copy the threads of decoders and clients.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()
        # Reentrant: an interrupt just after `acquire` may leave the lock held for ever, but the thread that holds it
        # can still use the loader.
        self._in_use = threading.RLock()

    @property
    def is_foreign(self) -> bool:
        """Whether the current process is not the one that created the guard."""
        return os.getpid() != self._pid

    def __enter__(self) -> None:
        if self.is_foreign:
            raise ConfigError(
                "this loader was created before the fork; create one in the child, or spawn instead of forking"
            )
        if not self._in_use.acquire(blocking=False):
            raise ConfigError("this loader is used by another thread; give each thread its own loader")

    def __exit__(self, *error: object) -> None:
        self._in_use.release()
