"""Progress of long operations: the interface that operations call, and the bars that show progress on a terminal."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, TextIO

from datasvc.printable import escape_controls

if TYPE_CHECKING:
    from rich.progress import TaskID

# Label in a bar of each source of bytes; other sources are not shown.
_SOURCE_LABELS: Final = {"origin": "origin", "peer": "peers", "resident": "hits"}


class Progress:
    """Receiver of the progress of one operation. This class ignores the progress; a subclass shows or records it.

    The operation calls the methods from any of its threads.
    """

    def begin(self, total: int) -> None:
        """Set the total, in the unit of `advance`, before the first `advance` of each pass of the operation."""

    def advance(self, amount: int, *, source: str = "", num_samples: int = 0, num_shards: int = 0) -> None:
        """Add the amount of work done since the previous call.

        Args:
            amount: number of bytes, or of entries if the version index is updated.
            source: where a cache got the bytes: "resident", "origin" or "peer"; "" for other work.
            num_samples: samples that were ingested.
            num_shards: shards that were ingested.
        """


NO_PROGRESS: Final = Progress()
"""Ignores all progress: the default of every operation."""


class SourceCounter(Progress):
    """Counts the bytes from each source: resident in the cache, from the origin, or from a peer."""

    def __init__(self) -> None:
        self._bytes_by_source: Counter[str] = Counter()
        self._lock = threading.Lock()

    @property
    def bytes_by_source(self) -> Counter[str]:
        """Copy of the number of bytes by source."""
        with self._lock:
            return Counter(self._bytes_by_source)

    def advance(self, amount: int, *, source: str = "", **_: object) -> None:
        """Add bytes of `source`."""
        with self._lock:
            self._bytes_by_source[source] += amount


class _Bar(SourceCounter):
    """Updates a bar of `rich`; the bar's field `sources` shows the bytes of each source."""

    def __init__(self, bar: Any, task: TaskID) -> None:
        super().__init__()
        self._bar, self._task = bar, task

    def begin(self, total: int) -> None:
        self._bar.update(self._task, total=total, visible=True)

    def advance(self, amount: int, *, source: str = "", **_: object) -> None:
        from datasvc.sizes import format_size

        super().advance(amount, source=source)
        counted = self.bytes_by_source
        shown = [(label, counted[key]) for key, label in _SOURCE_LABELS.items() if counted[key]]
        sources = ", ".join(f"{label} {format_size(size_bytes)}" for label, size_bytes in shown)
        self._bar.update(self._task, advance=amount, sources=sources)


@contextmanager
def byte_progress(title: str, stream: TextIO | None = None) -> Iterator[Progress]:
    """Show a bar with bytes, rate, time left and the bytes from each source, until the end of the `with` block.

    Args:
        title: text before the bar.
        stream: where to show the bar, by default standard error. If it is not a terminal, nothing is shown.
    """
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    yield from _show(
        title,
        stream or sys.stderr,
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[sources]}"),
    )


@contextmanager
def entry_progress(title: str) -> Iterator[Progress]:
    """Show a bar that counts entries on standard error from `begin` on; remove it at the end of the `with` block."""
    yield from _show(title, sys.stderr, is_brief=True)


def _show(title: str, stream: TextIO, *columns: Any, is_brief: bool = False) -> Iterator[Progress]:
    """Yield a `Progress` that updates a bar; a brief bar is shown from `begin` on, and removed at the end."""
    # Import rich here, not at the top: all operations import this module for `NO_PROGRESS`, and few show a bar.
    from rich.console import Console
    from rich.progress import Progress as RichProgress

    with RichProgress(*columns, console=Console(file=stream), disable=not stream.isatty(), transient=is_brief) as bar:
        yield _Bar(bar, bar.add_task(escape_controls(title), total=None, visible=not is_brief, sources=""))
