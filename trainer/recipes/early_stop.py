"""Early stopping: ends a run when its metric has not improved for some evaluations."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from datasvc.errors import ConfigError
from datasvc.repository.logs.references import choose_metric_mode


class EarlyStop:
    """Counts the evaluations since the last best value of a metric. Ranks with equal metrics have equal counts.

    Args:
        metric: name of the metric.
        patience: number of consecutive evaluations without a new best after which the run ends; None for never.
        mode: "max" if a higher value is better, "min" if a lower one is; None to choose by the name of the metric.

    Raises:
        ConfigError: `mode` is invalid, or is None and the metric's name does not show which values are better.
    """

    def __init__(self, metric: str, patience: int | None, mode: str | None = None) -> None:
        self._metric = metric
        self._patience = patience
        # If `patience` is None, no values are compared, so the metric may have any name.
        self._mode: str | None = None
        if patience is not None:
            self._mode = choose_metric_mode(metric, mode, option="--stop-mode")
        self._best: float | None = None
        self._num_without_best = 0

    @property
    def is_reached(self) -> bool:
        """Whether the run should end now."""
        return self._patience is not None and self._num_without_best >= self._patience

    def update(self, metrics: Mapping[str, float]) -> None:
        """Count an evaluation. NaN is never a new best.

        Raises:
            ConfigError: the evaluation does not have the metric.
        """
        if self._patience is None:
            return
        if self._metric not in metrics:
            raise ConfigError(
                f"the evaluation has no metric {self._metric!r} to stop by; it has: {', '.join(sorted(metrics))}"
            )
        value = metrics[self._metric]
        # Multiplied by this sign, the better of two values is the higher one.
        sign = -1 if self._mode == "min" else 1
        if not math.isnan(value) and (self._best is None or sign * value > sign * self._best):
            self._best, self._num_without_best = value, 0
        else:
            self._num_without_best += 1

    def state_dict(self) -> dict[str, Any]:
        """Return the count and the best value, with the metric that they are of, as JSON values."""
        return {
            "best": self._best,
            "num_without": self._num_without_best,
            "metric": self._metric,
            "mode": self._mode,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state that `state_dict` returned; start at zero if it is of another metric or mode.

        A state of an earlier release has neither, and counts as one of this metric.
        """
        metric, mode = state.get("metric", self._metric), state.get("mode", self._mode)
        if self._patience is None:
            # Nothing is compared in this run. A later run with patience may continue the state.
            self._metric, self._mode = metric, mode
        elif (metric, mode) != (self._metric, self._mode):
            self._best, self._num_without_best = None, 0
            return
        self._best = None if state["best"] is None else float(state["best"])
        self._num_without_best = int(state["num_without"])
