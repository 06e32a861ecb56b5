"""Bars of bytes for people: shown where there is a terminal, and nothing elsewhere."""

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
    """Show a bar of bytes, rate and time left.

    Args:
        title: what is done.
        stream: where it is shown if that is a terminal; default: standard error.

    Yields:
        A function that sets the total in bytes, and one, for any thread, that counts bytes done.
    """
    with byte_bar(stream=stream) as bar:
        task = bar.add_task(title, total=None)
        yield lambda total: bar.update(task, total=total), lambda done: bar.advance(task, done)


def byte_bar(*more: ProgressColumn, stream: TextIO | None = None) -> Progress:
    """Return a bar of bytes, rate and time left, and more columns. `stream` is as of `byte_progress`."""
    stream = stream or sys.stderr
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        *more,
        console=Console(file=stream),
        disable=not stream.isatty(),
    )
