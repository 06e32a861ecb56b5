"""Handling of the signals that end the launcher, so that the launcher can forward them to its ranks."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def handling_signals(handle: Callable[[int], None]) -> Iterator[None]:
    """Call `handle` with the number of each SIGINT and SIGTERM inside the block, instead of ending this process.

    The earlier handlers are restored after the block. In another thread than the main thread, this has no effect:
    only the main thread can set signal handlers.
    """
    is_main = threading.current_thread() is threading.main_thread()
    numbers = (signal.SIGINT, signal.SIGTERM) if is_main else ()
    previous = {number: signal.signal(number, lambda number, _: handle(number)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
