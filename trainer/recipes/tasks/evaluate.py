"""A model's metrics over all ranks, every sample counted once: padding is masked."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import datasvc.trainer as hvd
from datasvc.loaders.core.loader import Loader
from datasvc.trainer.recipes.optimizers.precision import autocast
from datasvc.trainer.recipes.tasks.task import Task


@torch.no_grad()
def evaluate(
    task: Task, model: nn.Module, loader: Loader[Any], device: torch.device, precision: str
) -> dict[str, float]:
    """Return the metrics of a split, the same bits on all ranks. Every rank calls this.

    Args:
        task: says what is counted.
        model: put into evaluation mode and back.
        loader: with tail="pad", so that all ranks take equally many steps; run to the end of its epoch.
        device: of the model.
        precision: that the forward pass computes in, see `precision`.
    """
    model.eval()
    totals: torch.Tensor | None = None
    for batch in loader:
        with autocast(precision, device):
            counts = task.count(model, task.unpack(batch, device))
        totals = counts if totals is None else totals + counts
    model.train()
    assert totals is not None, "a loader with tail='pad' has at least one step"
    return task.metrics(hvd.allreduce(totals, name="evaluate.totals", op=hvd.Sum))
