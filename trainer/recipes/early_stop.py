"""When a run has learned all it will: its metric has not improved for a while."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from datasvc.errors import ConfigError
from datasvc.models.registry.metric_mode import choose_metric_mode


class EarlyStop:
    """Counts evaluations without a new best. A pure function of the metrics, which are the same on all ranks.

    Args:
        metric: name of one.
        patience: evaluations in a row without a new best that end the run; None: it never ends early.
        mode: "max" or "min", which is better; None: as the metric's name says.

    Raises:
        ConfigError: the name does not say.
    """

    def __init__(self, metric: str, patience: int | None, mode: str | None = None) -> None:
        self._metric = metric
        self._patience = patience
        # Without patience nothing is compared, so that any name will do.
        lower = patience is not None and choose_metric_mode(metric, mode, option="--stop-mode") == "min"
        self._sign = -1 if lower else 1
        self._best: float | None = None
        self._num_without = 0

    @property
    def is_reached(self) -> bool:
        """Whether the run is to end now."""
        return self._patience is not None and self._num_without >= self._patience

    def update(self, metrics: Mapping[str, float]) -> None:
        """Take note of an evaluation. Raises ConfigError where the metric is not among its results.

        NaN is never a new best, and never the best to beat.
        """
        if self._patience is None:
            return
        if self._metric not in metrics:
            raise ConfigError(
                f"there is no metric {self._metric!r} to stop by; there are: {', '.join(sorted(metrics))}"
            )
        value = metrics[self._metric]
        if not math.isnan(value) and (self._best is None or self._sign * value > self._sign * self._best):
            self._best, self._num_without = value, 0
        else:
            self._num_without += 1

    def state_dict(self) -> dict[str, Any]:
        """Return the count and the best, as JSON values."""
        return {"best": self._best, "num_without": self._num_without}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state."""
        self._best = None if state["best"] is None else float(state["best"])
        self._num_without = int(state["num_without"])
