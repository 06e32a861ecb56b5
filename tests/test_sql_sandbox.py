import os
import signal

import pytest

from datasvc.sql_sandbox import connected, fetch, lock


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
