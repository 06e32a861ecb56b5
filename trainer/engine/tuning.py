"""Autotuning on rank 0: searches the fusion size and the cycle time with the highest throughput, and logs the trials.

The search is a hill climb on a grid of fusion sizes and cycle times, for flat allreduces and, if the nodes of the job
allow them, for hierarchical ones. Horovod fits a Gaussian process instead; on such a small grid a hill climb needs no
more trials, and is simpler.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from statistics import median
from typing import Final, NamedTuple

from datasvc.trainer.engine.execution.wire import num_lanes, wire_dtype
from datasvc.trainer.engine.negotiation.requests import CollectiveKind, Request, Tuning
from datasvc.trainer.env.environment import EngineSettings

logger = logging.getLogger(__name__)


# The grid.
FUSION_MIB: Final = (1, 2, 4, 8, 16, 32, 64, 128)
CYCLE_TIME_MS: Final = (0.5, 1.0, 2.0, 5.0, 10.0)
# A trial consists of samples: throughputs over at least this time. Warm-up samples come first and do not count.
_NUM_SAMPLES: Final = 5
_NUM_WARMUPS: Final = 1
_MIN_SAMPLE_S: Final = 0.2


class Tuner:
    """Passes the engine's measurements to an `Autotuner`, and the autotuner's values to the engine."""

    def __init__(self, settings: EngineSettings, *, has_node_groups: bool) -> None:
        is_hierarchical = has_node_groups and bool(settings.hierarchical_allreduce)
        self._autotuner = Autotuner(
            Tuning(settings.fusion_bytes, settings.cycle_time_s, is_hierarchical),
            tries_hierarchical=has_node_groups and settings.hierarchical_allreduce is None,
        )
        self._log_path = None if settings.autotune_log is None else Path(settings.autotune_log)
        self._has_changed = True  # the first proposal is the point of the grid that is nearest to the settings

    def propose(self) -> Tuning | None:
        """Return the values that all ranks adopt in this cycle; None if they have not changed since the last call."""
        if not self._has_changed:
            return None
        self._has_changed = False
        return self._autotuner.tuning

    def observe(self, requests: Sequence[Request]) -> None:
        """Record the operations that have begun in one cycle. Only the bytes of allreduces count."""
        num_bytes = sum(
            prod(shape) * wire_dtype(dtype, request).itemsize * num_lanes(dtype, request)
            for request in requests
            if request.kind is CollectiveKind.ALLREDUCE
            for dtype, shape in zip(request.dtypes, request.shapes, strict=True)
        )
        if not self._autotuner.observe(num_bytes, time.monotonic()):
            return
        # The other ranks get the new values with the message of the next cycle.
        self._has_changed = True
        if self._autotuner.is_done:
            best = self._autotuner.tuning
            logger.info(
                "autotuned: fusion %d bytes, cycle %g ms, %s allreduces",
                best.fusion_bytes,
                best.cycle_time_s * 1e3,
                "hierarchical" if best.is_hierarchical else "flat",
            )
        self._write_log()

    def _write_log(self) -> None:
        if self._log_path is None:
            return
        lines = ["fusion_bytes,cycle_time_ms,bytes_per_s,hierarchical"] + [
            f"{trial.tuning.fusion_bytes},{trial.tuning.cycle_time_s * 1e3:g},{trial.bytes_per_s:.0f},"
            f"{trial.tuning.is_hierarchical:d}"
            for trial in self._autotuner.trials
        ]
        try:
            # Write under another name and then rename, so that no reader gets a partial file.
            temporary = self._log_path.with_name(f".{self._log_path.name}.new")
            temporary.write_text("\n".join(lines) + "\n", encoding="utf-8")
            temporary.replace(self._log_path)
        except OSError as error:
            # The job continues without the log; one warning is enough.
            logger.warning("the log of the autotuner cannot be written: %s", error)
            self._log_path = None


# The search is a hill climb on a grid of fusion sizes and cycle times, for flat allreduces and, if the nodes of the
# job allow them, for hierarchical ones. Horovod fits a Gaussian process instead; on such a small grid a hill climb
# needs no more trials, and is simpler. The module reads no clock: its caller passes the time.


@dataclass(frozen=True)
class Trial:
    """The values of a trial, and the throughput measured with them."""

    tuning: Tuning
    bytes_per_s: float


class _Point(NamedTuple):
    """A point of the grid: indices of `FUSION_MIB` and `CYCLE_TIME_MS`, and the kind of the allreduces."""

    fusion: int
    cycle: int
    is_hierarchical: bool


class Autotuner:
    """A hill climb from the grid point nearest to `start`. It ends at a point without a better neighbour.

    With `tries_hierarchical`, it searches among flat and hierarchical allreduces; otherwise they stay as in `start`.
    """

    def __init__(self, start: Tuning, *, tries_hierarchical: bool = False) -> None:
        self._tries_hierarchical = tries_hierarchical
        self.trials: list[Trial] = []
        # The point of the current trial, and the best point so far.
        self._point = _Point(
            _nearest(FUSION_MIB, start.fusion_bytes / 2**20),
            _nearest(CYCLE_TIME_MS, start.cycle_time_s * 1e3),
            start.is_hierarchical,
        )
        self._best = self._point
        self._scores: dict[_Point, float] = {}  # throughput of each point that was tried
        self._samples: list[float] = []  # throughputs of the current trial
        # Bytes and start of the current sample; the first call of `observe` starts the first sample.
        self._num_bytes = 0
        self._since_s: float | None = None
        self.is_done = False

    @property
    def tuning(self) -> Tuning:
        """The values to use now: those of the current trial during the search, the best values after it."""
        return _tuning(self._point)

    def observe(self, num_bytes: int, now_s: float) -> bool:
        """Record the bytes that were reduced since the last call. Return whether a trial has ended, see `tuning`."""
        if self.is_done:
            return False
        if self._since_s is None:
            self._since_s = now_s
            return False
        if not (num_bytes or self._num_bytes):
            # Nothing was reduced in this sample yet. Start it again: a pause, such as an evaluation, must not count.
            self._since_s = now_s
            return False
        self._num_bytes += num_bytes
        if now_s - self._since_s < _MIN_SAMPLE_S or not self._num_bytes:
            return False
        self._samples.append(self._num_bytes / (now_s - self._since_s))
        self._num_bytes, self._since_s = 0, now_s
        if len(self._samples) < _NUM_WARMUPS + _NUM_SAMPLES:
            return False
        # Some operations of the warm-up ran with the previous values. The median ignores one sample with a pause.
        self._score(median(self._samples[_NUM_WARMUPS:]))
        self._samples = []
        return True

    def _score(self, bytes_per_s: float) -> None:
        self._scores[self._point] = bytes_per_s
        self.trials.append(Trial(self.tuning, bytes_per_s))
        if bytes_per_s > self._scores[self._best]:
            self._best = self._point
        neighbours = _neighbours(self._best)
        if self._tries_hierarchical:
            neighbours.append(self._best._replace(is_hierarchical=not self._best.is_hierarchical))
        untried = [point for point in neighbours if point not in self._scores]
        self.is_done = not untried
        self._point = untried[0] if untried else self._best


def _nearest(grid: Sequence[float], value: float) -> int:
    return min(range(len(grid)), key=lambda index: abs(grid[index] - value))


def _neighbours(point: _Point) -> list[_Point]:
    steps = [(1, 0), (-1, 0), (0, 1), (0, -1)]
    points = [_Point(point.fusion + f, point.cycle + c, point.is_hierarchical) for f, c in steps]
    return [
        near for near in points if near.fusion in range(len(FUSION_MIB)) and near.cycle in range(len(CYCLE_TIME_MS))
    ]


def _tuning(point: _Point) -> Tuning:
    return Tuning(FUSION_MIB[point.fusion] * 2**20, CYCLE_TIME_MS[point.cycle] / 1e3, point.is_hierarchical)
