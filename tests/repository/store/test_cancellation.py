"""An interrupt wakes whoever waits, once, and touches nothing of those who have gone."""

import threading

from datasvc.repository.store.obstore_loop import CancellationToken


def test_reads_that_run_are_cancelled_and_ended_ones_are_not():
    interrupt, cuts = CancellationToken(), []
    with interrupt.on_cancel(lambda: cuts.append("over")):
        pass
    with interrupt.on_cancel(lambda: cuts.append("one")), interrupt.on_cancel(lambda: cuts.append("two")):
        assert not interrupt.is_set
        interrupt.set()
        assert cuts == ["one", "two"]
    assert interrupt.is_set


def test_a_read_that_begins_after_the_cancellation_is_cancelled_at_once():
    interrupt, cuts = CancellationToken(), []
    interrupt.set()
    with interrupt.on_cancel(lambda: cuts.append("late")):
        assert cuts == ["late"]


def test_a_wait_ends_with_it():
    interrupt, answers = CancellationToken(), []
    assert interrupt.wait(0) is False
    thread = threading.Thread(target=lambda: answers.append(interrupt.wait(60)))
    thread.start()
    interrupt.set()
    thread.join()
    assert answers == [True]
