"""The corrupt and missing objects that pages have met, for the problems of Home: no listing finds them."""

from __future__ import annotations

import re
import threading
import time
from collections import OrderedDict
from typing import Final

from datasvc.errors import DatasvcError
from datasvc.ui.web.page import Problem

_MAX_FAULTS: Final = 100
_KEPT_S: Final = 86400.0
_SUBJECT: Final = re.compile(r"/datasets/[^/?]+|[^?]*")  # of an address: a data-set version, or a page


class SeenFaults:
    """The newest error of each data-set version, and of each other page, the newest last. Thread-safe."""

    def __init__(self) -> None:
        self._faults: OrderedDict[str, tuple[float, str, str]] = OrderedDict()
        self._lock = threading.Lock()

    def note(self, error: DatasvcError, address: str) -> None:
        """Add an error that the page at `address` has met now, in place of the last one of the same subject."""
        subject = _SUBJECT.match(address)
        assert subject is not None
        with self._lock:
            # Readers word the fault of one shard differently: by the message alone it would be listed several times.
            for known, (_, message, _) in [*self._faults.items()]:
                if known == subject[0] or message == str(error):
                    del self._faults[known]
            self._faults[subject[0]] = time.time(), str(error), address
            if len(self._faults) > _MAX_FAULTS:
                self._faults.popitem(last=False)

    def problems(self) -> list[Problem]:
        """Return the errors of the last day, the newest first."""
        now = time.time()
        with self._lock:
            faults = list(reversed(self._faults.values()))
        return [
            Problem(f"{message} (a page met it {round((now - seen_s) / 60)} min ago)", address)
            for seen_s, message, address in faults
            if now - seen_s < _KEPT_S
        ]
