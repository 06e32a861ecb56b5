"""When a loss will reach a target, from the curve so far, as Optimus (2018) and SLAQ (2017) do for their schedulers.

The curve is fitted by `limit + scale * (step + shift) ** -exponent`; with the exponent 1, this is Optimus's. A fit
knows nothing of what comes: a schedule that lowers the rate at the end bends the curve down, and the target is
then reached earlier.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Final, NamedTuple

import numpy as np

from datasvc.errors import ConfigError
from datasvc.runs.step_table import Floats, Integers, Series

_MIN_POINTS: Final = 16
_NUM_BINS: Final = 64
_NUM_DRAWS: Final = 200
_BLOCK: Final = 4  # bins that are drawn together: what disturbs one bin disturbs the next
_HORIZON: Final = 100  # a target that takes so many times the steps so far counts as not reached
_SKIPPED_SHARE: Final = 0.05  # of the steps, at the start: a warm-up follows another curve
_ROUNDING: Final = 1e-6  # of a value
_LOW, _HIGH = 5, 95  # percentiles of the interval
_EXPONENTS: Final = np.linspace(0.1, 3, 117)
_SHIFTS: Final = np.array([0, 0.02, 0.1, 0.3, 1, 3])  # in parts of the steps so far


@dataclass(frozen=True)
class LossForecast:
    """When a curve of a run is expected to reach a value.

    Attributes:
        run: reference to the run.
        curve: name of the curve.
        target: the value.
        newest_step: the last step that has a finite value.
        step: expected step; None: it is not reached in 100 times the steps so far. Of a target that is reached
            already, the first step at which two means of neighbouring points were below it.
        low, high: the step is between these in 90 % of repeated fits, widened by the factor by which a forecast from
            the first half of the curve was wrong; None: it is not reached.
        reached_share: fraction of the repeated fits that reach the target.
        limit: value that the curve approaches.
    """

    run: str
    curve: str
    target: float
    newest_step: int
    step: int | None
    low: int | None
    high: int | None
    reached_share: float
    limit: float

    def __str__(self) -> str:
        if self.step is None:
            return (
                f"{self.curve} {self.target:.4g} is not expected: the curve approaches {self.limit:.4g} "
                f"({self.reached_share:.0%} of the fits reach it)"
            )
        if self.step <= self.newest_step:
            return f"{self.curve} {self.target:.4g} was reached at about step {self.step:,}"
        low, high = ("never" if each is None else f"{each:,}" for each in (self.low, self.high))
        return (
            f"{self.curve} {self.target:.4g} is expected at step {self.step:,} (90 % interval: {low} to {high}), "
            f"{self.step / self.newest_step:.1f} times the steps so far"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the attributes as JSON values."""
        return asdict(self)


def forecast_curve(ref: str, curve: str, series: Series, target: float) -> LossForecast:
    """Return when a curve of a run is expected to fall to a target, see `RunHistory.forecast`."""
    if not np.isfinite(target):
        raise ConfigError(f"the target is {target}; expected a finite number")
    # A run that continues another one, or a schedule of its own, has a curve from its own start.
    start = int(series.steps[0]) - 1 if len(series) else 0
    steps, values = _bins(series.steps - start, series)
    if len(steps) < _MIN_POINTS:
        raise ConfigError(
            f"{curve!r} of {ref} has {len(steps)} points with finite values after its first steps; a "
            f"forecast needs {_MIN_POINTS}"
        )
    newest = int(series.steps[np.isfinite(series.values)][-1]) - start
    fit = _CurveFits(steps, values, newest)
    fitted = fit.solve(values[None])
    (found,) = fitted.steps_to(target)
    (expected,) = fitted.at(steps)
    crossings = fit.solve(expected + _draw_blocks(values - expected)).steps_to(target)
    low, high = np.percentile(crossings, [_LOW, _HIGH], method="nearest")
    if newest < found < np.inf:
        # The noise says nothing of a curve of another kind. The error of a forecast of what is known does.
        factor = _past_error(steps, values, float(expected[-1]))
        low, high = max(newest, low / factor), high * factor if np.isfinite(high) else high
    # Two bins: the noise may bring one below the target.
    below = steps[:-1][(values[:-1] <= target) & (values[1:] <= target)]
    if len(below):
        found = low = high = below[0]
    step, first, last = (None if np.isinf(each) else start + max(1, round(each)) for each in (found, low, high))
    share = float(np.isfinite(crossings).mean())
    # A limit of 0 has the sign and the digits of rounding errors.
    shown_limit = round(float(fitted.limits[0]), 9) + 0.0
    return LossForecast(ref, curve, target, start + newest, step, first, last, share, shown_limit)


def _bins(numbers: Integers, series: Series) -> tuple[Floats, Floats]:
    """Return mean steps and values of up to `_NUM_BINS` bins of equal numbers of points, without the first steps."""
    is_used = np.isfinite(series.values) & (numbers > _SKIPPED_SHARE * numbers[-1:].max(initial=0))
    steps, values, counts = (each[is_used] for each in (numbers, series.values, series.counts))
    groups = [part for part in np.array_split(np.arange(len(steps)), _NUM_BINS) if len(part)]
    means = [np.average([steps[part], values[part]], axis=1, weights=counts[part]) for part in groups]
    mean_steps, mean_values = np.array(means).T if means else np.empty((2, 0))
    return mean_steps, mean_values


def _past_error(steps: Floats, values: Floats, newest_value: float) -> float:
    """Return the factor, at least 1, by which a forecast from the first half was wrong about the newest step."""
    half = len(steps) // 2
    fit = _CurveFits(steps[:half], values[:half], int(steps[half - 1]))
    (found,) = fit.solve(values[None, :half]).steps_to(newest_value)
    ratio = float(found / steps[-1])
    return max(ratio, 1 / ratio)


def _draw_blocks(residuals: Floats) -> Floats:
    """Return residuals of repeated runs, `[draws, bins]`: blocks of those seen, at random places."""
    random = np.random.default_rng(0)
    count = len(residuals)
    firsts = random.integers(0, count - _BLOCK + 1, (_NUM_DRAWS, -(-count // _BLOCK)))
    places = (firsts[:, :, None] + np.arange(_BLOCK)).reshape(_NUM_DRAWS, -1)[:, :count]
    drawn: Floats = residuals[places] * random.choice([-1.0, 1.0], (_NUM_DRAWS, 1))
    return drawn


class _Curves(NamedTuple):
    """Fitted curves, with `[n]` values each: `limits + scales * (step + shifts) ** -exponents`."""

    limits: Floats
    scales: Floats
    shifts: Floats
    exponents: Floats
    horizon: int

    def at(self, steps: Floats) -> Floats:
        """Return the values of the curves at steps, `[n, steps]`."""
        limits, scales, shifts, exponents = (each[:, None] for each in self[:4])
        values: Floats = limits + scales * (steps + shifts) ** -exponents
        return values

    def steps_to(self, target: float) -> Floats:
        """Return the steps at which the curves reach the target, `[n]`; inf: not before the horizon."""
        is_below = self.limits < target
        ratios = np.divide(self.scales, target - self.limits, out=np.full_like(self.limits, np.inf), where=is_below)
        with np.errstate(over="ignore"):
            steps = ratios ** (1 / self.exponents) - self.shifts
        return np.where(steps > self.horizon, np.inf, np.maximum(steps, 1))


class _CurveFits:
    """Fits of curves at the same steps, over a grid of shifts and exponents: scale and limit are linear in it."""

    def __init__(self, steps: Floats, values: Floats, newest: int) -> None:
        self._shifts, self._exponents = (each.ravel() for each in np.meshgrid(_SHIFTS * newest, _EXPONENTS))
        self._newest = newest
        self._falls = (steps + self._shifts[:, None]) ** -self._exponents[:, None]  # [grid, bins]
        # What came last says most about what comes, and the noise of a loss is about in proportion to it.
        weights = steps / np.maximum(np.abs(values), 1e-6) ** 2
        self._weights = weights / weights.sum()

    def solve(self, curves: Floats) -> _Curves:
        """Fit curves, `[n, bins]`."""
        weights, falls = self._weights, self._falls
        fall_means, means = falls @ weights, curves @ weights
        centred = falls - fall_means[:, None]
        variances = (centred**2) @ weights
        covariances = (curves * weights) @ centred.T  # [n, grid]
        scales = np.maximum(covariances / variances, 0)  # a rising loss counts as constant
        limits = means[:, None] - scales * fall_means
        errors = -2 * scales * covariances + scales**2 * variances
        # A loss has no limit below 0 if it is above 0.
        errors[(limits < -_ROUNDING * np.abs(means)[:, None]) & (curves.min(1) >= 0)[:, None]] = np.inf
        chosen = errors.argmin(1)
        best = np.arange(len(curves)), chosen
        has_fit = np.isfinite(errors[best])
        return _Curves(
            np.where(has_fit, limits[best], means),
            np.where(has_fit, scales[best], 0.0),
            self._shifts[chosen],
            self._exponents[chosen],
            _HORIZON * self._newest,
        )
