"""The event loop on which the requests of obstore run, one thread per process; and the conversion of their errors.

obstore's own blocking calls are not used: they neither end by Ctrl-C nor by a `CancellationToken`. A request on the
loop does: the thread that waits for it cancels it, and obstore then closes its connection.

The threads of obstore do not survive a fork, and a request in a forked child would wait for ever, even with a new
client. So a child of a process that has used obstore cannot use it: `is_usable` is False there.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import re
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager, suppress
from typing import Any, Final, TypeVar, cast

from datasvc.repository.store.redaction import redact_text, safe_cause

# A closed cache cancels its requests by a token; otherwise a program could wait at its exit for a silent server.


_DENIED: Final = frozenset({"PermissionDeniedError", "UnauthenticatedError"})
_EXISTS: Final = frozenset({"AlreadyExistsError", "PreconditionError"})
# How S3 answers requests for a bucket of another region. Without a body, as for HEAD, only the redirect is known.
_WRONG_REGION: Final = re.compile(
    "redirect without LOCATION|<Code>(AuthorizationHeaderMalformed|IllegalLocationConstraintException)</Code>"
)
_STATUS: Final = re.compile(r"status code: (\d{3})([ \w]*)")
# An error document of S3, Google or Azure.
_DOCUMENT: Final = re.compile(r"<Code>([^<]*)</Code>\s*(?:<Message>([^<]*)</Message>)?")
_TEXT: Final = re.compile(r'\b(?:message|error): "([^"]+)"')
_IDENTIFIER: Final = re.compile(r"\b[A-Z][A-Za-z]+\b")
# Phrases for what rustls, hyper and reqwest name by identifiers.
_PHRASES: Final = {
    "TimedOut": "no answer within the time limit",
    "IncompleteMessage": "the server closed the connection",
    "IncompleteBody": "the server closed the connection too early",
    "UnexpectedEof": "the server closed the connection",
    "Version": "the response is not HTTP",
    "UnknownIssuer": "certificate verify failed: it is from an unknown issuer; set SSL_CERT_FILE",
    "CaUsedAsEndEntity": "certificate verify failed: it is that of an issuer, not of a server",
    "NotValidForName": "certificate verify failed: it is for another host name",
    "Expired": "certificate verify failed: it has expired",
}


class CancellationToken:
    """Token that cancels reads. Any thread may set it; it is never cleared."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[], object]] = []

    @property
    def is_set(self) -> bool:
        """Whether the token is set."""
        return self._event.is_set()

    def wait(self, timeout_s: float) -> bool:
        """Wait until the token is set or the timeout expires, and return whether it is set."""
        return self._event.wait(timeout_s)

    def set(self) -> None:
        """Cancel all present and future reads with this token."""
        with self._lock:
            self._event.set()
            for callback in self._callbacks:
                callback()

    @contextmanager
    def on_cancel(self, callback: Callable[[], object]) -> Iterator[None]:
        """Call `callback` if the token is set before or during the block.

        Args:
            callback: function that unblocks the read in the block, such as a socket's shutdown. It must not block,
                because it is called under the lock of the token.
        """
        with self._lock:
            self._callbacks.append(callback)
            if self._event.is_set():
                callback()
        try:
            yield
        finally:
            # Take the lock, so that `callback` does not run after the block, when its socket may serve another read.
            with self._lock:
                self._callbacks.remove(callback)


_Result = TypeVar("_Result")

_END_TIMEOUT_S: Final = 3  # limit of the wait for cancelled requests at the exit of the program
_POLL_S: Final = 0.001
_RETURN_S: Final = 0.02
_never = CancellationToken()


class _RequestFuture(asyncio.Future[Any]):
    """Future that obstore completes. At the end of a request, obstore calls `cancelled`, and then sets a result."""

    def cancelled(self) -> bool:
        is_cancelled = super().cancelled()
        loop = self.get_loop()
        if is_cancelled and isinstance(loop, _CountingLoop) and threading.get_ident() != loop.thread_id:
            loop.unfinished.discard(self)  # no result follows
        return is_cancelled


class _CountingLoop(asyncio.SelectorEventLoop):
    """Loop that counts the futures which obstore has not completed yet, beside those of asyncio in use."""

    def __init__(self) -> None:
        super().__init__()
        self.unfinished: weakref.WeakSet[_RequestFuture] = weakref.WeakSet()
        self.thread_id = 0

    def create_future(self) -> _RequestFuture:
        future = _RequestFuture(loop=self)
        self.unfinished.add(future)
        return future

    def call_soon_threadsafe(  # type: ignore[override]
        self, callback: Any, *arguments: Any, context: Any = None
    ) -> asyncio.Handle:
        """Schedule a callback. obstore calls this to set the result of the future among the arguments."""
        try:
            return super().call_soon_threadsafe(callback, *arguments, context=context)
        finally:
            self.unfinished -= {each for each in arguments if isinstance(each, _RequestFuture)}

    def run_forever(self) -> None:
        self.thread_id = threading.get_ident()
        super().run_forever()


class _ObstoreLoop:
    """The loop of this process, started by the first request; not usable in a child forked after that."""

    def __init__(self) -> None:
        self.is_usable = True
        self._lock = threading.Lock()
        self._loop: _CountingLoop | None = None
        self._has_ended = False

    def submit(self, request: Coroutine[Any, Any, _Result]) -> Future[_Result]:
        """Start a request on the loop. Raises ConnectionError at the exit of the program."""
        assert self.is_usable, "obstore was used before the fork"
        with self._lock:
            if self._has_ended:
                request.close()
                raise ConnectionError("the program is ending")
            if self._loop is None:
                self._loop = self._start()
            return asyncio.run_coroutine_threadsafe(request, self._loop)

    def run_soon(self, callback: Callable[[], object]) -> None:
        """Call a function on the loop, if there is one."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(callback)

    def _start(self) -> _CountingLoop:
        loop = _CountingLoop()
        threading.Thread(target=loop.run_forever, name="datasvc-obstore", daemon=True).start()
        # `atexit` calls this after all threads of the program but daemons have ended, with their requests.
        atexit.register(self._end)
        return loop

    def _end(self) -> None:
        """Cancel all requests, and wait for their ends.

        A thread of obstore that runs Python after the end of the interpreter aborts the process. The thread that has
        set the result of the last request may still run when a program exits right after it.
        """
        with self._lock:
            self._has_ended = True
        if self._loop is None or not self.is_usable:
            return
        deadline = time.monotonic() + _END_TIMEOUT_S
        with suppress(TimeoutError):
            asyncio.run_coroutine_threadsafe(_cancel_all(), self._loop).result(_END_TIMEOUT_S)
        while self._loop.unfinished and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        # The threads have made their last call, but may not have returned from Python yet, which takes microseconds.
        time.sleep(_RETURN_S)

    def forget(self) -> None:
        """Drop the parent's loop in a forked child."""
        self.is_usable = self.is_usable and self._loop is None
        self._lock = threading.Lock()  # another thread of the parent may have held it


async def _cancel_all() -> None:
    requests = asyncio.all_tasks() - {asyncio.current_task()}
    for request in requests:
        request.cancel()
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
    running: list[asyncio.Task[Any] | None] = []
    has_left = False

    async def run() -> _Result | None:
        if has_left:
            request.close()
            return None
        running.append(asyncio.current_task())
        return await request

    try:
        return cast("_Result", wait(start(run()), interrupt))
    except (KeyboardInterrupt, SystemExit):
        # It may have come before `wait` had the request, which then nothing else ends.
        has_left = True
        _process_loop.run_soon(lambda: [task.cancel() for task in running if task is not None])
        raise


async def next_of(stream: AsyncIterator[_Result]) -> _Result | None:
    """Return the next element of a stream of obstore, or None at its end."""
    # Not `anext(stream, None)`: obstore's streams return futures, with which it raises SystemError at the end.
    try:
        return await stream.__anext__()
    except StopAsyncIteration:
        return None


# obstore's messages have several lines, and their first line rarely says what has happened: "error sending request".
# The conversion takes the reason from the other lines.


class UnsupportedResponseError(Exception):
    """obstore cannot read the server's response, but fsspec's client may."""


class WrongRegionError(UnsupportedResponseError):
    """The bucket of S3 is in another region than that of the request."""


class RangeBeyondEndError(OSError):
    """The requested range starts at or after the end of the file; any range of an empty file does."""


@contextmanager
def convert_errors() -> Iterator[None]:
    """Convert the exceptions of obstore.

    Raises:
        PermissionError: the store denies access.
        FileExistsError: a create-only write found a file.
        RangeBeyondEndError, UnsupportedResponseError, WrongRegionError: see there.
        OSError: any other failure. obstore itself raises FileNotFoundError for a missing file.
    """
    try:
        yield
    except Exception as error:
        if type(error).__module__.partition(".")[0] != "obstore":
            raise
        name, reason = type(error).__name__, redact_text(reason_of(str(error)))
        # A web server without ranges; and a response that is chunked or ends with the connection.
        if name == "NotSupportedError" or "MissingContentLength" in str(error):
            raise UnsupportedResponseError(reason) from safe_cause(error)
        if "S3 error" in str(error) and _WRONG_REGION.search(str(error)):
            raise WrongRegionError(reason) from safe_cause(error)
        kind: type[OSError] = OSError
        if name in _DENIED:
            kind = PermissionError
        elif name in _EXISTS:
            kind = FileExistsError
        elif status_of(str(error)) == 416:
            kind = RangeBeyondEndError
        raise kind(reason) from safe_cause(error)


def status_of(message: str) -> int | None:
    """Return the HTTP status that an error of obstore names, or None."""
    status = _STATUS.search(message)
    return int(status[1]) if status else None


def reason_of(message: str) -> str:
    """Return the message of an error of obstore as one line that says the reason."""
    first, _, details = message.partition("\n\nDebug source:")
    if status := _STATUS.search(first):
        document = _DOCUMENT.search(first)
        said = "" if document is None else ": " + ": ".join(part for part in document.groups() if part)
        return f"the server responds {status[1]}{status[2]}{said}"
    texts: list[str] = _TEXT.findall(details)
    if texts:
        return texts[-1]
    identifiers = _IDENTIFIER.findall(details)
    if identifiers and identifiers[-1] in _PHRASES:
        return _PHRASES[identifiers[-1]]
    return first.partition("\n")[0]
