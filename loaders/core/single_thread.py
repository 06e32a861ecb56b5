"""One thread of one process at a time."""

from __future__ import annotations

import os
import threading

from datasvc.errors import ConfigError


class SingleThreadGuard:
    """Refuses a second thread, and a forked child: threads of decoders and clients do not live there.

    A context manager, to be entered as often as one likes; entering raises ConfigError where somebody else is inside.
    """

    def __init__(self) -> None:
        self._process = os.getpid()
        # A thread that was interrupted between taking it and its use takes it once more.
        self._in_use = threading.RLock()

    @property
    def is_foreign(self) -> bool:
        """Whether this process is not the one that made it."""
        return os.getpid() != self._process

    def __enter__(self) -> None:
        if self.is_foreign:
            raise ConfigError(
                "this loader was made before the fork; make one in the child, or spawn instead of forking"
            )
        if not self._in_use.acquire(blocking=False):
            raise ConfigError("this loader is used by another thread; give each thread its own loader")

    def __exit__(self, *error: object) -> None:
        self._in_use.release()
