"""Forwarding of the launcher's signals to its ranks."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator

from datasvc.trainer.launch.ranks.rank_group import RankGroup


@contextlib.contextmanager
def passing_on_signals(group: RankGroup) -> Iterator[None]:
    """Forward SIGINT and SIGTERM to the ranks inside the block; their end then ends the job.

    Has no effect outside the main thread, which alone can set signal handlers.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def pass_on(number: int, _: object) -> None:
        group.pass_on(number)

    old = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
