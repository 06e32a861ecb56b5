"""The state of a run on one rank, which the training loop changes and the checkpoints store."""

from __future__ import annotations

import contextlib
import math
import sys
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

import datasvc.trainer as hvd
from datasvc.cache import Cache
from datasvc.errors import ConfigError
from datasvc.loaders.core.loader import Loader
from datasvc.loaders.profiling.report import Report
from datasvc.loaders.profiling.step_times import trace_path
from datasvc.models import CheckpointManager, ConsumptionTracker, Execution, SaveHandle
from datasvc.node.ranks import RankNodes
from datasvc.repository.logs.references import choose_metric_mode
from datasvc.trainer.recipes.optimizers.catch_up import CatchUp
from datasvc.trainer.recipes.optimizers.leased_rounds import LeasedRounds
from datasvc.trainer.recipes.optimizers.schedules import RateSchedule
from datasvc.trainer.recipes.reporting.events import EventSink
from datasvc.trainer.recipes.reporting.metric_logs import MetricLog
from datasvc.trainer.recipes.reporting.recorder import RUN_LOG, Recorder
from datasvc.trainer.recipes.update import Learner


@dataclass
class Run(Learner):
    """State of a run on one rank.

    Attributes:
        loader: loader of the training split; its position is that of the run.
        val_loader: loader of the validation split; None if the data set has no validation split.
        statistics_loader: second loader of the training split, for the statistics of batch normalisation; None if
            they are not recomputed. It is separate so that it does not move the position of the run.
        schedule: schedule of the learning rate.
        stop: early stopping.
        events: sink of this rank's events.
        recorder: what this rank measures for the log of the run.
        logs: experiment trackers by target, on rank 0.
        log_ids: ids of the runs of `TRACKERS`, and that of the run log by `RUN_LOG`; equal on all ranks.
        cache: cache of the node, as opened for this run; None without one.
        nodes: servers that this rank started for its node.
        stop_metrics: ends the server of the loaders' metrics.
        checkpoints: manager that saves the run.
        reading: tracker of the samples consumed since the run started, or since the version that it continues.
        step: optimizer steps so far.
        version: newest checkpoint of this run, or the checkpoint that it continues; None before the first one.
        saves: saves not reported yet, each with the epoch of its state.
        committed: step and name of each version whose commit was reported.
        metrics: metrics of the newest evaluation; empty if training has continued since.
        average_statistics: statistics of batch normalisation with which that evaluation ran the averaged weights;
            empty unless they are recomputed.
        parent: version that the first checkpoint of this process continues; None: the version that it restores.
        not_finite_since: step after which the loss or the weights were found not to be finite; None: they are.
        has_saved: whether this process has begun a checkpoint of the run.
        execution: how the job computes the steps; None: as its layout and settings say.
        rounds: rounds with leases, or the rest of a round in which a replica was lost; None in other steps.
        first_round_step: steps of the optimizer from which on this run has all of a round of averaged weights.
        saved_leases: state of these in the checkpoint that the run continues.
    """

    loader: Loader[Any]
    val_loader: Loader[Any] | None
    statistics_loader: Loader[Any] | None
    schedule: RateSchedule
    stop: EarlyStop
    events: EventSink
    recorder: Recorder
    logs: dict[str, MetricLog] = field(default_factory=dict)
    log_ids: dict[str, str] = field(default_factory=dict)
    cache: Cache | None = None
    nodes: RankNodes | None = None
    stop_metrics: Callable[[], None] = lambda: None
    # Set by `start` after construction, because a restore changes the other attributes first.
    checkpoints: CheckpointManager = field(init=False)
    reading: ConsumptionTracker = field(init=False)
    step: int = 0
    version: str | None = None
    saves: deque[tuple[SaveHandle, int]] = field(default_factory=deque)
    committed: list[tuple[int, str]] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    average_statistics: dict[str, Tensor] = field(default_factory=dict)
    parent: str | None = None
    not_finite_since: int | None = None
    has_saved: bool = False
    execution: Execution | None = None
    rounds: LeasedRounds | CatchUp | None = None
    first_round_step: int = 0
    saved_leases: dict[str, Any] = field(default_factory=dict)

    @property
    def ref(self) -> str | None:
        """Reference to the log of the run, for its versions; None without a log."""
        run_id = self.log_ids.get(RUN_LOG)
        return f"{self.config.name}/{run_id}" if self.config.run_log and run_id is not None else None

    @property
    def is_over(self) -> bool:
        """Whether the run is complete: all epochs are served, `max_steps` is reached, or early stopping applies.

        Equal on all ranks, because position, step and metrics are equal on all ranks.
        """
        return self.is_served or self.is_cut_short

    @property
    def is_served(self) -> bool:
        """Whether all epochs are served."""
        # Between the last batch of an epoch and the end of its loop, `loader.epoch` still counts that epoch.
        epochs_left = self.config.epochs - self.loader.epoch
        return epochs_left < 1 or (epochs_left == 1 and not self.loader.steps_left)

    @property
    def is_cut_short(self) -> bool:
        """Whether the run ends by `max_steps` or early stopping, whatever is left of its epochs."""
        return self.stop.is_reached or self.has_all_steps

    @property
    def has_all_steps(self) -> bool:
        """Whether `max_steps` is reached."""
        return self.config.max_steps is not None and self.step >= self.config.max_steps

    def close(self, error: BaseException | None = None) -> None:
        """Close what the run has opened on this rank, after an error in the middle of the training.

        Errors of saves are logged.
        """
        with contextlib.ExitStack() as stack:
            stack.callback(self.recorder.close, error)
            stack.callback(self.stop_metrics)
            # The last one is closed first: a save that is still running reads nothing but its own copy.
            for log in self.logs.values():
                stack.callback(log.close)
            if self.nodes is not None:
                stack.callback(self.nodes.close)
            if self.cache is not None:
                stack.enter_context(self.cache)
            for loader in (self.val_loader, self.statistics_loader, self.loader):
                if loader is not None:
                    stack.callback(loader.close)


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


# What a run reports of its loader.


def diagnose(run: Run) -> dict[str, Any]:
    """Return the report of the loader with the rates of all ranks, as the curves of the run have."""
    return run.loader.report().of_all_ranks(run.layout.num_data_ranks).to_dict()


def report_tuning(run: Run, report: Report) -> None:
    """Tune this rank's loader by its report on the last epoch, and report from rank 0 what it chose, and why."""
    tuning = run.loader.tune(report)
    if hvd.rank() == 0:
        run.events.report("loader", step=run.step, **vars(tuning.setting), reason=tuning.reason)


def report_profile(run: Run, path: str, epoch: int) -> None:
    """Report from rank 0 where the time of the epoch that just ended was spent, and write this rank's trace of it.

    `epoch` is the number of that epoch. `run.loader.epoch` is the next one, unless `max_steps` ended the epoch early.

    Raises:
        ConfigError: the trace cannot be written.
    """
    report = run.loader.report()
    run.loader.restart_report()
    run.loader.write_trace(trace_path(path, rank=hvd.rank(), num_ranks=hvd.size()))
    if hvd.rank() == 0:
        sys.stderr.write(f"{report}\n")
        run.events.report("profile", epoch=epoch, **report.to_dict())
