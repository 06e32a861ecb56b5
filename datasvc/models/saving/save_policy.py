"""When to save: as often as asked, and never so often that it costs the training more than it may.

What a save costs is measured, as CheckFreq does (Mohan et al., FAST 2021): the time for which it stops the training,
and the time by which the steps beside its writing take longer than others. The share of the training's time that this
may take, `max_stall`, pays for it: the next save waits until the last one is paid for. No clocks but the one given,
and no I/O.
"""

from __future__ import annotations

import math
import re
import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from datasvc.errors import ConfigError

LOOK_EVERY_S: Final = 1.0
"""How long several ranks go on between two looks at the clock and at signals, about: a look is a message to all."""
_MEASURED_STEPS: Final = 64
_MIN_MEASURED_STEPS: Final = 8
_LATEST_STEPS: Final = 4
# What takes longer than both is something else than a step, such as an evaluation, and no reason to save less often.
_MAX_STEP: Final = 10.0
_MIN_BREAK_S: Final = 2.0
_DURATION: Final = re.compile(r"(\d+(?:\.\d+)?)\s*(s|min|m|h|d)")
_SECONDS: Final = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_STEPS: Final = re.compile(r"(\d+)\s*steps?")
_SHARE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*%")


@dataclass(frozen=True)
class SavePolicy:
    """How often to save.

    Attributes:
        every_steps: at the steps that it divides; None: not by steps.
        every_s: so many seconds after the last save; None: not by time.
        max_stall: share of the training's time that saving may take, 0.03; None: any.
    """

    every_steps: int | None = None
    every_s: float | None = None
    max_stall: float | None = None

    @property
    def is_set(self) -> bool:
        """Whether it says when to save at all."""
        return (self.every_steps, self.every_s, self.max_stall) != (None, None, None)

    @property
    def needs_clock(self) -> bool:
        """Whether it goes by time, which is not the same on two ranks."""
        return self.every_s is not None or self.max_stall is not None


@dataclass(frozen=True)
class SaveDecision:
    """What a look at the clock said.

    Attributes:
        is_due: save now.
        next_step: step at which to look again.
    """

    is_due: bool
    next_step: int


@dataclass(frozen=True)
class SaveCost:
    """What saving has cost a training.

    Attributes:
        stall_s: for which it was stopped.
        slowed_s: by which the steps beside the writing took longer than others do.
        training_s: of the training, with both.
    """

    stall_s: float = 0.0
    slowed_s: float = 0.0
    training_s: float = 0.0

    @property
    def share(self) -> float:
        """Share of the training's time that saving took; 0 before there was any."""
        return (self.stall_s + self.slowed_s) / self.training_s if self.training_s else 0.0

    def __sub__(self, before: SaveCost) -> SaveCost:
        """Return what it cost since."""
        return SaveCost(
            self.stall_s - before.stall_s, self.slowed_s - before.slowed_s, self.training_s - before.training_s
        )


def parse_pace(every: int | str | None, max_stall: float | str | None) -> SavePolicy:
    """Return the pace that `every=1000`, `"1000 steps"` or `"10min"`, and `max_stall="3%"` or `0.03`, mean.

    Raises:
        ConfigError: they mean nothing.
    """
    share = parse_share(max_stall) if isinstance(max_stall, str) else max_stall
    if share is not None and not 0 < share < 1:
        raise ConfigError(f"max_stall is {max_stall!r}; expected a share of the training's time, '3%' or 0.03")
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


def parse_duration(text: str) -> float:
    """Return the seconds of "90s", "10min", "2h" or "1d". Raises ConfigError."""
    match = _DURATION.fullmatch(text.strip()) if isinstance(text, str) else None
    if match is None or not float(match[1]):
        raise ConfigError(f"{text!r} is no duration; expected such as 90s, 10min or 2h")
    return float(match[1]) * _SECONDS[match[2]]


def parse_share(text: str) -> float:
    """Return the share that "3%" is. Raises ConfigError."""
    match = _SHARE.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"{text!r} is no share; expected such as 3%")
    return float(match[1]) / 100


class Cadence:
    """Follows the steps of a run, and says when to save.

    Args:
        pace: how often.
        now: seconds from any origin.

    Attributes:
        cost: what saving has cost so far.
    """

    def __init__(self, pace: SavePolicy, now: Callable[[], float] = time.perf_counter) -> None:
        self._pace = pace
        self._now = now
        self._last_end = self._last_save = now()
        self._last_look: int | None = None
        self._undisturbed: deque[float] = deque(maxlen=_MEASURED_STEPS)
        self._latest: deque[float] = deque(maxlen=_LATEST_STEPS)
        self._was_saving = False
        self._num_since_save = 0
        self._slowed_s = self._copied_s = 0.0
        self._debt_s = 0.0
        self._paid_share = 1.0 if pace.max_stall is None else pace.max_stall
        self.cost = SaveCost()

    @property
    def debt_s(self) -> float:
        """What was spent on saving and is not paid for yet, in seconds."""
        return self._debt_s

    @property
    def step_s(self) -> float | None:
        """Median time of the last steps beside which nothing was saved; None until there were some."""
        return statistics.median(self._undisturbed) if self._undisturbed else None

    def ended_step(self, *, is_saving: bool) -> None:
        """A step has ended; `is_saving` says whether something is being written beside it."""
        ended = self._now()
        took_s, self._last_end = ended - self._last_end, ended
        self._latest.append(took_s)
        self._add_cost(training_s=took_s)
        is_disturbed, self._was_saving = is_saving or self._was_saving, is_saving
        if not is_disturbed:
            self._undisturbed.append(took_s)
            self._num_since_save += 1
        elif (usual_s := self.step_s) is not None:
            is_break = took_s >= max(_MAX_STEP * usual_s, _MIN_BREAK_S)
            # Of a break, what a device is known to have copied in it, and no more.
            self._slowed(min(took_s - usual_s, self._unseen_copying_s) if is_break else took_s - usual_s)
        self._debt_s = max(0.0, self._debt_s - self._paid_share * took_s)

    def stalled(self, stall_s: float) -> None:
        """A save has stopped the training for `stall_s` seconds, which are no part of a step."""
        self._last_end = self._last_save = self._now()
        self._add_cost(stall_s=stall_s, training_s=stall_s)
        self._debt_s += stall_s
        self._num_since_save, self._slowed_s, self._copied_s = 0, 0.0, 0.0
        self._was_saving = True  # though it may be written before the step has ended

    def spent(self, spent_s: float) -> None:
        """A save has kept a device from the training for `spent_s` seconds, within steps that have ended or will.

        Steps that take so much longer for it are not counted again.
        """
        before_s, self._copied_s = self._beside_s, self._copied_s + spent_s
        self._debt_s += self._beside_s - before_s

    def look(self, step: int, *, is_saving: bool) -> SaveDecision:
        """Say whether to save after `step`, which has just ended, and when to look again."""
        before = step - 1 if self._last_look is None else self._last_look
        self._last_look = step
        return SaveDecision(
            self._is_due(before, step, is_saving=is_saving), step + self._steps_to_next_look(before, step)
        )

    @property
    def _beside_s(self) -> float:
        # Steps that took less than others, by chance or since the machine has less to do, do not pay for the stall.
        # What devices copied is in what steps took longer, unless those were not measured.
        return max(0.0, self._slowed_s, self._copied_s)

    @property
    def _unseen_copying_s(self) -> float:
        return max(0.0, self._copied_s - max(0.0, self._slowed_s))

    def _slowed(self, by_s: float) -> None:
        slowed_before_s, beside_before_s = max(0.0, self._slowed_s), self._beside_s
        self._slowed_s += by_s
        self._add_cost(slowed_s=max(0.0, self._slowed_s) - slowed_before_s)
        self._debt_s += self._beside_s - beside_before_s

    def _add_cost(self, *, stall_s: float = 0.0, slowed_s: float = 0.0, training_s: float = 0.0) -> None:
        so_far = self.cost
        self.cost = SaveCost(so_far.stall_s + stall_s, so_far.slowed_s + slowed_s, so_far.training_s + training_s)

    def _is_due(self, before: int, step: int, *, is_saving: bool) -> bool:
        pace = self._pace
        if not pace.is_set:
            return False
        if pace.max_stall is not None and (self._debt_s > 0 or is_saving):
            return False
        if pace.every_steps is not None:
            return step // pace.every_steps > before // pace.every_steps
        if pace.every_s is not None:
            return self._now() - self._last_save >= pace.every_s
        # Nothing but the share: not before it is known how long a step takes now.
        return self._num_since_save >= _MIN_MEASURED_STEPS

    def _steps_to_next_look(self, before: int, step: int) -> int:
        longest_s = max(self._latest, default=0.0)
        if not longest_s:
            return 1
        # A signal waits for the next look: steps that have become slow count at once, quick ones little by little.
        steps = min(max(1, math.floor(LOOK_EVERY_S / longest_s)), 2 * max(1, step - before))
        every = self._pace.every_steps
        return steps if every is None else min(steps, every - step % every)
