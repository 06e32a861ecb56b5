"""Records where the time of a loader's steps goes, for about a microsecond a stage.

Memory is bounded: sums, the last steps, and the last spans. Stages may run in any thread; the steps are those of one
thread at a time.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from types import TracebackType
from typing import Final, Self

from datasvc.loaders.profiling.profiler_ranges import BATCH, WAIT, open_range
from datasvc.loaders.profiling.step_times import Stage, StepTimes, Sums, TimeSpan, Totals

_STEPS_KEPT: Final = 4096
_SPANS_KEPT: Final = 32768

# Of `TimeSpan`: making one takes longer than all else that a stage costs.
_SpanFields = tuple[str, int, str, int, int, int]


class StepProfiler:
    """Times the steps of one loader.

    Args:
        clock: nanoseconds since some moment; may be replaced while nothing is timed.
    """

    def __init__(self, clock: Callable[[], int] = time.perf_counter_ns) -> None:
        self.clock = clock
        self.here = _Thread()
        # Reentrant: the end of a forgotten iterator may pause at any allocation, in any thread.
        self._lock = threading.RLock()
        self._earlier, self._lap = Sums(), Sums()  # until `restart`, and since
        self._steps: deque[tuple[StepStageTimer, int]] = deque(maxlen=_STEPS_KEPT)  # and when its consumer was done
        self._spans: deque[_SpanFields] = deque(maxlen=_SPANS_KEPT)
        self._active: Counter[Stage] = Counter()
        self._handed: StepStageTimer | None = None
        self.number = 0

    def step(self) -> StepStageTimer:
        """Time a call for a batch: `with stopwatch.step() as step`, which is to be told `num_samples`.

        A call that ends with an error hands nothing over, and is forgotten.
        """
        return StepStageTimer(self)

    def stage(self, stage: Stage) -> StageTimer:
        """Time work: `with stopwatch.stage(Stage.READ)`; of the call in whose thread it lies, or beside the calls."""
        return StageTimer(self, stage)

    def waiting(self, stage: Stage) -> StageTimer:
        """Time a call's wait for a stage that other threads work on, whatever the call itself does."""
        timer = StageTimer(self, stage)
        timer.is_wait = True
        return timer

    def pause(self) -> None:
        """Say that the caller is done with its batch: what it does until the next call is no step's time."""
        now_ns = self.clock()
        with self._lock:
            self._end_step(now_ns)

    def restart(self) -> None:
        """Let `totals` and `steps` begin anew; spans, and the sums since the stopwatch was made, go on."""
        now_ns = self.clock()
        with self._lock:
            self._end_step(now_ns)
            self._earlier, self._lap = self._earlier.plus(self._lap), Sums()
            self._steps.clear()

    def totals(self, *, whole: bool = False) -> Totals:
        """Return the sums since `restart`, or since the stopwatch was made, up to now."""
        now_ns = self.clock()
        with self._lock:
            sums = (self._earlier if whole else Sums()).plus(self._lap)
            pending = self._pending(now_ns)
        if pending is not None:
            sums.add(
                pending.num_samples,
                pending.wait_ns,
                pending.consumer_ns,
                pending.blocked_ns,
                pending.waiting_ns,
            )
        return sums.totals()

    def steps(self) -> list[StepTimes]:
        """Return the last steps since `restart`, at most 4,096, oldest first, up to now."""
        now_ns = self.clock()
        with self._lock:
            pending = self._pending(now_ns)
            steps = [timer.times(done_ns) for timer, done_ns in self._steps]
            return [*steps, *([] if pending is None else [pending])][-_STEPS_KEPT:]

    def spans(self) -> list[TimeSpan]:
        """Return the last spans, at most 32,768, in the order in which they ended."""
        with self._lock:
            return [TimeSpan(*fields) for fields in self._spans.copy()]

    def keep_span(self, name: str, start_ns: int, duration_ns: int, step: int) -> None:
        """Keep a span of this thread; for the timers."""
        here = self.here
        # Appending is atomic, and drops the oldest.
        self._spans.append((name, here.thread, here.thread_name, start_ns, duration_ns, step))

    def enter_beside(self, timer: StageTimer) -> None:
        """Begin with a stage beside the calls; for `StageTimer`."""
        timer.counted = timer.stage
        with self._lock:
            self._active[timer.stage] += 1
            timer.num_threads = self._active[timer.stage]

    def leave_beside(self, timer: StageTimer, own_ns: int) -> None:
        """End a stage beside the calls, or one inside it; for `StageTimer`."""
        with self._lock:
            if timer.counted is not None:
                self._active[timer.counted] -= 1
            self._lap.add_beside(timer.stage, own_ns, timer.num_threads)

    def begin_step(self, timer: StepStageTimer) -> None:
        """Begin with a call; for `StepStageTimer`."""
        # A call is never inside another: what an interrupt left there goes.
        self.here.timers = [timer]
        timer.number = self.number + 1
        timer.start_ns = self.clock()
        with self._lock:
            self._end_step(timer.start_ns)

    def end_step(self, timer: StepStageTimer, *, failed: bool) -> None:
        """End a call; for `StepStageTimer`."""
        timer.end(self.clock())
        self.here.timers.clear()
        if failed:
            return
        with self._lock:
            self.number = timer.number
            self._handed = timer
        self.keep_span("wait", timer.start_ns, timer.wait_ns, timer.number)

    def _end_step(self, now_ns: int) -> None:
        """Close the step whose batch the caller has. The lock is held."""
        handed, self._handed = self._handed, None  # taken first: nobody adds it a second time meanwhile
        if handed is None:
            return
        self._steps.append((handed, now_ns))
        consumer_ns = handed.consumer_ns(now_ns)
        self._lap.add(handed.num_samples, handed.wait_ns, consumer_ns, handed.blocked_ns, handed.waiting_ns)
        self.keep_span("consumer", now_ns - consumer_ns, consumer_ns, handed.number)

    def _pending(self, now_ns: int) -> StepTimes | None:
        return None if self._handed is None else self._handed.times(now_ns)


class StageTimer:
    """Times one piece of work, of a stage that may be changed inside the block; made by `StepProfiler.stage`."""

    # Of the class until they change: one is made some ten times a step.
    is_wait = False
    counted: Stage | None = None  # among the threads that work beside the calls
    num_threads = 1
    inside_ns = 0

    def __init__(self, stopwatch: StepProfiler, stage: Stage) -> None:
        self._stopwatch = stopwatch
        self.stage = stage

    def __enter__(self) -> Self:
        timers = self._timers = self._stopwatch.here.timers
        if not timers:
            self._stopwatch.enter_beside(self)
        timers.append(self)
        self._close_range = open_range(WAIT if self.is_wait else self.stage)
        self._start_ns = self._stopwatch.clock()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Every call of a function would show here.
        stopwatch, stage, timers = self._stopwatch, self.stage, self._timers
        duration_ns = stopwatch.clock() - self._start_ns
        if self._close_range is not None:
            self._close_range()
        timers.pop()
        own_ns = duration_ns - self.inside_ns
        step = None
        if timers:
            timers[-1].inside_ns += duration_ns
            step = timers[0]
        if isinstance(step, StepStageTimer):
            step.blocked_ns[stage] = step.blocked_ns.get(stage, 0) + own_ns
            if self.is_wait:
                step.waiting_ns[stage] = step.waiting_ns.get(stage, 0) + own_ns
            number = step.number
        else:
            stopwatch.leave_beside(self, own_ns)
            number = stopwatch.number
        stopwatch.keep_span(stage, self._start_ns, duration_ns, number)


class StepStageTimer:
    """Times one call for a batch; made by `StepProfiler.step`.

    Attributes:
        num_samples: of the batch; to be set inside the block.
    """

    number = num_samples = 0
    inside_ns = start_ns = wait_ns = 0

    def __init__(self, stopwatch: StepProfiler) -> None:
        self._stopwatch = stopwatch
        self.blocked_ns: dict[Stage, int] = {}
        self.waiting_ns: dict[Stage, int] = {}

    def end(self, now_ns: int) -> None:
        """End the call: what is of no stage is the loader's."""
        self.wait_ns = now_ns - self.start_ns
        self.blocked_ns[Stage.LOADER] = self.blocked_ns.get(Stage.LOADER, 0) + self.wait_ns - self.inside_ns

    def consumer_ns(self, now_ns: int) -> int:
        """Return how long the caller has the batch."""
        # Another thread may have read the clock before the call ended.
        return max(0, now_ns - self.start_ns - self.wait_ns)

    def times(self, now_ns: int) -> StepTimes:
        """Return the step as of now, after the call."""
        return StepTimes(
            self.number, self.num_samples, self.wait_ns, self.consumer_ns(now_ns), self.blocked_ns, self.waiting_ns
        )

    def __enter__(self) -> Self:
        self._close_range = open_range(BATCH)
        self._stopwatch.begin_step(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopwatch.end_step(self, failed=kind is not None)
        if self._close_range is not None:
            self._close_range()


class _Thread(threading.local):
    """What each thread is called, and what it is in the middle of, outermost first."""

    def __init__(self) -> None:
        self.timers: list[StageTimer | StepStageTimer] = []
        self.thread = threading.get_ident()
        self.thread_name = threading.current_thread().name
