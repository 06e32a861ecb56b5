"""In-memory DuckDB databases for SQL of users. The SQL cannot access files, network, extensions or Python variables.

`delete --where`, and the SQL queries of data sets and model versions, run in such a database.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import closing, contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final, TypeVar

from datasvc.errors import ConfigError
from datasvc.extras import explain_missing

if TYPE_CHECKING:
    import duckdb

_T = TypeVar("_T")
_INTERRUPT_AGAIN_S: Final = 0.1  # time between two interrupts of a query, see `fetch`
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
    """

    def __init__(self, *, time_s: float, memory_bytes: int, spilled_bytes: int) -> None:
        self._time_s = time_s
        self._end_s = time.monotonic() + time_s
        self._stopped: Future[None] = Future()
        self.settings = {
            "memory_limit": f"{memory_bytes}B",
            "max_temp_directory_size": f"{spilled_bytes}B",
        }

    def stop(self) -> None:
        """End the queries, whose results are not needed any more."""
        if not self._stopped.done():
            self._stopped.set_result(None)

    def wait(self, result: Future[Any]) -> None:
        """Wait for the result of a query. Raise ConfigError if the time is over, or after `stop`."""
        wait([result, self._stopped], max(0.0, self._end_s - time.monotonic()), FIRST_COMPLETED)
        if not result.done():
            raise ConfigError(f"the query did not end in {self._time_s:g} s and was stopped; narrow the condition")


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
        tempfile.TemporaryDirectory(prefix="datasvc-sql-", ignore_cleanup_errors=True) as folder,
        closing(connect(temp_directory=folder, **(limits.settings if limits else {}))) as connection,
    ):
        yield connection


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
            limits.wait(result)
        return result.result()
    except BaseException:
        # DuckDB ignores an interrupt that comes before the query starts, so repeat it.
        while thread.is_alive():
            connection.interrupt()
            thread.join(_INTERRUPT_AGAIN_S)
        raise
