"""Faults that pages have met: corrupt and missing objects, and versions that lists leave out."""

from __future__ import annotations

import re
import threading
import time
import warnings
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final

from datasvc.errors import CorruptDataError, DatasvcError, NotFoundError, UnavailableError, UnreadableVersionWarning
from datasvc.ui.web.page import Problem

_MAX_FAULTS: Final = 100
_KEPT_S: Final = 86400.0
_SUBJECT: Final = re.compile(r"/datasets/[^/?]+|[^?]*")  # of an address: a data-set version, or a page
_MAX_VERSIONS: Final = 1000


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


class UnreadableVersions:
    """The `UnreadableVersionWarning`s of a block, each once."""

    def __init__(self) -> None:
        # By message: a data set and a model may have the same name.
        self._warnings: dict[str, UnreadableVersionWarning] = {}

    def add(self, warning: UnreadableVersionWarning) -> None:
        """Add a warning, unless there are very many."""
        if len(self._warnings) < _MAX_VERSIONS:
            self._warnings[str(warning)] = warning

    def messages(self) -> list[str]:
        """Return the messages, in the order in which they came."""
        return list(self._warnings)

    def facts(self) -> list[dict[str, Any]]:
        """Return the versions as JSON values, as `--json` of commands appends them to lists."""
        return [warning.to_dict() for warning in list(self._warnings.values())]


# Of this page alone: other pages are read at the same time in other threads, whose contexts are their own.
_collecting: ContextVar[tuple[UnreadableVersions, ...]] = ContextVar("versions that a page leaves out", default=())


@contextmanager
def collect_unreadable() -> Iterator[UnreadableVersions]:
    """Collect the versions that this block leaves out; a block around this one collects them too."""
    unreadable = UnreadableVersions()
    token = _collecting.set((*_collecting.get(), unreadable))
    try:
        yield unreadable
    finally:
        _collecting.reset(token)


@contextmanager
def catch_unreadable() -> Iterator[None]:
    """Give each `UnreadableVersionWarning` of this process to those that collect; other warnings are shown as before.

    Python's filter of warnings belongs to the process, so the server calls this once.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("always", UnreadableVersionWarning)
        show_other = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *rest: Any, **options: Any) -> None:
            if not isinstance(message, UnreadableVersionWarning):
                show_other(message, category, *rest, **options)
                return
            for unreadable in _collecting.get():
                unreadable.add(message)

        warnings.showwarning = show
        yield
