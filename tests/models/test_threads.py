import threading

import pytest

from datasvc.errors import CorruptDataError
from datasvc.models.threads import run_in_threads
from datasvc.repository.objects import digest_of

CONTENT = bytes(1 << 20)


def test_results_come_in_the_order_of_the_arguments():
    assert run_in_threads(lambda a, b: a * b, [(n, 2) for n in range(50)], 4) == [2 * n for n in range(50)]
    assert run_in_threads(lambda a: a, [], 4) == []


@pytest.mark.parametrize("sizes", [[1] * 50, [1 << 20] * 50, [200_000] * 50, [1, 1 << 20] * 25, [0] * 49 + [1 << 30]])
def test_small_neighbours_are_done_by_one_thread_and_large_ones_by_several(sizes):
    groups = []

    def work(number):
        groups.append((threading.get_ident(), number))
        return number

    assert run_in_threads(work, [(n,) for n in range(50)], 4, sizes=sizes) == list(range(50))
    assert sorted(number for _, number in groups) == list(range(50))
    if sum(sizes) == 50:
        assert {thread for thread, _ in groups} == {threading.get_ident()}


def test_after_an_error_nothing_more_is_begun():
    calls = []

    def work(number):
        calls.append(number)
        if number == 0:
            raise CorruptDataError("bad")
        digest_of(CONTENT)

    with pytest.raises(CorruptDataError):
        run_in_threads(work, [(number,) for number in range(2000)], 2)
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
