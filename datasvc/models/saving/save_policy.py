"""Save policy: decides when the next save is due, for `CheckpointManager.should_save`.

The cost of a save is measured, as in CheckFreq (Mohan et al., FAST 2021). It is the sum of two times: the stall, for
which the save stops the training, and the slowdown, by which steps take longer while the save is written. `max_stall`
is the largest share of the training time that the cost may take: no save is due until enough training time has passed
since the last one. This module does no I/O, and the clock is an argument.
"""

from __future__ import annotations

import math
import re
import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple

from datasvc.errors import ConfigError

CHECK_EVERY_S: Final = 1.0
"""Approximate seconds between two checks of clock and signals; in a job of several ranks a check is a collective."""
# A step is disturbed if a save is running at its start or end. The usual step time is the median of this many steps,
# the latest undisturbed ones.
_MEASURED_STEPS: Final = 64
# If `max_stall` is the only setting, at least this many undisturbed steps must pass before the next save.
_MIN_MEASURED_STEPS: Final = 8
# The slowest of this many latest steps determines the number of steps to the next check.
_LATEST_STEPS: Final = 4
# A step that takes at least this factor times the usual step time, and at least this many seconds, includes a break,
# such as an evaluation. Its extra time is not caused by a save.
_BREAK_FACTOR: Final = 10.0
_MIN_BREAK_S: Final = 2.0
_DURATION: Final = re.compile(r"(\d+(?:\.\d+)?)\s*(s|min|m|h|d)")
_SECONDS: Final = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_STEPS: Final = re.compile(r"(\d+)\s*steps?")
_SHARE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*%")


@dataclass(frozen=True)
class SavePolicy:
    """Settings of how often to save.

    Attributes:
        every_steps: save when the step is a multiple of this number; None: not by steps.
        every_s: save when this number of seconds has passed since the last save; None: not by time.
        max_stall: largest share of the training time that saving may take, such as 0.03; None: no limit.
    """

    every_steps: int | None = None
    every_s: float | None = None
    max_stall: float | None = None

    @property
    def needs_clock(self) -> bool:
        """Whether the policy depends on time, which differs between ranks."""
        return self.every_s is not None or self.max_stall is not None


class SaveDecision(NamedTuple):
    """Result of one check of the policy: whether to save now, and the step of the next check."""

    is_due: bool
    next_step: int


@dataclass(frozen=True)
class SaveCost:
    """Training time that saving has taken.

    Attributes:
        stall_s: seconds for which the training was stopped.
        slowed_s: slowdown: seconds that disturbed steps took in addition to the usual step time.
        training_s: training time in seconds, including stalls and slowdowns.
    """

    stall_s: float = 0.0
    slowed_s: float = 0.0
    training_s: float = 0.0

    @property
    def share(self) -> float:
        """Share of the training time that saving took; 0 before any training time."""
        return (self.stall_s + self.slowed_s) / self.training_s if self.training_s else 0.0

    def __sub__(self, earlier: SaveCost) -> SaveCost:
        """Return the cost since `earlier`, a former value of the same cost."""
        return SaveCost(
            self.stall_s - earlier.stall_s, self.slowed_s - earlier.slowed_s, self.training_s - earlier.training_s
        )


def parse_policy(every: int | str | None, max_stall: float | str | None) -> SavePolicy:
    """Parse the settings: `every=1000`, `"1000 steps"` or `"10min"`, and `max_stall="3%"` or `0.03`.

    Raises:
        ConfigError: a value has another form or is out of range.
    """
    if isinstance(max_stall, str):
        percentage = _SHARE.fullmatch(max_stall.strip())
        if percentage is None:
            raise ConfigError(f"{max_stall!r} is not a valid share; write a percentage such as 3%")
        share: float | None = float(percentage[1]) / 100
    else:
        share = max_stall
    if share is not None and not 0 < share < 1:
        raise ConfigError(f"max_stall is {max_stall!r}; expected a share of the training time, such as '3%' or 0.03")
    steps = _STEPS.fullmatch(every.strip()) if isinstance(every, str) else None
    if steps is not None:
        every = int(steps[1])
    if isinstance(every, str):
        return SavePolicy(every_s=parse_duration(every), max_stall=share)
    if every is not None and (isinstance(every, bool) or not isinstance(every, int) or every < 1):
        raise ConfigError(
            f"every is {every!r}; expected a number of steps, at least 1, or a duration such as '10min'"
        )
    return SavePolicy(every_steps=every, max_stall=share)


def is_multiple_reached(number: int, last: int, step: int) -> bool:
    """Return whether `step`, or a step skipped since `last`, is a multiple of `number`."""
    return step // number > last // number


def parse_duration(text: str) -> float:
    """Return the seconds of "90s", "10min", "2h" or "1d". Raises ConfigError: another form, or zero."""
    match = _DURATION.fullmatch(text.strip()) if isinstance(text, str) else None
    if match is None or not float(match[1]):
        raise ConfigError(f"{text!r} is not a valid duration; write 90s, 10min, 2h or 1d")
    return float(match[1]) * _SECONDS[match[2]]


class SaveScheduler:
    """Measures the steps of a run and decides when to save.

    Args:
        policy: how often to save.
        now: clock, seconds from any origin.

    Attributes:
        cost: training time that saving has taken so far.
        overhead_s: seconds that saves took, and for which too little training time has passed yet. Each second of
            training reduces it by `max_stall` seconds. With `max_stall`, no save is due before it is 0.
    """

    def __init__(self, policy: SavePolicy, now: Callable[[], float] = time.perf_counter) -> None:
        self._policy = policy
        self._now = now
        # `_last_end`: time at which the last step or stall ended. `_last_save`: time at which the last stall ended.
        self._last_end = self._last_save = now()
        self._last_check: int | None = None  # step of the last call of `decide`
        self._undisturbed: deque[float] = deque(maxlen=_MEASURED_STEPS)  # seconds of the latest undisturbed steps
        self._latest: deque[float] = deque(maxlen=_LATEST_STEPS)  # seconds of the latest steps
        self._was_saving = False  # whether a save was running at the end of the last step
        # All since the last stall: number of undisturbed steps, seconds of slowdown of the disturbed steps (negative:
        # they were faster than usual), and seconds of device copies.
        self._num_undisturbed, self._slowdown_s, self._copying_s = 0, 0.0, 0.0
        self.overhead_s = 0.0
        # Without `max_stall`, no decision depends on `overhead_s`, so any value will do.
        self._max_stall = 1.0 if policy.max_stall is None else policy.max_stall
        self.cost = SaveCost()

    def end_step(self, *, is_saving: bool) -> None:
        """Record the end of a step; `is_saving`: whether a save is running now."""
        ended = self._now()
        step_s, self._last_end = ended - self._last_end, ended
        self._latest.append(step_s)
        self._add_cost(training_s=step_s)
        is_disturbed = is_saving or self._was_saving
        self._was_saving = is_saving
        if not is_disturbed:
            self._undisturbed.append(step_s)
            self._num_undisturbed += 1
        elif self._undisturbed:
            usual_s = statistics.median(self._undisturbed)
            slowdown_s = step_s - usual_s
            if step_s >= max(_BREAK_FACTOR * usual_s, _MIN_BREAK_S):
                # The save did not cause the break. But device copies without a slowdown so far may be in this step.
                slowdown_s = min(slowdown_s, self._uncounted_copying_s)
            self._record_slowdown(slowdown_s)
        self.overhead_s = max(0.0, self.overhead_s - self._max_stall * step_s)

    def record_local_stall(self, stall_s: float) -> None:
        """Record the stall of a save on the nodes alone, which delays no save to the repository."""
        self._last_end = self._now()
        self._add_cost(stall_s=stall_s, training_s=stall_s)
        self._was_saving = True

    def record_stall(self, stall_s: float) -> None:
        """Record that a save stopped the training for `stall_s` seconds, outside of any step."""
        self._last_end = self._last_save = self._now()
        self._add_cost(stall_s=stall_s, training_s=stall_s)
        self.overhead_s += stall_s
        self._num_undisturbed, self._slowdown_s, self._copying_s = 0, 0.0, 0.0
        # Count the next step as disturbed: the write may start and end within it.
        self._was_saving = True

    def record_device_copy(self, spent_s: float) -> None:
        """Record that a save occupied a device for `spent_s` seconds, within past or later steps.

        Seconds that are in the slowdown already are not counted again.
        """
        charged_before_s = self._charged_s
        self._copying_s += spent_s
        self.overhead_s += self._charged_s - charged_before_s

    def decide(self, step: int, *, is_saving: bool, since: int | None = None) -> SaveDecision:
        """Decide whether to save after `step`, which has just ended, and at which step to check again.

        The first call counts the steps after `since`, by default this one alone, as does one with an earlier step.
        """
        last_check, self._last_check = self._last_check, step
        if last_check is None or last_check >= step:
            last_check = step - 1 if since is None else since
        is_due = self._is_due(last_check, step, is_saving=is_saving)
        return SaveDecision(is_due, step + self._steps_to_next_check(last_check, step))

    @property
    def _charged_s(self) -> float:
        """Seconds added to `overhead_s` since the last stall: the larger of the slowdown and the device copies."""
        # Do not add them: device copies make steps slower, so the slowdown normally includes them. Steps that were
        # faster by chance (a negative slowdown) must not reduce `overhead_s`.
        return max(0.0, self._slowdown_s, self._copying_s)

    @property
    def _uncounted_copying_s(self) -> float:
        """Seconds of device copies that are not yet in the slowdown."""
        return max(0.0, self._copying_s - max(0.0, self._slowdown_s))

    def _record_slowdown(self, slowdown_s: float) -> None:
        """Record a disturbed step that took `slowdown_s` more seconds than usual; negative: it was faster."""
        # `cost` has the slowdown only; `overhead_s` has the device copies too. Each grows by its own difference.
        slowdown_before_s, charged_before_s = max(0.0, self._slowdown_s), self._charged_s
        self._slowdown_s += slowdown_s
        self._add_cost(slowed_s=max(0.0, self._slowdown_s) - slowdown_before_s)
        self.overhead_s += self._charged_s - charged_before_s

    def _add_cost(self, *, stall_s: float = 0.0, slowed_s: float = 0.0, training_s: float = 0.0) -> None:
        so_far = self.cost
        self.cost = SaveCost(so_far.stall_s + stall_s, so_far.slowed_s + slowed_s, so_far.training_s + training_s)

    def _is_due(self, last_check: int, step: int, *, is_saving: bool) -> bool:
        policy = self._policy
        # No save is due while one is running, nor before enough training time has passed for its cost.
        if policy.max_stall is not None and (self.overhead_s > 0 or is_saving):
            return False
        if policy.every_steps is not None:
            return is_multiple_reached(policy.every_steps, last_check, step)
        if policy.every_s is not None:
            return self._now() - self._last_save >= policy.every_s
        # With `max_stall` alone: wait until enough undisturbed steps give a current step time.
        return policy.max_stall is not None and self._num_undisturbed >= _MIN_MEASURED_STEPS

    def _steps_to_next_check(self, last_check: int, step: int) -> int:
        longest_s = max(self._latest, default=0.0)
        if not longest_s:
            return 1
        # A signal is noticed only at a check, so checks must not become rare by mistake: one slow step shortens the
        # interval at once, but after fast steps the new interval is at most twice the last one.
        steps = max(1, math.floor(CHECK_EVERY_S / longest_s))
        steps = min(steps, 2 * max(1, step - last_check))
        every = self._policy.every_steps
        # Check at the next multiple of `every_steps` too.
        return steps if every is None else min(steps, every - step % every)
