"""Collects the versions that a listing leaves out because they cannot be read, for the problems of a page."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from datasvc.errors import UnreadableVersionWarning

_MAX_MESSAGES = 1000


class UnreadableVersions:
    """The messages of all `UnreadableVersionWarning`s of this process, by version.

    Python's filter of warnings belongs to the process, and a page reads in several threads. So the messages are kept
    for all pages together.
    """

    def __init__(self) -> None:
        self._messages: dict[str, str] = {}
        self._lock = threading.Lock()

    def messages(self, name: str | None = None) -> list[str]:
        """Return the messages, or those of one data set or model, without repetitions."""
        with self._lock:
            return [
                message
                for version, message in self._messages.items()
                if name is None or version.partition("@")[0] == name
            ]

    def clear(self, name: str | None = None) -> None:
        """Drop the messages, or those of one name, before it is read again: it may be repaired by now."""
        with self._lock:
            kept = (
                {}
                if name is None
                else {
                    version: message
                    for version, message in self._messages.items()
                    if version.partition("@")[0] != name
                }
            )
            self._messages = kept

    @contextmanager
    def collect(self) -> Iterator[None]:
        """Collect warnings while the context is active; all other warnings are shown as before."""
        with warnings.catch_warnings():
            warnings.simplefilter("always", UnreadableVersionWarning)
            show_other = warnings.showwarning

            def show(message: Warning | str, category: type[Warning], *rest: Any, **options: Any) -> None:
                if not isinstance(message, UnreadableVersionWarning):
                    show_other(message, category, *rest, **options)
                    return
                with self._lock:
                    if len(self._messages) < _MAX_MESSAGES:
                        self._messages[message.version] = str(message)

            warnings.showwarning = show
            yield
