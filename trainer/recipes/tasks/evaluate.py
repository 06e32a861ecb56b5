"""Evaluates a model over all ranks. Every sample counts once; padding is masked."""

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
    """Return the metrics of a split, equal to the last bit on all ranks. Every rank must call this.

    Args:
        task: task that defines the metrics.
        model: model; it is in evaluation mode during the call, and in training mode afterwards.
        loader: loader with tail="pad", so that all ranks take equally many steps; it is read to the end of its epoch.
        device: device of the model.
        precision: precision of the forward pass; see the module `precision`.
    """
    model.eval()
    totals: torch.Tensor | None = None
    for batch in loader:
        with autocast(precision, device):
            counts = task.sum_metrics(model, task.unpack(batch, device))
        # Sums, not means, because batches differ in their number of samples that are not padding.
        totals = counts if totals is None else totals + counts
    model.train()
    assert totals is not None, "a loader with tail='pad' has at least one step"
    # The ranks' sums are added in one all-reduce, so that all ranks compute the metrics from the same bits.
    return task.metrics(hvd.allreduce(totals, name="evaluate.totals", op=hvd.Sum))
