"""The lock of an object on its way: never leaked by an interrupt, never waited for by who has the catalogue."""

import fcntl
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from datasvc.cache.catalogue.files import Files
from datasvc.repository.objects.objects import digest_of
from tests.cache.processes import ROOT, kill
from tests.support.threads import waits_in

ONE = digest_of(b"one")


def interrupted_at(step, work):
    """Do some work, with an interrupt before bytecode number `step` of files.py; returns whether it came that far."""
    left = [step]

    def trace(frame, event, _argument):
        if not frame.f_code.co_filename.endswith("cache/catalogue/files.py"):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            left[0] -= 1
            if left[0] == 0:
                raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        work()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(None)
    return False


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_at_any_instant_leaves_a_lock_that_is_known_or_none(tmp_path):
    files = Files(tmp_path)

    def interrupt_all():
        for work in (lambda: files.lock_incoming(ONE), lambda: files.unlock(ONE)):
            step = 0
            while True:
                step += 1
                if work.__code__.co_names[0] == "unlock":
                    assert files.lock_incoming(ONE)
                came = interrupted_at(step, work)
                if files.is_locked_by_this_thread(ONE):
                    files.unlock(ONE)
                assert not files.is_incoming_locked(ONE), step
                if not came:
                    break
            assert step > 10

    # In a thread of its own: an exception raised by a trace function in the middle of a handler stays the "current"
    # exception of its thread for ever (CPython 3.11), so that later tests would see it as the context of theirs.
    with ThreadPoolExecutor(1) as pool:
        pool.submit(interrupt_all).result()
    assert sys.exception() is None


# Waits for an object as a process does that was stopped in the middle.
STOPPED = """
import fcntl, os, signal, sys
descriptor = os.open(sys.argv[1], os.O_RDONLY)
fcntl.flock(descriptor, fcntl.LOCK_SH)
print("waiting", flush=True)
os.kill(os.getpid(), signal.SIGSTOP)
"""


def test_who_waits_and_is_stopped_keeps_others_from_that_object_alone(tmp_path):
    files = Files(tmp_path)
    (files.folder / "incoming" / ONE).touch()
    process = subprocess.Popen(
        [sys.executable, "-c", STOPPED, files.folder / "incoming" / ONE], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert process.stdout.readline() == "waiting\n"
    assert not files.is_incoming_locked(ONE)
    assert not files.lock_incoming(ONE)  # at once: the caller has the catalogue
    waiting = threading.Thread(target=files.wait_for_incoming, args=(ONE,))
    waiting.start()
    assert waits_in(waiting, Files.wait_for_incoming)
    kill(process)
    waiting.join()
    assert files.lock_incoming(ONE)
    files.unlock(ONE)


def test_many_may_wait_for_one_at_a_time(tmp_path):
    files = Files(tmp_path)
    descriptor = os.open(files.folder / "incoming" / ONE, os.O_CREAT | os.O_RDWR)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    threads = [threading.Thread(target=files.wait_for_incoming, args=(ONE,)) for _ in range(8)]
    [thread.start() for thread in threads]
    os.close(descriptor)
    [thread.join(20) for thread in threads]
    assert not any(thread.is_alive() for thread in threads)
