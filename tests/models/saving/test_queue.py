"""The thread that saves: order, overlap, and failures that nobody may miss."""

import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from datasvc.errors import BusyError, ConflictError, DatasvcError, UnavailableError
from datasvc.models.saving.queue import SaveHandle, SaveQueue
from datasvc.repository import Resolved
from tests.support.threads import waits_in

ROOT = Path(__file__).parents[3]


def version(number):
    return Resolved("models", "m", number)


@dataclass
class Task:
    """A save that does `work`."""

    handle: SaveHandle
    work: Callable


def write(task):
    return task.work()


def submit(saver, step, work):
    task = Task(SaveHandle(step), work)
    saver.submit(task)
    return task.handle


def failing(error):
    def work():
        raise error

    return work


def test_saves_are_done_one_after_the_other_in_their_order():
    saver, order, gate = SaveQueue(write, limit=2, overlap="queue"), [], threading.Event()

    def work(number):
        gate.wait()
        order.append(number)
        return version(number)

    handles = [submit(saver, number, lambda number=number: work(number)) for number in (1, 2, 3)]
    assert saver.is_busy
    assert not handles[0].done()
    assert handles[0].version is None
    gate.set()
    assert handles[2].result() == version(3)
    assert order == [1, 2, 3]
    assert [handle.version for handle in handles] == [version(1), version(2), version(3)]
    saver.wait()
    assert not saver.is_busy


def test_a_save_waits_for_room_and_not_for_all_before_it():
    saver, gates = SaveQueue(write, limit=2, overlap="queue"), [threading.Event() for _ in range(2)]
    for number, gate in enumerate(gates):
        submit(saver, number, lambda gate=gate, number=number: gate.wait() and version(number))
    waiting = threading.Thread(target=saver.wait_for_slot)
    waiting.start()
    assert waits_in(waiting, threading.Condition.wait)
    gates[0].set()
    waiting.join()
    gates[1].set()
    saver.wait()


def test_an_overlap_that_is_refused_says_which_save_goes_on():
    saver, gate = SaveQueue(write, limit=2, overlap="refuse"), threading.Event()
    saver.check(10)
    submit(saver, 10, lambda: gate.wait() and version(1))
    with pytest.raises(BusyError, match="step 20 is not saved: the save of step 10 is still running"):
        saver.check(20)
    gate.set()
    saver.wait()
    saver.check(20)


def test_a_failure_is_raised_by_the_next_save_named_and_once():
    saver = SaveQueue(write, limit=2, overlap="queue")
    submit(saver, 10, failing(ConflictError("others were faster")))
    with pytest.raises(ConflictError, match="the save of step 10 failed: others were faster"):
        saver.wait()
    saver.check(20)
    saver.wait()


def test_a_failure_that_the_handle_told_is_not_raised_again_and_a_foreign_one_is_wrapped():
    saver = SaveQueue(write, limit=2, overlap="queue")
    handle = submit(saver, 10, failing(UnavailableError("no answer")))
    with pytest.raises(UnavailableError, match="no answer"):
        handle.result()
    saver.wait()
    submit(saver, 20, failing(MemoryError("too much")))
    with pytest.raises(DatasvcError, match="the save of step 20 failed: too much") as caught:
        saver.wait()
    assert isinstance(caught.value.__cause__, MemoryError)


def test_a_failure_is_not_lost_on_who_asks_at_the_moment_it_happens():
    saver = SaveQueue(write, limit=2, overlap="queue")

    class Asked(SaveHandle):
        def settle(self, *ended):
            assert saver.take_unreported_failure() is None
            super().settle(*ended)

    saver.submit(Task(Asked(10), failing(UnavailableError("no answer"))))
    with pytest.raises(UnavailableError, match="the save of step 10 failed"):
        saver.wait()


def test_what_another_rank_has_told_of_a_save_is_not_told_here_again():
    saver, gate = SaveQueue(write, limit=2, overlap="queue"), threading.Event()

    def work():
        gate.wait()
        raise UnavailableError("no answer")

    submit(saver, 10, failing(UnavailableError("no answer")))
    saver.finish()
    submit(saver, 20, work)
    submit(saver, 30, failing(UnavailableError("no answer")))
    saver.mark_reported({0, 1})
    gate.set()
    with pytest.raises(UnavailableError, match="the save of step 30 failed"):
        saver.wait()


def test_a_save_for_which_no_thread_can_be_started_is_done_all_the_same(monkeypatch, caplog):
    saver = SaveQueue(write, limit=2, overlap="queue")

    def start(_):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        handle = submit(saver, 10, lambda: version(1))
    assert handle.result(timeout=10) == version(1)
    assert "step 10 stops the training: can't start new thread" in caplog.text
    assert submit(saver, 20, lambda: version(2)).result(timeout=10) == version(2)
    saver.wait(10)


def test_waiting_for_a_save_has_an_end():
    saver, gate = SaveQueue(write, limit=2, overlap="queue"), threading.Event()
    handle = submit(saver, 10, lambda: gate.wait() and version(1))
    with pytest.raises(UnavailableError, match=r"step 10 has not ended within 0.01 s, and continues"):
        handle.result(timeout=0.01)
    with pytest.raises(UnavailableError, match="and continues"):
        saver.wait(0.01)
    gate.set()
    assert handle.result() == version(1)


PROGRAM = """
import os, sys, threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from datasvc.errors import ConfigError, UnavailableError
from datasvc.models.saving.queue import SaveQueue
from datasvc.models.saving.queue import SaveHandle

ends = threading.Event()
threading._register_atexit(ends.set)

def main():
    def work(_task):
        ends.wait()
        with ThreadPoolExecutor(2) as pool:
            print("stored", sum(pool.map(int, ["1", "2"])), flush=True)
        raise UnavailableError("the disk is gone")
    saver = SaveQueue(work, limit=2, overlap="queue")
    saver.submit(SimpleNamespace(handle=SaveHandle(7)))
    if not os.fork():
        try:
            saver.check(8)
        except ConfigError as error:
            print("child:", error, flush=True)
        return  # and ends without waiting for a thread that it does not have
    os.wait()
main()
"""


def test_a_program_ends_after_its_saves_and_says_what_failed_and_a_forked_child_does_not_wait_for_them():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, timeout=50, check=True
    )
    assert "stored 3" in done.stdout
    assert "child: this manager was made in the parent of this forked process" in done.stdout
    assert "the save of step 7 failed: the disk is gone" in done.stderr
