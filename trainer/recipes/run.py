"""One rank's run: everything that the loop moves, and that a checkpoint binds."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from datasvc.api import DataRepository
from datasvc.loaders.core.loader import Loader
from datasvc.models import CheckpointManager, ConsumptionTracker, SaveHandle
from datasvc.node.ranks import RankNodes
from datasvc.shards import DatasetVersion
from datasvc.trainer.recipes.early_stop import EarlyStop
from datasvc.trainer.recipes.ema import WeightAverage
from datasvc.trainer.recipes.optimizers.schedules import RateSchedule
from datasvc.trainer.recipes.reporting.events import EventSink
from datasvc.trainer.recipes.reporting.metric_logs import MetricLog
from datasvc.trainer.recipes.settings.batch_plan import BatchPlan
from datasvc.trainer.recipes.settings.config import TrainConfig
from datasvc.trainer.recipes.tasks.task import Task


@dataclass
class Run:
    """State of a run on one rank.

    Attributes:
        config: effective settings.
        repo: where data is read and checkpoints go.
        dataset: the version that is trained on.
        task: what is learned.
        batches: sizes of a step.
        loader: of the training split; says how far the run is.
        val_loader: of the validation split; None: there is none, and nothing is evaluated.
        model: on its device.
        optimizer: distributed.
        schedule: of the rate.
        loss_scale: of fp16; does nothing otherwise.
        average: of the weights; None: not asked for.
        stop: when to end early.
        device: of the model.
        events: where this rank reports to.
        logs: of rank 0, experiment trackers.
        nodes: servers that this rank started for its node.
        checkpoints: where the run is saved.
        reading: what the run consumed since it began, or since the version that it continues.
        step: optimizer steps so far.
        version: newest checkpoint, of this run or the one it continues; None: there is none yet.
        saves: that were not reported yet, each with the epoch that it was made in.
        metrics: of the newest evaluation.
    """

    config: TrainConfig
    repo: DataRepository
    dataset: DatasetVersion
    task: Task
    batches: BatchPlan
    loader: Loader[Any]
    val_loader: Loader[Any] | None
    model: nn.Module
    optimizer: Any
    schedule: RateSchedule
    loss_scale: torch.amp.GradScaler
    average: WeightAverage | None
    stop: EarlyStop
    device: torch.device
    events: EventSink
    logs: list[MetricLog] = field(default_factory=list)
    nodes: RankNodes | None = None
    checkpoints: CheckpointManager = field(init=False)
    reading: ConsumptionTracker = field(init=False)
    step: int = 0
    version: str | None = None
    saves: deque[tuple[SaveHandle, int]] = field(default_factory=deque)
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def is_over(self) -> bool:
        """Whether no step is left: all epochs are served, `max_steps` are done, or nothing improves any more.

        The same on all ranks, which have the same position, step and metrics.
        """
        epochs_left = self.config.epochs - self.loader.epoch
        is_served = epochs_left < 1 or (epochs_left == 1 and not self.loader.steps_left)
        return is_served or self.is_cut_short

    @property
    def is_cut_short(self) -> bool:
        """Whether the run ends before its epochs do."""
        return self.stop.is_reached or (self.config.max_steps is not None and self.step >= self.config.max_steps)
