import os
import signal

import pytest

from datasvc.errors import ConfigError
from datasvc.sql_sandbox import QueryLimits, connected, fetch, limited, lock


def test_ctrl_c_ends_a_query_that_would_run_for_ever():
    with connected() as connection:
        lock(connection)
        numbers = connection.sql("select sum(a.range * b.range) from range(1000000000) a, range(1000000000) b")

        def read():
            os.kill(os.getpid(), signal.SIGINT)
            return numbers.fetchall()

        with pytest.raises(KeyboardInterrupt):
            fetch(connection, read)
        assert connection.sql("select 1").fetchall() == [(1,)]


@pytest.mark.parametrize("time_s", [0.05, 3600.0])
def test_limits_end_a_query_that_would_run_for_ever(time_s):
    limits = QueryLimits(time_s=time_s, memory_bytes=64 << 20, spilled_bytes=1 << 20)
    with limited(limits), connected() as connection:
        lock(connection)
        numbers = connection.sql("select sum(a.range * b.range) from range(1000000000) a, range(1000000000) b")

        def read():
            if time_s == 3600.0:
                limits.stop()
            return numbers.fetchall()

        with pytest.raises(ConfigError, match="narrow the condition"):
            fetch(connection, read)


def test_limits_bound_the_memory_of_a_query():
    import duckdb

    limits = QueryLimits(time_s=600.0, memory_bytes=8 << 20, spilled_bytes=1 << 20)
    with limited(limits), connected() as connection:
        lock(connection)
        with pytest.raises(duckdb.OutOfMemoryException):
            fetch(connection, lambda: connection.execute("select list(range) from range(100000000)").fetchone())
        assert fetch(connection, lambda: connection.execute("select 1").fetchone()) == (1,)
