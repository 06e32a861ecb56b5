"""One optimizer step with the batches of all ranks: what training does, and what its profile takes the time of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn

import datasvc.trainer as hvd
from datasvc.trainer.recipes.ema import WeightAverage
from datasvc.trainer.recipes.optimizers.precision import autocast
from datasvc.trainer.recipes.settings.batch_plan import BatchPlan
from datasvc.trainer.recipes.settings.config import TrainConfig
from datasvc.trainer.recipes.tasks.task import Task

Mark = Callable[[str], None]
"""Called when a part of a step has been told to the device, with its name."""


class Learner(Protocol):
    """What a step needs and moves; attributes as those of `Run`, which is one."""

    config: TrainConfig
    task: Task
    batches: BatchPlan
    model: nn.Module
    optimizer: Any
    loss_scale: torch.amp.GradScaler
    average: WeightAverage | None
    device: torch.device


def update(run: Learner, batch: Any, mark: Mark = lambda _: None) -> torch.Tensor:
    """Take one optimizer step with the batches of all ranks; returns the mean loss of this rank's part, detached.

    Args:
        run: of this rank; every rank calls this.
        batch: of its loader.
        mark: told the end of each part: "transfer", "targets", "forward", "backward", "all-reduce", "update".
    """
    run.optimizer.zero_grad()
    mark("update")
    examples = run.task.unpack(batch, run.device)
    num_targets = run.task.count_targets(examples)
    mark("transfer")
    num_in_all = num_targets * hvd.size()
    if run.task.targets_vary:
        num_in_all = int(hvd.allreduce(torch.tensor(num_targets), name="update.targets", op=hvd.Sum))
        num_in_all = max(num_in_all, 1)  # blocks of padding alone have no target, and no gradient
        mark("targets")
    total = torch.zeros((), device=run.device)
    for part in examples.split(run.batches.micro_batch):
        with autocast(run.config.precision, run.device):
            loss = run.task.sum_loss(run.model, part)
        mark("forward")
        # Divided by the whole batch, not by this rank's or this pass's part of it (Goyal et al. 2017, remark 3).
        run.loss_scale.scale(loss / num_in_all).backward()  # type: ignore[no-untyped-call]
        total += loss.detach()
        mark("backward")
    run.optimizer.synchronize()
    mark("all-reduce")
    run.loss_scale.unscale_(run.optimizer)  # after the sum over the ranks: all see the same infinities
    if run.config.clip_norm is not None:
        torch.nn.utils.clip_grad_norm_(run.model.parameters(), run.config.clip_norm)
    with run.optimizer.skip_synchronize():
        run.loss_scale.step(run.optimizer)
    scale = run.loss_scale.get_scale()
    run.loss_scale.update()
    # It falls where a gradient overflowed and the step was skipped: then there are no new weights to take in.
    if run.average is not None and run.loss_scale.get_scale() >= scale:
        run.average.update()
    mark("update")
    return total / max(num_targets, 1)
