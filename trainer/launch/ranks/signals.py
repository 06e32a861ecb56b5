"""Forwarding of the launcher's signals to its ranks."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator

from datasvc.trainer.launch.ranks.rank_group import RankGroup


@contextlib.contextmanager
def forwarding_signals(group: RankGroup) -> Iterator[None]:
    """Forward SIGINT and SIGTERM to the ranks inside the block; their end then ends the job.

    Has no effect outside the main thread, which alone can set signal handlers.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def forward_signal(number: int, _: object) -> None:
        group.forward_signal(number)

    old = {number: signal.signal(number, forward_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
