"""Signals, in processes of their own."""

import os
import signal
import subprocess
from pathlib import Path

import pytest

from datasvc.errors import ConfigError
from datasvc.models.saving.preemption import Preemption
from tests.support import warm_python
from tests.support.threads import in_thread

ROOT = Path(__file__).parents[3]


def test_a_signal_is_noted_and_handlers_come_back():
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    preemption = Preemption(grace_s=100.0)
    try:
        assert (preemption.received, preemption.remaining_s) == (None, 100.0)
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)  # a terminal and a launcher pass on the same one
        signal.raise_signal(signal.SIGTERM)
        assert preemption.received == signal.SIGINT
        assert 0 < preemption.remaining_s < 100.0
    finally:
        preemption.close()
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before


def test_a_later_ctrl_c_interrupts(monkeypatch):
    preemption = Preemption(grace_s=100.0)
    try:
        signal.raise_signal(signal.SIGINT)
        monkeypatch.setattr("datasvc.models.saving.preemption._SAME_CTRL_C_S", 0.0)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    finally:
        preemption.close()


def test_a_handler_that_was_set_since_stays():
    preemption = Preemption(grace_s=100.0)
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    preemption.close()
    assert (
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before == preemption._on_signal else before) == signal.SIG_IGN
    )


def test_a_handler_that_is_put_back_after_the_end_does_what_was_done_before():
    heard = []
    before = signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
    try:
        preemption = Preemption(grace_s=100.0)
        ours = signal.signal(signal.SIGTERM, signal.SIG_IGN)
        preemption.close()
        signal.signal(signal.SIGTERM, ours)
        signal.raise_signal(signal.SIGTERM)
        assert heard == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_two_that_take_signals_both_hear_them_and_close_in_any_order():
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    first, second = Preemption(grace_s=100.0), Preemption(grace_s=100.0)
    signal.raise_signal(signal.SIGTERM)
    assert (first.received, second.received) == (signal.SIGTERM, signal.SIGTERM)
    first.close()
    second.close()
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, -signal.SIGTERM), (signal.SIGINT, 3)])
def test_a_forked_child_ends_by_a_signal_as_it_would_have_otherwise(number, status):
    outer, preemption = Preemption(grace_s=100.0), Preemption(grace_s=100.0)
    try:
        pid = os.fork()
        if not pid:
            try:
                signal.raise_signal(number)
            except KeyboardInterrupt:
                os._exit(3)
            os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == status
        signal.raise_signal(number)
        assert preemption.received == number, "the parent goes on as before"
    finally:
        preemption.close()
        outer.close()


def test_another_thread_than_the_main_one_is_told_that_it_cannot():
    thread, raised = in_thread(lambda: Preemption(1.0))
    thread.join()
    assert isinstance(raised[0], ConfigError)
    assert "main thread only" in str(raised[0])


OVERDUE = """
import signal, threading
from datasvc.models.saving.preemption import Preemption
preemption = Preemption(0.05)
signal.raise_signal(signal.SIGTERM)
lock = threading.Lock(); lock.acquire()
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
lock.acquire()  # something that never comes
"""


def test_a_process_that_does_not_end_within_the_grace_is_ended():
    done = subprocess.run(
        [warm_python.command(), "-c", OVERDUE], cwd=ROOT, capture_output=True, text=True, timeout=50, check=False
    )
    assert done.returncode == 128 + signal.SIGTERM
    assert (
        "SIGTERM was received 0.05 s ago and the run has not ended: the process exits now, uncommitted saves are lost"
        in done.stderr
    )
