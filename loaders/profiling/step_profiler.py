"""Profiler of a loader's steps and stages, at a cost of about one microsecond per stage.

Each loader has one. A step is a call for a batch and the consumer's time until the next call. Stages may run in any
thread; steps run in one thread at a time. Stages outside of calls, such as decoding in other threads, count as work
beside the calls: they cost the consumer time only if a call waits for them. The profiler keeps sums, the last steps
and the last time spans, so its memory is bounded.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import Final, Self

from datasvc.loaders.profiling.step_times import BATCH, WAIT, Stage, StepTimes, Sums, TimeSpan, Totals, open_range

_MAX_STEPS: Final = 4096
_MAX_SPANS: Final = 32768

# Fields of a `TimeSpan`: a tuple, because creating a `TimeSpan` takes longer than timing a stage.
_SpanFields = tuple[str, int, str, int, int, int]


class StepProfiler:
    """Times the steps of one loader.

    Args:
        clock: monotonic clock in nanoseconds. The attribute `clock` may be replaced while nothing is timed.
    """

    def __init__(self, clock: Callable[[], int] = time.perf_counter_ns) -> None:
        self.clock = clock
        self.this_thread = _ThreadValues()  # thread-local: each thread sees its own values
        # Reentrant: even under the lock, garbage collection may end an abandoned iterator, which calls `pause`.
        self._lock = threading.RLock()
        self._earlier, self._since_restart = Sums(), Sums()  # sums of the steps before and after the last `restart`
        self._steps: deque[StepTimes] = deque(maxlen=_MAX_STEPS)
        self._spans: deque[_SpanFields] = deque(maxlen=_MAX_SPANS)
        self._active: Counter[Stage] = Counter()  # number of threads in each stage, outside of calls
        self._current: StepStageTimer | None = None  # the step whose batch the consumer uses now
        self.number = 0  # number of the last step handed over

    def step(self) -> StepStageTimer:
        """Time a call for a batch: `with profiler.step() as step`. Set `step.num_samples` inside the block.

        A call that ends with an error hands over no batch and is not counted.
        """
        return StepStageTimer(self)

    def stage(self, stage: Stage) -> StageTimer:
        """Time work of a stage: `with profiler.stage(Stage.READ)`, inside a call for a batch or in another thread."""
        return StageTimer(self, stage)

    def waiting(self, stage: Stage) -> StageTimer:
        """Time a call's wait for other threads that work at a stage."""
        timer = StageTimer(self, stage)
        timer.is_wait = True
        return timer

    def pause(self) -> None:
        """End the current step before the next call. The time until that call belongs to no step."""
        now_ns = self.clock()
        with self._lock:
            self._record_current(now_ns)

    def restart(self) -> None:
        """Reset `totals` and `steps`. Keep the spans, and the sums since the profiler's creation."""
        now_ns = self.clock()
        with self._lock:
            self._record_current(now_ns)
            self._earlier, self._since_restart = self._earlier.plus(self._since_restart), Sums()
            self._steps.clear()

    def totals(self, *, whole: bool = False) -> Totals:
        """Return the sums since the last `restart`, or, if `whole`, since the profiler's creation."""
        now_ns = self.clock()
        with self._lock:
            sums = (self._earlier if whole else Sums()).plus(self._since_restart)
            current_times = self._current_times(now_ns)
        if current_times is not None:
            sums.add(current_times)
        return sums.totals()

    def steps(self) -> list[StepTimes]:
        """Return the last steps since `restart`, up to 4,096, oldest first, including the current one."""
        now_ns = self.clock()
        with self._lock:
            current_times = self._current_times(now_ns)
            return [*self._steps, *([] if current_times is None else [current_times])][-_MAX_STEPS:]

    def spans(self) -> list[TimeSpan]:
        """Return the last time spans, up to 32,768, in the order of their ends."""
        with self._lock:
            return [TimeSpan(*fields) for fields in self._spans.copy()]

    def keep_span(self, name: str, start_ns: int, duration_ns: int, step: int) -> None:
        """Keep a time span of this thread. The timers call this."""
        this_thread = self.this_thread
        # No lock: appending to a deque is atomic, and drops the oldest span.
        self._spans.append((name, this_thread.thread, this_thread.thread_name, start_ns, duration_ns, step))

    def enter_beside(self, timer: StageTimer) -> None:
        """Begin a stage outside of calls. `StageTimer` calls this."""
        # A wait outside of calls is not work, and does not delay the consumer by itself.
        if timer.is_wait:
            return
        timer.counted = timer.stage
        with self._lock:
            self._active[timer.stage] += 1
            timer.num_threads = self._active[timer.stage]

    def leave_beside(self, timer: StageTimer, exclusive_ns: int) -> None:
        """End a stage outside of calls, or a stage nested in such a stage. `StageTimer` calls this."""
        if timer.is_wait:
            return
        with self._lock:
            if timer.counted is not None:  # only the outermost stage of a thread was counted
                self._active[timer.counted] -= 1
            self._since_restart.add_beside(timer.stage, exclusive_ns, timer.num_threads)

    def begin_step(self, timer: StepStageTimer) -> None:
        """Begin a call for a batch. `StepStageTimer` calls this."""
        # Calls are never nested, so timers that are in the list were left there by an interrupt: discard them.
        self.this_thread.timers = [timer]
        timer.number = self.number + 1
        timer.start_ns = self.clock()
        with self._lock:
            self._record_current(timer.start_ns)

    def end_step(self, timer: StepStageTimer, *, failed: bool) -> None:
        """End a call for a batch. `StepStageTimer` calls this."""
        timer.end(self.clock())
        self.this_thread.timers.clear()
        if failed:
            return
        with self._lock:
            self.number = timer.number
            self._current = timer
        self.keep_span("wait", timer.start_ns, timer.wait_ns, timer.number)

    def _record_current(self, now_ns: int) -> None:
        """Add the current step, if there is one, to the sums. The caller has the lock."""
        # Clear it first, so that a nested call of `pause` does not add the step a second time.
        current, self._current = self._current, None
        if current is None:
            return
        step = current.times(now_ns)
        self._steps.append(step)
        self._since_restart.add(step)
        self.keep_span("consumer", now_ns - step.consumer_ns, step.consumer_ns, step.number)

    def _current_times(self, now_ns: int) -> StepTimes | None:
        """Return the times of the current step up to now; None without a current step. The caller has the lock."""
        return None if self._current is None else self._current.times(now_ns)


class StageTimer:
    """Times one block of work; its `stage` may be changed inside the block. Created by `StepProfiler`."""

    # Class attributes as defaults make the constructor cheap; about ten timers are created per step.
    is_wait = False
    counted: Stage | None = None  # the stage that counts this thread in `StepProfiler._active`, if any
    num_threads = 1  # outside of calls: number of threads in this stage, with this one, when it began
    inside_ns = 0  # time of the stages nested in this one

    def __init__(self, profiler: StepProfiler, stage: Stage) -> None:
        self._profiler = profiler
        self.stage = stage

    def __enter__(self) -> Self:
        timers = self._timers = self._profiler.this_thread.timers
        if not timers:
            self._profiler.enter_beside(self)
        timers.append(self)
        self._close_range = open_range(WAIT if self.is_wait else self.stage)
        self._start_ns = self._profiler.clock()
        return self

    def __exit__(self, *error: object) -> None:
        # All in one function, because each further call would add to the overhead of the profiler.
        profiler, stage, timers = self._profiler, self.stage, self._timers
        duration_ns = profiler.clock() - self._start_ns
        if self._close_range is not None:
            self._close_range()
        timers.pop()
        exclusive_ns = duration_ns - self.inside_ns  # without the nested stages
        step = None
        if timers:
            timers[-1].inside_ns += duration_ns
            step = timers[0]  # the outermost timer: that of the step, if this thread is inside a call for a batch
        if isinstance(step, StepStageTimer):
            step.blocked_ns[stage] = step.blocked_ns.get(stage, 0) + exclusive_ns
            if self.is_wait:
                step.waiting_ns[stage] = step.waiting_ns.get(stage, 0) + exclusive_ns
            number = step.number
        else:
            profiler.leave_beside(self, exclusive_ns)
            number = profiler.number
        profiler.keep_span(stage, self._start_ns, duration_ns, number)


class StepStageTimer:
    """Times one call for a batch; created by `StepProfiler.step`.

    Attributes:
        num_samples: number of samples in the batch, set by the caller inside the block.
    """

    number = num_samples = 0
    inside_ns = 0  # total time of the stages inside the call
    start_ns = wait_ns = 0  # start and duration of the call

    def __init__(self, profiler: StepProfiler) -> None:
        self._profiler = profiler
        # By stage, as in `StepTimes`.
        self.blocked_ns: dict[Stage, int] = {}
        self.waiting_ns: dict[Stage, int] = {}

    def end(self, now_ns: int) -> None:
        """Set the duration of the call. Time of the call that belongs to no stage counts as `Stage.LOADER`."""
        self.wait_ns = now_ns - self.start_ns
        self.blocked_ns[Stage.LOADER] = self.blocked_ns.get(Stage.LOADER, 0) + self.wait_ns - self.inside_ns

    def times(self, now_ns: int) -> StepTimes:
        """Return the times of the step up to now. Only valid after the call, while the consumer has the batch."""
        # At least 0, because another thread may have read the clock before the call ended.
        consumer_ns = max(0, now_ns - self.start_ns - self.wait_ns)
        return StepTimes(self.number, self.num_samples, self.wait_ns, consumer_ns, self.blocked_ns, self.waiting_ns)

    def __enter__(self) -> Self:
        self._close_range = open_range(BATCH)
        self._profiler.begin_step(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self._profiler.end_step(self, failed=kind is not None)
        if self._close_range is not None:
            self._close_range()


class _ThreadValues(threading.local):
    """Values of one thread: its identifier, its name, and its running timers, the outermost first."""

    def __init__(self) -> None:
        self.timers: list[StageTimer | StepStageTimer] = []
        self.thread = threading.get_ident()
        self.thread_name = threading.current_thread().name
