"""Collects the versions that a page leaves out because they cannot be read, for its lists and for its problems."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final

from datasvc.errors import UnreadableVersionWarning

_MAX_VERSIONS: Final = 1000


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
