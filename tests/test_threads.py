import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading
import warnings
from contextlib import suppress
from contextvars import ContextVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from datasvc.errors import CorruptDataError
from datasvc.repository.objects.objects import digest_of
from datasvc.sizes import group_by_size
from datasvc.threads import (
    call_within,
    collection_paused,
    deferred_signals,
    iterate_in_threads,
    map_in_threads,
    run_in_threads,
)
from tests.support.gate import Gate

CONTENT = bytes(1 << 20)


def test_results_come_in_the_order_of_the_arguments():
    assert run_in_threads(lambda a, b: a * b, [(n, 2) for n in range(50)], 4) == [2 * n for n in range(50)]
    assert run_in_threads(lambda a: a, [], 4) == []


def test_results_are_made_in_groups_as_they_are_needed():
    made = []
    results = iterate_in_threads(lambda number: made.append(number) or -number, range(10), 4)
    assert next(results) == 0
    assert sorted(made) == [0, 1, 2, 3]
    assert list(results) == [-number for number in range(1, 10)]


@given(st.lists(st.integers(0, 3 << 20), max_size=60))
def test_calls_are_made_once_each_and_neighbours_with_few_bytes_by_one_thread(sizes):
    arguments = [(number,) for number in range(len(sizes))]
    groups = list(group_by_size(range(len(sizes)), sizes.__getitem__, 1 << 20))
    assert [number for group in groups for number in group] == list(range(len(sizes)))
    assert all(len(group) == 1 or sum(sizes[number] for number in group) <= 1 << 20 for group in groups)
    assert len(groups) <= 1 + 2 * sum(sizes) / (1 << 20)
    assert run_in_threads(lambda number: -number, arguments, 4, sizes=sizes) == [-n for n in range(len(sizes))]


@pytest.mark.parametrize("sizes", [None, [1] * 20_000], ids=["one by one", "in groups"])
def test_after_an_error_nothing_more_is_begun(sizes):
    calls = []

    def work(number):
        calls.append(number)
        if number == 0:
            raise CorruptDataError("bad")
        digest_of(CONTENT)

    with pytest.raises(CorruptDataError):
        run_in_threads(work, [(number,) for number in range(20_000)], 2, sizes=sizes)
    assert len(calls) < 1000


class Interrupted(list):
    """Arguments after which Ctrl-C comes, when all of them are handed to the threads."""

    def __init__(self, arguments):
        super().__init__(arguments)
        self.came = threading.Event()

    def __iter__(self):
        yield from super().__iter__()
        self.came.set()
        raise KeyboardInterrupt


def test_an_interrupt_ends_the_work_as_an_error_does():
    calls, arguments = [], Interrupted((number,) for number in range(2000))

    def work(number):
        calls.append(number)
        arguments.came.wait()
        digest_of(CONTENT)

    with pytest.raises(KeyboardInterrupt):
        run_in_threads(work, arguments, 2)
    assert len(calls) < 1000


def test_of_calls_that_fail_together_the_earliest_is_raised():
    together = threading.Barrier(8)

    def work(number):
        together.wait(20)
        raise CorruptDataError(str(number))

    for _ in range(4):
        with pytest.raises(CorruptDataError, match=r"^0$"):
            map_in_threads(work, range(8), 8)


ENDING = """
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from datasvc.threads import run_before_threads_end
pool, ended = ThreadPoolExecutor(1), threading.Event()
threading.Thread(target=ended.wait).start()  # the interpreter waits for it
run_before_threads_end(lambda: (print(pool.submit(int, "7").result()), ended.set()))
"""


def test_a_hook_runs_at_exit_before_threads_are_awaited_and_pools_are_shut_down():
    done = subprocess.run([sys.executable, "-c", ENDING], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout == "7\n"


def test_calls_run_in_the_context_of_the_caller():
    name = ContextVar("name", default="")
    name.set("caller")
    assert map_in_threads(lambda _: name.get(), range(3), 2) == ["caller"] * 3


def test_a_call_within_a_time_gives_its_result_or_its_error_in_the_context_of_the_caller():
    variable = ContextVar("variable")
    variable.set(1)
    assert call_within(600, variable.get) == 1
    with pytest.raises(CorruptDataError, match="of the call"):
        call_within(600, lambda: (_ for _ in ()).throw(CorruptDataError("of the call")))
    end = threading.Event()
    with pytest.raises(TimeoutError):
        call_within(0.001, end.wait)
    end.set()


def test_signals_in_a_context_that_defers_them_are_all_handled_after_it():
    handled, before = [], signal.getsignal(signal.SIGINT)
    previous = signal.signal(signal.SIGTERM, lambda number, _frame: handled.append(number))
    try:
        with pytest.raises(KeyboardInterrupt), deferred_signals():
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGTERM)
            assert handled == []
        assert handled == [signal.SIGTERM]
        assert signal.getsignal(signal.SIGINT) is before
    finally:
        signal.signal(signal.SIGTERM, previous)


def test_an_interrupt_while_threads_are_started_waits_until_they_run(monkeypatch):
    start, started = threading.Thread.start, []

    def start_and_interrupt(thread):
        signal.raise_signal(signal.SIGINT)
        start(thread)
        started.append(thread)

    monkeypatch.setattr(threading.Thread, "start", start_and_interrupt)
    with pytest.raises(KeyboardInterrupt):
        run_in_threads(lambda number: number, [(0,), (1,)], 2)
    assert started


def test_an_event_loop_handles_a_deferred_signal_once():
    async def defer():
        handled = []
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, lambda: handled.append(1))
        with deferred_signals():
            signal.raise_signal(signal.SIGUSR1)
            await asyncio.sleep(0)
        for _ in range(100):  # the loop reads its socket, which a signal writes to before it returns
            await asyncio.sleep(0)
        return handled

    assert asyncio.run(defer()) == [1]


@pytest.mark.parametrize("is_enabled", [True, False])
def test_a_pause_of_the_collector_leaves_it_as_it_was(is_enabled):
    (gc.enable if is_enabled else gc.disable)()
    try:
        with suppress(ValueError), collection_paused(), collection_paused():
            assert not gc.isenabled()
            raise ValueError
        assert gc.isenabled() == is_enabled
    finally:
        gc.enable()


def test_a_process_that_is_forked_during_a_pause_of_another_thread_collects_garbage():
    """facebookresearch/dinov3#150: workers of a loader without the collector grow until they are killed."""
    gate = Gate()
    thread = threading.Thread(target=collection_paused()(gate.wait))
    thread.start()
    gate.begun.wait()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of threads beside a fork
        pid = os.fork()
    if not pid:
        os._exit(not gc.isenabled())
    gate.open()
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert gc.isenabled()
