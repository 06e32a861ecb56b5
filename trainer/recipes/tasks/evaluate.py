"""Evaluates a model over all ranks. Every sample counts once; padding is masked."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

import datasvc.trainer as hvd
from datasvc.loaders.core.loader import Loader
from datasvc.trainer.recipes.layouts.divided_model import DividedModel
from datasvc.trainer.recipes.optimizers.precision import autocast
from datasvc.trainer.recipes.tasks.task import Examples, Task, take_outputs


@torch.no_grad()
def evaluate(
    task: Task,
    model: nn.Module,
    loader: Loader[Any],
    device: torch.device,
    precision: str,
    divided: DividedModel | None = None,
) -> dict[str, float]:
    """Return the metrics of a split, equal to the last bit on all ranks. Every rank must call this.

    Args:
        task: task that defines the metrics.
        model: model; it is in evaluation mode during the call, and in training mode afterwards.
        loader: loader with tail="pad", so that all ranks take equally many steps; it is read to the end of its epoch.
        device: device of the model.
        precision: precision of the forward pass; see the module `precision`.
        divided: what this rank has of the model; None: the whole model.
    """
    model.eval()
    totals: torch.Tensor | None = None
    for batch in loader:
        with autocast(precision, device):
            counts = _sum_metrics(task, model, task.unpack(batch, device), divided)
        # Sums, not means, because batches differ in their number of samples that are not padding.
        totals = counts if totals is None else totals + counts
    model.train()
    if divided is not None:
        divided.reshard()
    assert totals is not None, "a loader with tail='pad' has at least one step"
    # The ranks' sums are added in one all-reduce, so that all ranks compute the metrics from the same bits.
    return task.metrics(hvd.allreduce(totals, name="evaluate.totals", op=hvd.Sum))


def _sum_metrics(task: Task, model: nn.Module, examples: Examples, divided: DividedModel | None) -> torch.Tensor:
    """Return the sums of this rank: zeros if another rank with the same batch has the same outputs."""
    if divided is None:
        return task.sum_metrics(model, examples)
    if divided.split is not None:
        examples = examples.narrow_tokens(divided.split.narrow)
    if divided.pipeline is None:
        counts = task.sum_metrics(model, examples)
    else:
        outputs = divided.pipeline.evaluate(examples.inputs, examples.extra)
        if outputs is not None:
            counts = task.sum_metrics(take_outputs, replace(examples, inputs=outputs, extra={}))
    return counts if divided.reports_outputs else torch.zeros(task.num_sums, dtype=torch.float64, device="cpu")
