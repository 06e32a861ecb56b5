"""What a terminal shows while a checkpoint is restored."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn


@contextmanager
def restore_bar(title: str, stream: TextIO) -> Iterator[tuple[Callable[[int], None], Callable[[int], None]]]:
    """Show a bar of bytes, rate and time left where the stream is a terminal; elsewhere nothing.

    Yields:
        A function that sets the total in bytes, and one, for any thread, that counts bytes done.
    """
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(
        TextColumn("{task.description}"), *columns, console=Console(file=stream), disable=not stream.isatty()
    ) as bar:
        task = bar.add_task(title, total=None)
        yield lambda total: bar.update(task, total=total), lambda done: bar.advance(task, done)
