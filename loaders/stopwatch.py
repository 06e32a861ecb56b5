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

from loaders.step_times import Span, Stage, StepTimes, Sums, Totals

_STEPS_KEPT: Final = 4096
_SPANS_KEPT: Final = 32768

# Of `Span`: making one takes longer than all else that a stage costs.
_SpanFields = tuple[str, int, str, int, int, int]


class Stopwatch:
    """Times the steps of one loader.

    Args:
        clock: nanoseconds since some moment; may be replaced while nothing is timed.
    """

    def __init__(self, clock: Callable[[], int] = time.perf_counter_ns) -> None:
        self.clock = clock
        self._here = _Thread()
        # Reentrant: the end of a forgotten iterator may pause at any allocation, in any thread.
        self._lock = threading.RLock()
        self._earlier, self._lap = Sums(), Sums()  # until `restart`, and since
        self._steps: deque[StepTimes] = deque(maxlen=_STEPS_KEPT)
        self._spans: deque[_SpanFields] = deque(maxlen=_SPANS_KEPT)
        self._active: Counter[Stage] = Counter()
        self._handed: StepTimer | None = None
        self.number = 0

    def step(self) -> StepTimer:
        """Time a call for a batch: `with stopwatch.step() as step`, which is to be told `num_samples`.

        A call that ends with an error hands nothing over, and is forgotten.
        """
        return StepTimer(self)

    def stage(self, stage: Stage) -> StageTimer:
        """Time work: `with stopwatch.stage(Stage.READ)`; of the call in whose thread it lies, or beside the calls."""
        return StageTimer(self, self._here, self._spans, stage, False)

    def waiting(self, stage: Stage) -> StageTimer:
        """Time a call's wait for a stage that other threads work on, whatever the call itself does."""
        return StageTimer(self, self._here, self._spans, stage, True)

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
            sums.add(pending)
        return sums.totals()

    def steps(self) -> list[StepTimes]:
        """Return the last steps since `restart`, at most 4,096, oldest first, up to now."""
        now_ns = self.clock()
        with self._lock:
            pending = self._pending(now_ns)
            return [*self._steps, *([] if pending is None else [pending])][-_STEPS_KEPT:]

    def spans(self) -> list[Span]:
        """Return the last spans, at most 32,768, in the order in which they ended."""
        with self._lock:
            return [Span(*fields) for fields in self._spans.copy()]

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

    def begin_step(self, timer: StepTimer) -> None:
        """Begin with a call; for `StepTimer`."""
        # A call is never inside another: what an interrupt left there goes.
        self._here.timers = [timer]
        timer.number = self.number + 1
        timer.start_ns = self.clock()
        with self._lock:
            self._end_step(timer.start_ns)

    def end_step(self, timer: StepTimer, *, failed: bool) -> None:
        """End a call; for `StepTimer`."""
        timer.end_ns = self.clock()
        self._here.timers.clear()
        if failed:
            return
        with self._lock:
            self.number = timer.number
            self._handed = timer
        self._keep("wait", timer.start_ns, timer.end_ns - timer.start_ns, timer.number)

    def _end_step(self, now_ns: int) -> None:
        """Close the step whose batch the caller has. The lock is held."""
        handed, self._handed = self._handed, None  # taken first: nobody adds it a second time meanwhile
        if handed is None:
            return
        step = handed.times(now_ns)
        self._lap.add(step)
        self._steps.append(step)
        self._keep("consumer", now_ns - step.consumer_ns, step.consumer_ns, step.number)

    def _pending(self, now_ns: int) -> StepTimes | None:
        return None if self._handed is None else self._handed.times(now_ns)

    def _keep(self, name: str, start_ns: int, duration_ns: int, step: int) -> None:
        here = self._here
        self._spans.append((name, here.thread, here.thread_name, start_ns, duration_ns, step))


class StageTimer:
    """Times one piece of work, of a stage that may be changed inside the block; made by `Stopwatch.stage`."""

    __slots__ = (
        "_here",
        "_is_wait",
        "_spans",
        "_start_ns",
        "_stopwatch",
        "counted",
        "inside_ns",
        "num_threads",
        "stage",
    )

    def __init__(
        self, stopwatch: Stopwatch, here: _Thread, spans: deque[_SpanFields], stage: Stage, is_wait: bool
    ) -> None:
        self._stopwatch = stopwatch
        self._here = here
        self._spans = spans
        self._is_wait = is_wait
        self.stage = stage
        self.counted: Stage | None = None  # among the threads that work beside the calls
        self.num_threads = 1
        self.inside_ns = 0

    def __enter__(self) -> Self:
        timers = self._here.timers
        if not timers:
            self._stopwatch.enter_beside(self)
        timers.append(self)
        self._start_ns = self._stopwatch.clock()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Every call of a function would show here: this runs some ten times a step.
        stopwatch, here, stage = self._stopwatch, self._here, self.stage
        duration_ns = stopwatch.clock() - self._start_ns
        timers = here.timers
        timers.pop()
        own_ns = duration_ns - self.inside_ns
        step = None
        if timers:
            timers[-1].inside_ns += duration_ns
            step = timers[0]
        if isinstance(step, StepTimer):
            step.blocked_ns[stage] = step.blocked_ns.get(stage, 0) + own_ns
            if self._is_wait:
                step.waiting_ns[stage] = step.waiting_ns.get(stage, 0) + own_ns
            number = step.number
        else:
            stopwatch.leave_beside(self, own_ns)
            number = stopwatch.number
        # Appending is atomic, and drops the oldest.
        self._spans.append((stage, here.thread, here.thread_name, self._start_ns, duration_ns, number))


class StepTimer:
    """Times one call for a batch; made by `Stopwatch.step`.

    Attributes:
        num_samples: of the batch; to be set inside the block.
    """

    __slots__ = ("_stopwatch", "blocked_ns", "end_ns", "inside_ns", "num_samples", "number", "start_ns", "waiting_ns")

    def __init__(self, stopwatch: Stopwatch) -> None:
        self._stopwatch = stopwatch
        self.blocked_ns: dict[Stage, int] = {}
        self.waiting_ns: dict[Stage, int] = {}
        self.number = 0
        self.num_samples = 0
        self.inside_ns = 0
        self.start_ns = self.end_ns = 0

    def times(self, now_ns: int) -> StepTimes:
        """Return the step as of now, after the call."""
        wait_ns = self.end_ns - self.start_ns
        consumer_ns = max(0, now_ns - self.end_ns)  # another thread may have read the clock before the call ended
        rest_ns = wait_ns - self.inside_ns
        blocked_ns = {**self.blocked_ns, Stage.LOADER: self.blocked_ns.get(Stage.LOADER, 0) + rest_ns}
        return StepTimes(self.number, self.num_samples, wait_ns, consumer_ns, blocked_ns, self.waiting_ns)

    def __enter__(self) -> Self:
        self._stopwatch.begin_step(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopwatch.end_step(self, failed=kind is not None)


class _Thread(threading.local):
    """What each thread is called, and what it is in the middle of, outermost first."""

    def __init__(self) -> None:
        self.timers: list[StageTimer | StepTimer] = []
        self.thread = threading.get_ident()
        self.thread_name = threading.current_thread().name
