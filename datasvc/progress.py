"""Progress bars for bytes, shown only on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)


@contextmanager
def byte_progress(
    title: str, stream: TextIO | None = None
) -> Iterator[tuple[Callable[[int], None], Callable[[int], None]]]:
    """Show a progress bar with bytes, rate and time left.

    Args:
        title: text before the bar.
        stream: terminal to show it on; nothing is shown if it is not a terminal. Default: standard error.

    Yields:
        A function that sets the total in bytes, and a thread-safe function that adds processed bytes.
    """
    with byte_bar(stream=stream) as bar:
        task = bar.add_task(title, total=None)
        yield lambda total: bar.update(task, total=total), lambda done: bar.advance(task, done)


def byte_bar(*extra_columns: ProgressColumn, stream: TextIO | None = None) -> Progress:
    """Return a progress bar with bytes, rate, time left and `extra_columns`; for `stream`, see `byte_progress`."""
    stream = stream or sys.stderr
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        *extra_columns,
        console=Console(file=stream),
        disable=not stream.isatty(),
    )
