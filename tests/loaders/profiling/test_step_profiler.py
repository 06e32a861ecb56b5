"""What the recorder adds up, with a clock that stands still but where a test moves it."""

import gc
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from datasvc.loaders.profiling.step_profiler import StepProfiler
from datasvc.loaders.profiling.step_times import Stage


class Clock:
    """Nanoseconds that pass when a test says so."""

    def __init__(self):
        self.now_ns = 0

    def __call__(self):
        return self.now_ns

    def advance(self, milliseconds):
        self.now_ns += round(milliseconds * 1_000_000)


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def stopwatch(clock):
    return StepProfiler(clock)


def step(stopwatch, clock, *, consumer=0, samples=1, **stages):
    """Run one step whose stages, and then the consumer, take so many milliseconds."""
    with stopwatch.step() as timer:
        timer.num_samples = samples
        for stage, milliseconds in stages.items():
            with stopwatch.stage(Stage(stage)):
                clock.advance(milliseconds)
    clock.advance(consumer)


def in_thread(work):
    thread = threading.Thread(target=work, name="decoder")
    thread.start()
    thread.join()


def test_a_call_is_split_into_its_stages_and_the_rest_of_it(stopwatch, clock):
    with stopwatch.step() as timer:
        timer.num_samples = 64
        clock.advance(1)
        with stopwatch.stage(Stage.READ):
            clock.advance(10)
            with stopwatch.stage(Stage.ORIGIN):
                clock.advance(200)
            clock.advance(5)
    clock.advance(50)
    totals = stopwatch.totals()
    assert (totals.num_steps, totals.num_samples) == (1, 64)
    assert totals.blocked_s == pytest.approx({Stage.READ: 0.015, Stage.ORIGIN: 0.2, Stage.LOADER: 0.001})
    assert (totals.wait_s, totals.consumer_s) == pytest.approx((0.216, 0.05))


# A program of nested stages: how long each takes itself, and what it holds.
programs = st.recursive(
    st.just([]),
    lambda inner: st.lists(st.tuples(st.sampled_from(list(Stage)), st.integers(0, 9), inner), max_size=4),
    max_leaves=12,
)


@given(st.lists(programs, min_size=1, max_size=5), st.integers(0, 9))
def test_the_stages_of_all_steps_sum_up_to_what_the_calls_took(steps, rest):
    clock = Clock()
    stopwatch = StepProfiler(clock)

    def run(program):
        for stage, milliseconds, inner in program:
            with stopwatch.stage(stage):
                clock.advance(milliseconds)
                run(inner)

    for program in steps:
        with stopwatch.step():
            clock.advance(rest)
            run(program)
        clock.advance(1)
    totals = stopwatch.totals()
    assert sum(totals.blocked_s.values()) == pytest.approx(totals.wait_s)
    assert totals.wait_s + totals.consumer_s == pytest.approx(clock.now_ns / 1e9)
    assert totals == stopwatch.totals(whole=True)


def test_work_of_other_threads_is_no_wait(stopwatch, clock):
    def decode():
        with stopwatch.stage(Stage.DECODE):
            clock.advance(30)

    with stopwatch.step():
        in_thread(decode)
    totals = stopwatch.totals()
    assert totals.beside_s == pytest.approx({Stage.DECODE: 0.03})
    assert Stage.DECODE not in totals.blocked_s


def test_threads_that_work_at_once_are_counted(stopwatch):
    both = threading.Barrier(3, timeout=10)

    def decode():
        with stopwatch.stage(Stage.DECODE):
            both.wait()
            both.wait()

    threads = [threading.Thread(target=decode) for _ in range(2)]
    for thread in threads:
        thread.start()
    both.wait()
    both.wait()
    for thread in threads:
        thread.join()
    in_thread(lambda: stopwatch.stage(Stage.DECODE).__enter__().__exit__(None, None, None))
    assert stopwatch.totals().num_beside == {Stage.DECODE: 2}


def test_many_threads_lose_no_time(stopwatch):
    ticks = iter(range(10**9))
    stopwatch.clock = ticks.__next__  # each reading is one more: a stage takes at least 1

    def decode():
        for _ in range(500):
            with stopwatch.stage(Stage.DECODE):
                pass

    threads = [threading.Thread(target=decode) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    spans = stopwatch.spans()
    assert len(spans) == 2000
    assert stopwatch.totals().beside_s[Stage.DECODE] == pytest.approx(sum(span.duration_ns for span in spans) / 1e9)


def test_a_step_waited_for_threads_where_that_took_more_than_the_asking(stopwatch, clock):
    for waited in (0.1, 5):
        with stopwatch.step(), stopwatch.waiting(Stage.DECODE):
            clock.advance(waited)
        clock.advance(10)
    totals = stopwatch.totals()
    assert totals.num_bound_steps == 1
    assert totals.waiting_s == totals.blocked_s == pytest.approx({Stage.DECODE: 0.0051})


def test_a_call_that_fails_is_no_step_and_leaves_nothing_behind(stopwatch, clock):
    step(stopwatch, clock, read=5, consumer=10)
    with pytest.raises(KeyboardInterrupt), stopwatch.step(), stopwatch.stage(Stage.ORIGIN):
        clock.advance(1000)
        raise KeyboardInterrupt
    clock.advance(1000)  # whatever the caller does about it
    step(stopwatch, clock, read=5, consumer=10)
    totals = stopwatch.totals()
    assert (totals.num_steps, totals.wait_s, totals.consumer_s) == (2, pytest.approx(0.01), pytest.approx(0.02))
    assert [each.number for each in stopwatch.steps()] == [1, 2]


def test_what_an_interrupt_left_open_does_not_swallow_what_comes_after_it(stopwatch, clock):
    # Entered by hand and never left: an interrupt fell before the block began.
    stopwatch.step().__enter__()
    with stopwatch.step() as timer:
        timer.num_samples = 1
        stopwatch.stage(Stage.READ).__enter__()
    with stopwatch.stage(Stage.DECODE):
        clock.advance(5)
    assert stopwatch.totals().beside_s == pytest.approx({Stage.DECODE: 0.005})
    step(stopwatch, clock, decode=7)
    stopwatch.step().__enter__()
    step(stopwatch, clock, decode=7)
    assert stopwatch.totals().blocked_s == pytest.approx({Stage.DECODE: 0.014})
    assert stopwatch.totals().num_steps == 3


def test_what_the_caller_does_after_its_last_batch_is_no_step_s(stopwatch, clock):
    step(stopwatch, clock, consumer=10)
    stopwatch.pause()
    clock.advance(60_000)  # evaluates, commits a checkpoint
    step(stopwatch, clock, consumer=10)
    assert stopwatch.totals().consumer_s == pytest.approx(0.02)


def test_a_report_begins_anew_and_the_whole_goes_on(stopwatch, clock):
    step(stopwatch, clock, read=5, consumer=10, samples=8)
    stopwatch.restart()
    assert (stopwatch.totals().num_steps, stopwatch.steps()) == (0, [])
    step(stopwatch, clock, decode=3, consumer=20, samples=8)
    now, whole = stopwatch.totals(), stopwatch.totals(whole=True)
    assert (now.num_steps, now.consumer_s) == (1, pytest.approx(0.02))
    assert (whole.num_samples, whole.consumer_s) == (16, pytest.approx(0.03))
    assert whole.blocked_s == pytest.approx({Stage.READ: 0.005, Stage.DECODE: 0.003})
    assert [each.number for each in stopwatch.steps()] == [2]


def test_memory_is_bounded(stopwatch, clock):
    for _ in range(9000):
        step(stopwatch, clock, read=1, decode=1, consumer=1)
    assert stopwatch.totals().num_steps == 9000
    assert len(stopwatch.steps()) == 4096
    assert len(stopwatch.spans()) == 32768
    assert stopwatch.steps()[-1].number == 9000


def test_an_iterator_that_is_collected_at_any_moment_blocks_nobody(stopwatch, clock):
    """Its `finally` pauses the stopwatch, maybe while this very thread is inside of it."""

    class Forgotten:
        """Is collected soon, and leaves another one to be."""

        def __init__(self):
            self.itself = self

        def __del__(self):
            stopwatch.pause()
            if thread.is_alive():
                Forgotten()

    def run():
        Forgotten()
        for _ in range(20):
            step(stopwatch, clock, read=1, consumer=1)
            stopwatch.totals()

    # In a thread that the test need not wait for: blocked by itself it would never end.
    thread = threading.Thread(target=run, daemon=True)
    thresholds = gc.get_threshold()
    gc.set_threshold(1)
    try:
        thread.start()
        thread.join(timeout=20)
        assert not thread.is_alive()
    finally:
        gc.set_threshold(*thresholds)
    assert stopwatch.totals().num_steps == 20
