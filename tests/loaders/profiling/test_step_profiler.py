"""What the recorder adds up, with a clock that stands still but where a test moves it."""

import gc
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from datasvc.loaders.profiling.step_profiler import StepProfiler
from datasvc.loaders.profiling.step_times import Stage
from datasvc.testing import FakeClock


@pytest.fixture
def clock():
    return FakeClock()


def profiler_at(clock):
    """Return a profiler for which the clock counts milliseconds."""
    return StepProfiler(lambda: round(clock() * 1e6))


@pytest.fixture
def profiler(clock):
    return profiler_at(clock)


def step(profiler, clock, *, consumer=0, samples=1, **stages):
    """Run one step whose stages, and then the consumer, take so many milliseconds."""
    with profiler.step() as timer:
        timer.num_samples = samples
        for stage, milliseconds in stages.items():
            with profiler.stage(Stage(stage)):
                clock.advance(milliseconds)
    clock.advance(consumer)


def in_thread(work):
    thread = threading.Thread(target=work, name="decoder")
    thread.start()
    thread.join()


def test_a_call_is_split_into_its_stages_and_the_rest_of_it(profiler, clock):
    with profiler.step() as timer:
        timer.num_samples = 64
        clock.advance(1)
        with profiler.stage(Stage.READ):
            clock.advance(10)
            with profiler.stage(Stage.ORIGIN):
                clock.advance(200)
            clock.advance(5)
    clock.advance(50)
    totals = profiler.totals()
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
    clock = FakeClock()
    profiler = profiler_at(clock)

    def run(program):
        for stage, milliseconds, inner in program:
            with profiler.stage(stage):
                clock.advance(milliseconds)
                run(inner)

    for program in steps:
        with profiler.step():
            clock.advance(rest)
            run(program)
        clock.advance(1)
    totals = profiler.totals()
    assert sum(totals.blocked_s.values()) == pytest.approx(totals.wait_s)
    assert totals.wait_s + totals.consumer_s == pytest.approx(clock() / 1000)
    assert totals == profiler.totals(whole=True)


def test_work_of_other_threads_is_no_wait(profiler, clock):
    def decode():
        with profiler.stage(Stage.DECODE):
            clock.advance(30)

    with profiler.step():
        in_thread(decode)
    totals = profiler.totals()
    assert totals.beside_s == pytest.approx({Stage.DECODE: 0.03})
    assert Stage.DECODE not in totals.blocked_s


def test_threads_that_work_at_once_are_counted(profiler):
    both = threading.Barrier(3, timeout=10)

    def decode():
        with profiler.stage(Stage.DECODE):
            both.wait()
            both.wait()

    threads = [threading.Thread(target=decode) for _ in range(2)]
    for thread in threads:
        thread.start()
    both.wait()
    both.wait()
    for thread in threads:
        thread.join()
    in_thread(lambda: profiler.stage(Stage.DECODE).__enter__().__exit__(None, None, None))
    assert profiler.totals().num_beside == {Stage.DECODE: 2}


def test_many_threads_lose_no_time(profiler):
    ticks = iter(range(10**9))
    profiler.clock = ticks.__next__  # each reading is one more: a stage takes at least 1

    def decode():
        for _ in range(500):
            with profiler.stage(Stage.DECODE):
                pass

    threads = [threading.Thread(target=decode) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    spans = profiler.spans()
    assert len(spans) == 2000
    assert profiler.totals().beside_s[Stage.DECODE] == pytest.approx(sum(span.duration_ns for span in spans) / 1e9)


def test_a_step_waited_for_threads_where_that_took_more_than_the_asking(profiler, clock):
    for waited in (0.1, 5):
        with profiler.step(), profiler.waiting(Stage.DECODE):
            clock.advance(waited)
        clock.advance(10)
    totals = profiler.totals()
    assert totals.num_bound_steps == 1
    assert totals.waiting_s == totals.blocked_s == pytest.approx({Stage.DECODE: 0.0051})


def test_a_call_that_fails_is_no_step_and_leaves_nothing_behind(profiler, clock):
    step(profiler, clock, read=5, consumer=10)
    with pytest.raises(KeyboardInterrupt), profiler.step(), profiler.stage(Stage.ORIGIN):
        clock.advance(1000)
        raise KeyboardInterrupt
    clock.advance(1000)  # whatever the caller does about it
    step(profiler, clock, read=5, consumer=10)
    totals = profiler.totals()
    assert (totals.num_steps, totals.wait_s, totals.consumer_s) == (2, pytest.approx(0.01), pytest.approx(0.02))
    assert [each.number for each in profiler.steps()] == [1, 2]


def test_what_an_interrupt_left_open_does_not_swallow_what_comes_after_it(profiler, clock):
    # Entered by hand and never left: an interrupt fell before the block began.
    profiler.step().__enter__()
    with profiler.step() as timer:
        timer.num_samples = 1
        profiler.stage(Stage.READ).__enter__()
    with profiler.stage(Stage.DECODE):
        clock.advance(5)
    assert profiler.totals().beside_s == pytest.approx({Stage.DECODE: 0.005})
    step(profiler, clock, decode=7)
    profiler.step().__enter__()
    step(profiler, clock, decode=7)
    assert profiler.totals().blocked_s == pytest.approx({Stage.DECODE: 0.014})
    assert profiler.totals().num_steps == 3


def test_what_the_caller_does_after_its_last_batch_is_no_step_s(profiler, clock):
    step(profiler, clock, consumer=10)
    profiler.pause()
    clock.advance(60_000)  # evaluates, commits a checkpoint
    step(profiler, clock, consumer=10)
    assert profiler.totals().consumer_s == pytest.approx(0.02)


def test_a_report_begins_anew_and_the_whole_goes_on(profiler, clock):
    step(profiler, clock, read=5, consumer=10, samples=8)
    profiler.restart()
    assert (profiler.totals().num_steps, profiler.steps()) == (0, [])
    step(profiler, clock, decode=3, consumer=20, samples=8)
    now, whole = profiler.totals(), profiler.totals(whole=True)
    assert (now.num_steps, now.consumer_s) == (1, pytest.approx(0.02))
    assert (whole.num_samples, whole.consumer_s) == (16, pytest.approx(0.03))
    assert whole.blocked_s == pytest.approx({Stage.READ: 0.005, Stage.DECODE: 0.003})
    assert [each.number for each in profiler.steps()] == [2]


def test_memory_is_bounded(profiler, clock):
    for _ in range(9000):
        step(profiler, clock, read=1, decode=1, consumer=1)
    assert profiler.totals().num_steps == 9000
    assert len(profiler.steps()) == 4096
    assert len(profiler.spans()) == 32768
    assert profiler.steps()[-1].number == 9000


def test_an_iterator_that_is_collected_at_any_moment_blocks_nobody(profiler, clock):
    """Its `finally` pauses the profiler, maybe while this very thread is inside of it."""

    class Forgotten:
        """Is collected soon, and leaves another one to be."""

        def __init__(self):
            self.itself = self

        def __del__(self):
            profiler.pause()
            if thread.is_alive():
                Forgotten()

    def run():
        Forgotten()
        for _ in range(20):
            step(profiler, clock, read=1, consumer=1)
            profiler.totals()

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
    assert profiler.totals().num_steps == 20


def test_a_wait_outside_of_calls_is_no_work(profiler, clock):
    with profiler.waiting(Stage.DECODE):
        clock.advance(5)
        with profiler.stage(Stage.COLLATE):
            clock.advance(2)
    totals = profiler.totals()
    assert Stage.DECODE not in totals.beside_s
    assert totals.beside_s[Stage.COLLATE] == pytest.approx(0.002)
