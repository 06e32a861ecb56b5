"""Autotuning on rank 0 during the job: measures the throughput, proposes values to all ranks, and logs the trials.

The engine of rank 0 has a `Tuner` if autotuning is on. `autotune` searches the values; this module adds the clock
and the log file.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from math import prod
from pathlib import Path

from datasvc.trainer.engine.autotune import Autotuner
from datasvc.trainer.engine.execution.wire import num_lanes, wire_dtype
from datasvc.trainer.engine.negotiation.requests import CollectiveKind, Request, Tuning
from datasvc.trainer.env.environment import EngineSettings

logger = logging.getLogger(__name__)


class Tuner:
    """Passes the engine's measurements to an `Autotuner`, and the autotuner's values to the engine.

    The search starts at the values of the settings.

    Args:
        settings: settings of the engine.
        has_node_groups: whether allreduces of this job can be hierarchical.
    """

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
