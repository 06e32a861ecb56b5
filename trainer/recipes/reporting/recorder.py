"""`Recorder`: what one rank measures for the run log, and on rank 0 the log itself."""

from __future__ import annotations

import contextlib
import socket
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, Final

import torch

import datasvc.trainer as hvd
from datasvc.runs import RunLog
from datasvc.runs.collector import BUSY, STALLED
from datasvc.runs.run_log import outcome_of
from datasvc.trainer.engine.engine import Engine
from datasvc.trainer.engine.negotiation.negotiation import StalledOperation
from datasvc.trainer.job.runtime import current_job
from datasvc.trainer.recipes.reporting.events import EventSink
from datasvc.trainer.rendezvous.messages import HostsUpdatedInterrupt

RUN_LOG: Final = "datasvc"
"""Key of the identifier of the run in the ids of the trackers' runs."""
DIAGNOSIS_S: Final = 30.0
STALL_S: Final = 1.0
"""A step that waits longer for its data is an event of its own."""
# The ranks exchange their times after so many steps, which takes about a millisecond.
STEPS_PER_COMPARISON: Final = 500
_MAX_EARLY_EVENTS: Final = 100


# Waiting for a GPU after each part of a step lengthens this step, so only one in so many is measured.
GPU_STEPS_PER_SAMPLE: Final = 100

Mark = Callable[[str], None]
"""A function that is called with the name of a part of a step, once the part's work is submitted to the device."""


STRAGGLER_FACTOR: Final = 1.2
"""A rank whose own time is this many times the median of all ranks is a straggler."""
WAITING_PARTS: Final = ("targets_s", "all_reduce_s")
"""Parts of a step in which replicas of a model wait for each other: they sum numbers of targets, and gradients."""
_MAX_RANKS: Final = 256  # in one event


class LoggedEvents:
    """Passes events to a sink and, once it is attached, to the log of the run; earlier events follow then.

    The log gets `step` events from `Recorder.report_step`, with more facts.
    """

    def __init__(self, sink: EventSink) -> None:
        self._sink = sink
        self._log: RunLog | None = None
        self._early: deque[tuple[str, dict[str, Any]]] = deque(maxlen=_MAX_EARLY_EVENTS)

    def report(self, event: str, **facts: Any) -> None:
        """Report an event to both."""
        self._sink.report(event, **facts)
        if event == "step":
            return
        if self._log is None:
            self._early.append((event, facts))
        else:
            self._log.report(event, **facts)

    def attach(self, log: RunLog) -> None:
        """Send all later events to `log`, and those that no log has got yet."""
        self._log = log
        while self._early:
            event, facts = self._early.popleft()
            log.report(event, **facts)


class Recorder:
    """Measures the steps of this rank for the run log.

    Args:
        device: device that computes the steps.
        is_on: whether the run has a log; if not, nothing is measured.
        has_own_times: whether the ranks wait for each other only where `describe_ranks` expects it.

    Attributes:
        log: log of the run, on rank 0 of a run that has one.
        timer: measures the steps.
    """

    def __init__(self, device: torch.device, *, is_on: bool, has_own_times: bool = True) -> None:
        self.log: RunLog | None = None
        self._engine: Engine | None = None
        self._is_on = is_on
        self._has_own_times = has_own_times
        self.timer = StepTimer(device, has_parts=is_on)
        self._times = MeanTimes()
        self._next_diagnosis = time.monotonic() + DIAGNOSIS_S

    def attach(self, log: RunLog) -> None:
        """Write to the log of the run, on rank 0; operations that wait for ranks are events of it too."""
        self.log = log

        def report_stall(stalled: StalledOperation) -> None:
            ranks = list(stalled.ranks)
            log.report(STALLED, operation=stalled.key.describe(), ranks=ranks, waited_s=stalled.waited_s)

        self._engine = current_job().engine
        self._engine.on_stall = report_stall

    @contextlib.contextmanager
    def busy(self, work: str) -> Iterator[None]:
        """Record on rank 0 that the program takes no steps within this context, so that its silence is no stall."""
        if self.log is not None:
            self.log.report(BUSY, work=work)
        yield
        if self.log is not None:  # after an error, the log ends with it
            self.log.report(BUSY)

    def report_step(self, step: int, times_s: Mapping[str, float], facts: Mapping[str, Any]) -> None:
        """Record the mean times of the steps since the last report (`timer.take`), and on rank 0 further facts."""
        if not self._is_on:
            return
        if hvd.size() > 1:
            self._times.add(times_s)
        if self.log is not None:
            self.log.report("step", step=step, **times_s, **facts)
            if times_s["wait_s"] >= STALL_S:
                self.log.report("stall", step=step, wait_s=times_s["wait_s"])

    def report_diagnosis(self, step: int, diagnose: Callable[[], Mapping[str, Any]], *, now: bool = False) -> None:
        """Record the bottleneck of the loader on rank 0, at most every `DIAGNOSIS_S` seconds unless `now`."""
        if self.log is not None and (now or time.monotonic() >= self._next_diagnosis):
            self._next_diagnosis = time.monotonic() + DIAGNOSIS_S
            self.log.report("diagnosis", step=step, **diagnose())

    def compare_ranks(self, step: int, *, now: bool = False) -> None:
        """Record the times of all ranks, if `now` or every `STEPS_PER_COMPARISON` steps; every rank calls this."""
        if not self._is_on or hvd.size() == 1 or not (now or step % STEPS_PER_COMPARISON == 0):
            return
        if not self._times:
            return  # equal on all ranks: there was no step since the last comparison
        answers = hvd.allgather_object((socket.gethostname(), self._times.take()), name="run_log.ranks")
        if self.log is not None:
            hosts, times_s = zip(*answers, strict=True)
            facts = describe_ranks(hosts, times_s, has_own_times=self._has_own_times)
            self.log.report("ranks", step=step, **facts)

    def close(self, error: BaseException | None = None, *, signal: int | None = None) -> None:
        """Close the log with the outcome: an error, a signal that ended the run, or neither."""
        if self.log is None:
            return
        if self._engine is not None:
            self._engine.on_stall = None
        if signal is not None:
            self.log.close("interrupted", f"stopped by signal {signal}")
        elif isinstance(error, hvd.HorovodInternalError | HostsUpdatedInterrupt):
            self.log.close("interrupted", f"the ranks changed: {error}")
        elif error is None:
            self.log.close()
        else:
            self.log.close(*outcome_of(error))


class MeanTimes:
    """Sums times by name until they are taken as means, each over the number of its additions."""

    def __init__(self) -> None:
        self._sums_s: dict[str, float] = {}
        self._counts: dict[str, int] = {}

    def __bool__(self) -> bool:
        return bool(self._sums_s)

    def add(self, times_s: Mapping[str, float]) -> None:
        """Add times of steps by name, in seconds."""
        for name, value in times_s.items():
            self._sums_s[name] = self._sums_s.get(name, 0.0) + value
            self._counts[name] = self._counts.get(name, 0) + 1

    def take(self) -> dict[str, float]:
        """Return the means since the last call."""
        means = {name: total / self._counts[name] for name, total in self._sums_s.items()}
        self._sums_s, self._counts = {}, {}
        return means


class StepTimer:
    """Measures the steps of one rank: their duration, their wait for data, and their parts.

    Work between steps, such as a commit, does not count.

    Args:
        device: device that computes the steps. On a GPU the parts of one step in `GPU_STEPS_PER_SAMPLE` are measured,
            each of which ends when the GPU has completed it; elsewhere those of every step.
        has_parts: whether parts are measured.
        now: monotonic clock in seconds.
    """

    def __init__(
        self, device: torch.device, *, has_parts: bool = True, now: Callable[[], float] = time.perf_counter
    ) -> None:
        self._device = device
        self._is_gpu = device.type == "cuda"
        self._has_parts = has_parts
        self._now = now
        self._means = MeanTimes()
        self._parts_s: dict[str, float] = {}  # of this step
        self._last = 0.0
        self.restart()

    def restart(self) -> None:
        """Mark the start of the next step."""
        self._began = self._got = self._now()

    def got_batch(self) -> None:
        """Mark that the batch of this step has arrived."""
        self._got = self._now()

    def begin_parts(self, step: int) -> Mark:
        """Return the function that `update` calls at the end of each part of the step after `step` others."""
        self._parts_s = {}
        if not self._has_parts or (self._is_gpu and step % GPU_STEPS_PER_SAMPLE):
            return mark_nothing
        if self._is_gpu:
            torch.cuda.synchronize(self._device)
        self._last = self._now()
        return self._mark

    def end_step(self) -> None:
        """Mark the end of this step and the start of the next."""
        ended = self._now()
        self._means.add({"step_s": ended - self._began, "wait_s": self._got - self._began, **self._parts_s})
        self._began = ended

    def take(self) -> dict[str, float]:
        """Return the mean seconds since the last call: `step_s`, `wait_s`, and parts such as `all_reduce_s`.

        Each is the mean over the steps in which it was measured.
        """
        return self._means.take()

    def _mark(self, part: str) -> None:
        if self._is_gpu:
            torch.cuda.synchronize(self._device)
        now = self._now()
        name = _fact_name(part)
        self._parts_s[name] = self._parts_s.get(name, 0.0) + now - self._last
        self._last = now


@cache  # every step has the same few parts
def _fact_name(part: str) -> str:
    return f"{part.replace('-', '_')}_s"


def mark_nothing(_part: str) -> None:
    """Measure nothing."""


def describe_ranks(
    hosts: Sequence[str], times_s: Sequence[Mapping[str, float]], *, has_own_times: bool = True
) -> dict[str, Any]:
    """Return the facts of an event that compares the ranks.

    Args:
        hosts: name of the host of each rank.
        times_s: mean times of each rank: `step_s`, `wait_s` for data, and if measured `all_reduce_s` and others.
        has_own_times: whether the ranks wait for each other in the parts of `WAITING_PARTS` only. If not, nothing
            measured tells a slow rank from those that wait for it.

    Returns:
        Columns with an element for each rank: `rank`, `host` and the times. With `has_own_times` also `own_s`, the
        time of a step without the parts in which the ranks wait for each other; and `stragglers`, the ranks with a
        much longer own time. Of more than 256 ranks, those with the longest own times or steps.
    """
    waiting = WAITING_PARTS if has_own_times else ()
    own_s = [times.get("step_s", 0.0) - sum(times.get(part, 0.0) for part in waiting) for times in times_s]
    ranks = sorted(range(len(own_s)), key=lambda rank: -own_s[rank])[:_MAX_RANKS]
    chosen = sorted(ranks)
    names = sorted({name for times in times_s for name in times})
    facts = {
        "num_ranks": len(own_s),
        "rank": chosen,
        "host": [hosts[rank] for rank in chosen],
        **{name: [_round(times_s[rank].get(name, 0.0)) for rank in chosen] for name in names},
    }
    if has_own_times:
        median = statistics.median(own_s)
        facts["own_s"] = [_round(own_s[rank]) for rank in chosen]
        facts["stragglers"] = [rank for rank in ranks if own_s[rank] > STRAGGLER_FACTOR * median]
    return facts


def _round(seconds: float) -> float:
    return float(f"{seconds:.4g}")
