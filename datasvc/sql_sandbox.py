"""In-memory DuckDB databases for SQL of users. The SQL cannot access files, network, extensions or Python variables.

`delete --where`, and the SQL queries of data sets and model versions, run in such a database.

DuckDB enforces its limits between the steps of a query. One step, such as `repeat('a', 1000000000)`, may take any
memory and time. Therefore queries of a page, where `limited` applies, run in child processes (`confined`): the kernel
limits their memory, and they are killed at the deadline.
"""

from __future__ import annotations

import fcntl
import functools
import importlib
import os
import pickle  # only between a process and its own child
import re
import resource
import select
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import closing, contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from datasvc.child_process import ChildProcess
from datasvc.errors import BusyError, ConfigError, DatasvcError
from datasvc.extras import explain_missing

if TYPE_CHECKING:
    import duckdb

_T = TypeVar("_T")
_INTERRUPT_AGAIN_S: Final = 0.1  # time between two interrupts of a query, see `fetch`
CHILD_MEMORY_BYTES: Final = 512 << 20
"""Memory that a child process may use for a query, in addition to its programs."""
_CHILDREN: Final = 2
_START_S: Final = 60.0
_GRACE_S: Final = 0.5  # after the time of a query is over, before its child is killed
_MAX_WAITING: Final = 8  # queries that wait for a child: further ones are refused, so that they hold no threads
_PRELOADED: Final = ("datasvc.shards.query.histogram", "datasvc.shards.query.scan", "duckdb")
_FOLDER_PREFIX: Final = "datasvc-sql-"
_SETTINGS: Final = {
    "autoinstall_known_extensions": False,
    "autoload_known_extensions": False,
    "arrow_large_buffer_size": True,  # a column of blobs may exceed 2 GiB
}


class QueryLimits:
    """Limits of the queries of one request, which `limited` applies. Thread-safe.

    Args:
        time_s: seconds from now until all queries must have ended.
        memory_bytes: memory of the database of each query; what it needs beyond that goes to a temporary folder.
        spilled_bytes: size of this folder.
        end_s: when the time is over, by `time.monotonic()`, which all processes of a machine share; None: from now.
    """

    def __init__(self, *, time_s: float, memory_bytes: int, spilled_bytes: int, end_s: float | None = None) -> None:
        self._time_s = time_s
        self._end_s = time.monotonic() + time_s if end_s is None else end_s
        self._sizes = {"memory_bytes": memory_bytes, "spilled_bytes": spilled_bytes}
        self._stopped: Future[None] = Future()
        self.settings = {
            "memory_limit": f"{memory_bytes}B",
            "max_temp_directory_size": f"{spilled_bytes}B",
        }

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of the same limits in another process."""
        return {"time_s": self._time_s, "end_s": self._end_s, **self._sizes}

    def stop(self) -> None:
        """End the queries, whose results are not needed any more."""
        if not self._stopped.done():
            self._stopped.set_result(None)

    def wait(self, result: Future[Any], grace_s: float = 0.0) -> None:
        """Wait for the result of a query. Raise ConfigError if the time and `grace_s` are over, or after `stop`."""
        wait([result, self._stopped], max(0.0, self._end_s + grace_s - time.monotonic()), FIRST_COMPLETED)
        if not result.done():
            raise ConfigError(f"the query did not end in {self._time_s:g} s and was stopped; narrow the condition")

    def wait_for_start(self, started: Future[Any]) -> None:
        """Wait until a child has started, which does not count as time of the query."""
        began_s = time.monotonic()
        wait([started, self._stopped], _START_S, FIRST_COMPLETED)
        self._end_s += time.monotonic() - began_s


_limits: ContextVar[QueryLimits | None] = ContextVar("limits of queries", default=None)


@contextmanager
def limited(limits: QueryLimits) -> Iterator[None]:
    """Apply limits to the queries of this context. Without them, a query takes what it needs."""
    token = _limits.set(limits)
    try:
        yield
    finally:
        _limits.reset(token)


def connect(**settings: Any) -> duckdb.DuckDBPyConnection:
    """Open a database. The caller registers tables and then calls `lock`: without it, SQL of users can access files.

    `settings` are options of DuckDB.

    Raises:
        MissingPackageError: DuckDB is not installed.
    """
    with explain_missing("a query or condition in SQL"):
        import duckdb  # takes a fifth of a second, and most programs run no SQL

    return duckdb.connect(config={**_SETTINGS, **settings})


@contextmanager
def connected() -> Iterator[duckdb.DuckDBPyConnection]:
    """Open a database that may spill to a temporary folder; close it at the end. It is not locked, see `connect`."""
    limits = _limits.get()
    with (
        _spill_folder() as folder,
        closing(connect(temp_directory=folder, **(limits.settings if limits else {}))) as connection,
    ):
        yield connection


@contextmanager
def _spill_folder() -> Iterator[str]:
    """Create a folder for what a query does not hold in memory, and remove it at the end."""
    _remove_abandoned_once()
    while True:
        folder = tempfile.mkdtemp(prefix=_FOLDER_PREFIX)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.path.isdir(folder):  # another process may have removed it before it was locked
            break
        os.close(descriptor)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(descriptor)


def _remove_abandoned() -> None:
    """Remove the folders of processes that were killed in a query: the kernel has released the locks of these."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_FOLDER_PREFIX}*"):
        with suppress(OSError):  # another user's, or locked
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(descriptor)


_remove_abandoned_once: Final = functools.cache(_remove_abandoned)


def lock(connection: duckdb.DuckDBPyConnection) -> None:
    """Disable access to files, network and Python variables. No later statement can enable it."""
    connection.execute("SET enable_external_access = false; SET lock_configuration = true")


def only_query(connection: duckdb.DuckDBPyConnection, sql: str, *, example: str) -> Any:
    """Return the only statement of `sql`; `example` is a valid query for the error message.

    Raises:
        ConfigError: `sql` is not exactly one statement that only reads.
        duckdb.Error: `sql` cannot be parsed.
    """
    import duckdb

    kinds = duckdb.StatementType
    statements = connection.extract_statements(sql)
    # DuckDB replaces PIVOT by several statements, and returns them as one of type MULTI.
    if len(statements) != 1 or statements[0].type not in {kinds.SELECT, kinds.EXPLAIN, kinds.MULTI}:
        raise ConfigError(f"{sql!r} is not a single query; expected one, such as {example!r}")
    return statements[0]


def fetch(connection: duckdb.DuckDBPyConnection, read: Callable[[], _T]) -> _T:
    """Return the result of `read`, which executes a query; Ctrl-C ends the query, however long it takes.

    Raises ConfigError if the query exceeds the time of `limited`, and the errors of `read`.
    """
    # Execute it in another thread: DuckDB returns at the end of the query, and Python handles no signal until then.
    # DuckDB ignores an interrupt that comes before the query starts, so repeat it.
    return _run(read, connection.interrupt)


def confined(function: Callable[..., _T], *arguments: Any) -> _T:
    """Return `function(*arguments)`, called in a child process if `limited` applies, and here otherwise.

    Function, arguments and result are pickled. Raises the errors of `function`, and:

    Raises:
        ConfigError: the limits are exceeded.
        BusyError: too many queries wait.
    """
    limits = _limits.get()
    if limits is None:
        return function(*arguments)
    place = _children.take()
    try:
        limits.wait(place)
    except BaseException:
        if not place.cancel():
            _children.give_back(place.result())
        raise
    child = place.result()
    limits.wait_for_start(child.started)
    try:
        # A child that interrupts the query itself can be used for the next one.
        return _run(lambda: child.call(limits, function, arguments), child.process.kill, _GRACE_S)
    finally:
        _children.give_back(child)


def warm() -> None:
    """Start a child process, if none is running, so that the first query does not wait for it."""
    with suppress(BusyError, OSError):
        _children.give_back(_children.take().result())


def _run(read: Callable[[], _T], end: Callable[[], None], grace_s: float = 0.0) -> _T:
    """Return the result of `read`, called in another thread; if it is late or interrupted, repeat `end`."""
    result: Future[_T] = Future()

    def run() -> None:
        try:
            result.set_result(read())
        except BaseException as error:  # noqa: BLE001 - raised by `result`
            result.set_exception(error)

    thread = threading.Thread(target=run, name="datasvc-sql")
    limits = _limits.get()
    try:
        thread.start()
        if limits is not None:
            limits.wait(result, grace_s)
        return result.result()
    except BaseException:
        while thread.is_alive():
            end()
            thread.join(_INTERRUPT_AGAIN_S)
        raise


class _Child(ChildProcess):
    """A process that calls functions, see `_serve`."""

    def __init__(self) -> None:
        super().__init__("datasvc.sql_sandbox", CHILD_MEMORY_BYTES, answers=True)
        self.is_usable = True
        self.started: Future[None] = Future()
        threading.Thread(target=self._wait, daemon=True, name="datasvc-sql-start").start()

    def _wait(self) -> None:
        self.read_line()
        self.started.set_result(None)

    def call(self, limits: QueryLimits, function: Callable[..., _T], arguments: Sequence[Any]) -> _T:
        """Return the result of a function; raise its error, or ConfigError if the process ends."""
        assert self.process.stdout is not None
        self.is_usable = False
        self.started.result()
        self.send((limits.arguments, function, arguments))
        try:
            self.is_usable, result, error = pickle.load(self.process.stdout)  # noqa: S301 - from our own child
        except (EOFError, pickle.UnpicklingError):
            raise ConfigError(
                f"the query ended its process, which may use {CHILD_MEMORY_BYTES >> 20} MiB of memory; narrow the "
                "condition"
            ) from None
        if error is not None:
            raise error
        return result  # type: ignore[no-any-return]

    def close(self) -> None:
        self.process.kill()  # a query may be running
        super().close()
        _remove_abandoned()


class _Children:
    """At most `_CHILDREN` child processes, which queries use in turn. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_to_start = _CHILDREN
        self._idle: list[_Child] = []
        self._waiting: deque[Future[_Child]] = deque()

    def take(self) -> Future[_Child]:
        """Return a future child, which must be given back. Raise BusyError, OSError."""
        place: Future[_Child] = Future()
        with self._lock:
            if not self._idle and self._num_to_start:
                self._idle.append(_Child())
                self._num_to_start -= 1
            if self._idle:
                place.set_result(self._idle.pop())
                return place
            self._waiting = deque(waiting for waiting in self._waiting if not waiting.cancelled())
            if len(self._waiting) == _MAX_WAITING:
                raise BusyError(f"{_CHILDREN + _MAX_WAITING} other queries are running; try again in a moment")
            self._waiting.append(place)
        return place

    def give_back(self, child: _Child) -> None:
        """Let another query use the child; replace one that is late, or has grown, before the next query comes."""
        if not child.is_usable:
            child.close()
            child = _Child()
        while True:
            with self._lock:
                if not self._waiting:
                    self._idle.append(child)
                    return
                place = self._waiting.popleft()
            if place.set_running_or_notify_cancel():
                place.set_result(child)
                return


_children: Final = _Children()


def serve() -> None:
    """Run a child process: call the functions that arrive on standard input, and send their results."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # output of libraries goes to stderr, so that stdout has replies only
    messages = sys.stdin.buffer
    threading.Thread(target=_end_with_parent, daemon=True).start()
    memory_bytes: int = pickle.load(messages)  # noqa: S301 - from our own parent
    for module in _PRELOADED:
        importlib.import_module(module)
    most = _data_bytes() + memory_bytes
    # Not RLIMIT_AS: shards are mapped, and their size is no memory of this process.
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    with suppress(EOFError, BrokenPipeError):
        replies.write(b"started\n")
        replies.flush()
        while True:
            limits, function, arguments = pickle.load(messages)  # noqa: S301 - from our own parent
            result, error = None, None
            try:
                with limited(QueryLimits(**limits)):
                    result = function(*arguments)
            except DatasvcError as raised:
                error = raised
            except MemoryError:
                error = ConfigError(
                    f"the query needs more than {memory_bytes >> 20} MiB of memory; narrow the condition"
                )
            # What queries leave behind may not take the memory of later ones.
            is_usable = _data_bytes() < most - memory_bytes // 2
            pickle.dump((is_usable, result, error), replies)
            replies.flush()


def _end_with_parent() -> None:
    """End this process as soon as the parent has closed our input, which this thread does not read."""
    input_closed = select.poll()
    input_closed.register(0, 0)
    input_closed.poll()
    os._exit(1)


def _data_bytes() -> int:
    """Return the bytes that RLIMIT_DATA counts."""
    found = re.search(r"VmData:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) << 10


if __name__ == "__main__":
    # As a module of its own name: this one is `__main__`, and has other limits than the functions that are called.
    importlib.import_module("datasvc.sql_sandbox").serve()
