"""Collects the errors of parts of a page, so that one part that cannot be read does not hide the others."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from datasvc.errors import CorruptDataError, DatasvcError, NotFoundError, UnavailableError
from datasvc.ui.web.page import Problem
from datasvc.ui.web.seen_faults import SeenFaults


class Failures:
    """The errors of the parts of a page, each once. Several threads may add some.

    Args:
        faults: gets those of corrupt and missing objects.
        address: address of the page.
    """

    def __init__(self, faults: SeenFaults, address: str) -> None:
        self._faults = faults
        self._address = address
        self._messages: dict[str, None] = {}
        self._lock = threading.Lock()

    def problems(self) -> list[Problem]:
        """Return the errors as problems of the page, in the order in which they came."""
        with self._lock:
            return list(map(Problem, self._messages))

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Add the error of a block, which then ends. A store that does not respond fails the whole page."""
        try:
            yield
        except UnavailableError:
            raise
        except DatasvcError as error:
            if isinstance(error, CorruptDataError | NotFoundError):
                self._faults.note(error, self._address)
            with self._lock:
                self._messages[str(error)] = None
