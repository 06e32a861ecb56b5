"""The event loop on which the requests of obstore run; one thread per process.

obstore's own blocking calls are not used: they neither end by Ctrl-C nor by a `CancellationToken`. A request on the
loop does: the thread that waits for it cancels it, and obstore then closes its connection.

The threads of obstore do not survive a fork, and a request in a forked child would wait for ever, even with a new
client. So a child of a process that has used obstore cannot use it: `is_usable` is False there.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import CancelledError, Future
from typing import Any, Final, TypeVar

from datasvc.repository.store.cancellation import CancellationToken

_Result = TypeVar("_Result")

_STOP_TIMEOUT_S: Final = 5  # limit of the wait for cancelled requests at the exit of the program
_never = CancellationToken()


class _ObstoreLoop:
    """The loop of this process; started by the first request.

    Attributes:
        is_usable: False in a forked child whose parent had started its loop.
    """

    def __init__(self) -> None:
        self.is_usable = True
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def submit(self, request: Coroutine[Any, Any, _Result]) -> Future[_Result]:
        """Start a request on the loop."""
        assert self.is_usable, "obstore was used before the fork"
        return asyncio.run_coroutine_threadsafe(request, self._started())

    def run_soon(self, callback: Callable[[], object]) -> None:
        """Call a function on the loop."""
        self._started().call_soon_threadsafe(callback)

    def _started(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=self._loop.run_forever, name="datasvc-obstore", daemon=True)
                self._thread.start()
                # The threads of obstore must not call Python while the interpreter ends: no request may be left then.
                # `atexit` calls this after all threads of the program but daemons have ended, with their requests.
                atexit.register(self._stop)
            return self._loop

    def _stop(self) -> None:
        loop, thread = self._loop, self._thread
        if loop is None or thread is None or not self.is_usable:
            return

        async def cancel_all() -> None:
            requests = asyncio.all_tasks() - {asyncio.current_task()}
            for request in requests:
                request.cancel()
            await asyncio.wait([asyncio.create_task(_settle(requests))], timeout=_STOP_TIMEOUT_S)
            loop.stop()

        asyncio.run_coroutine_threadsafe(cancel_all(), loop)
        thread.join(2 * _STOP_TIMEOUT_S)

    def forget(self) -> None:
        """Drop the parent's loop in a forked child."""
        self.is_usable = self.is_usable and self._loop is None
        self._lock = threading.Lock()  # another thread of the parent may have held it


async def _settle(requests: set[asyncio.Task[Any]]) -> None:
    await asyncio.gather(*requests, return_exceptions=True)


_process_loop = _ObstoreLoop()
os.register_at_fork(after_in_child=_process_loop.forget)


def is_usable() -> bool:
    """Return whether this process can send requests by obstore; see the docstring of this module."""
    return _process_loop.is_usable


def start(request: Coroutine[Any, Any, _Result]) -> Future[_Result]:
    """Start a request, for `wait`. The caller must cancel it if it does not wait for its end."""
    return _process_loop.submit(request)


def run_soon(callback: Callable[[], object]) -> None:
    """Call a function on the loop, soon."""
    _process_loop.run_soon(callback)


def wait(request: Future[_Result], interrupt: CancellationToken = _never) -> _Result:
    """Return the result of a request of `start`, or raise its exception. Any exception in here cancels the request.

    Raises:
        ConnectionError: `interrupt` has cancelled the request.
    """
    try:
        with interrupt.on_cancel(request.cancel):
            return request.result()
    except CancelledError as error:
        raise ConnectionError("the read was cancelled") from error
    finally:
        request.cancel()  # does nothing after the end of the request; else this is Ctrl-C or another exception


def call(request: Coroutine[Any, Any, _Result], interrupt: CancellationToken = _never) -> _Result:
    """Run a request and return its result; see `wait`."""
    return wait(start(request), interrupt)


async def next_of(stream: AsyncIterator[_Result]) -> _Result | None:
    """Return the next element of a stream of obstore, or None at its end."""
    # Not `anext(stream, None)`: obstore's streams return futures, with which it raises SystemError at the end.
    try:
        return await stream.__anext__()
    except StopAsyncIteration:
        return None
