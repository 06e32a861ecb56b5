"""Statistics of batch normalisation: each rank follows its own samples, and a checkpoint needs one truth."""

from __future__ import annotations

import torch
from torch import nn

import datasvc.trainer as hvd


@torch.no_grad()
def average_batch_statistics(model: nn.Module) -> None:
    """Set the running means and variances of all ranks to their average; training itself does not use them.

    Every rank calls this, before it evaluates.
    """
    statistics = list(batch_statistics(model).values())
    if statistics and hvd.size() > 1:
        hvd.grouped_allreduce_(statistics, name="batch_statistics", op=hvd.Average)


@torch.no_grad()
def averaged_batch_statistics(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the average of all ranks by the names of the model's state; the model keeps its own.

    Every rank calls this, before it saves: when a run saves must not change how it goes on.
    """
    statistics = {name: each.clone() for name, each in batch_statistics(model).items()}
    if statistics and hvd.size() > 1:
        hvd.grouped_allreduce_(list(statistics.values()), name="saved_batch_statistics", op=hvd.Average)
    return statistics


def batch_statistics(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the running means and variances themselves, by the names of the model's state."""
    return {
        f"{path}.{kind}" if path else kind: statistic
        for path, module in model.named_modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm)  # noqa: SLF001 - torch's name for all of them
        for kind, statistic in (("running_mean", module.running_mean), ("running_var", module.running_var))
        if statistic is not None
    }
