"""The corrupt and missing objects that pages have met, for the problems of Home: no listing finds them."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from typing import Final

from datasvc.errors import DatasvcError
from datasvc.ui.web.page import Problem

_MAX_FAULTS: Final = 100
_KEPT_S: Final = 86400.0


class SeenFaults:
    """The messages of errors, the newest last, each with the address of the page that met it. Thread-safe."""

    def __init__(self) -> None:
        self._faults: OrderedDict[str, tuple[float, str]] = OrderedDict()
        self._lock = threading.Lock()

    def note(self, error: DatasvcError, address: str) -> None:
        """Add an error that a page has met now."""
        with self._lock:
            self._faults[str(error)] = time.time(), address
            self._faults.move_to_end(str(error))
            if len(self._faults) > _MAX_FAULTS:
                self._faults.popitem(last=False)

    def problems(self) -> list[Problem]:
        """Return the errors of the last day, the newest first."""
        now = time.time()
        with self._lock:
            faults = list(reversed(self._faults.items()))
        return [
            Problem(f"{message} (a page met it {round((now - seen_s) / 60)} min ago)", address)
            for message, (seen_s, address) in faults
            if now - seen_s < _KEPT_S
        ]
