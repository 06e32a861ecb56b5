"""Search for the fusion size and the cycle time with the highest throughput, for `tuning.Tuner`.

The search is a hill climb on a grid of fusion sizes and cycle times, for flat allreduces and, if the nodes of the job
allow them, for hierarchical ones. Horovod fits a Gaussian process instead; on such a small grid a hill climb needs no
more trials, and is simpler. The module reads no clock: its caller passes the time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final, NamedTuple

from datasvc.trainer.engine.negotiation.requests import Tuning

# The grid.
FUSION_MIB: Final = (1, 2, 4, 8, 16, 32, 64, 128)
CYCLE_TIME_MS: Final = (0.5, 1.0, 2.0, 5.0, 10.0)
# A trial consists of samples: throughputs over at least this time. Warm-up samples come first and do not count.
_NUM_SAMPLES: Final = 5
_NUM_WARMUPS: Final = 1
_MIN_SAMPLE_S: Final = 0.2


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

    Args:
        start: first values.
        tries_hierarchical: whether to search among flat and hierarchical allreduces; otherwise they stay as in
            `start`.
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
        """Record the bytes of one call. Return whether a trial has ended; then `tuning` may have changed.

        Args:
            num_bytes: bytes that were reduced since the last call.
            now_s: time of this call, on a monotonic clock.
        """
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
        """End the trial of a point, and choose the next point."""
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
    """Return the index of the value of the grid that is nearest to `value`."""
    return min(range(len(grid)), key=lambda index: abs(grid[index] - value))


def _neighbours(point: _Point) -> list[_Point]:
    """Return the points of the grid that differ by one step in one of the two indices."""
    steps = [(1, 0), (-1, 0), (0, 1), (0, -1)]
    points = [_Point(point.fusion + f, point.cycle + c, point.is_hierarchical) for f, c in steps]
    return [
        near for near in points if near.fusion in range(len(FUSION_MIB)) and near.cycle in range(len(CYCLE_TIME_MS))
    ]


def _tuning(point: _Point) -> Tuning:
    return Tuning(FUSION_MIB[point.fusion] * 2**20, CYCLE_TIME_MS[point.cycle] / 1e3, point.is_hierarchical)
