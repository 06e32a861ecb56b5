"""Averages the running statistics of batch normalisation, which differ between ranks."""

from __future__ import annotations

import torch
from torch import nn

import datasvc.trainer as hvd


@torch.no_grad()
def replace_statistics_by_averages(model: nn.Module) -> None:
    """Set the running means and variances on every rank to their average over the ranks; training does not read them.

    Every rank must call this before an evaluation.
    """
    averages = compute_average_statistics(model)
    for name, statistic in batch_statistics(model).items():
        statistic.copy_(averages[name])


@torch.no_grad()
def compute_average_statistics(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the averages over all ranks, keyed as in `state_dict()`. Every rank must call this.

    The model is not changed, because saves use this function, and a save must not influence the training.
    """
    # Average copies, because the all-reduce overwrites its tensors.
    statistics = {name: statistic.clone() for name, statistic in batch_statistics(model).items()}
    if statistics and hvd.size() > 1:
        hvd.grouped_allreduce_(list(statistics.values()), name="batch_statistics", op=hvd.Average)
    return statistics


def batch_statistics(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the model's running means and variances, not copied, keyed as in `state_dict()`."""
    return {
        f"{path}.{kind}" if path else kind: statistic
        for path, module in model.named_modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm)  # noqa: SLF001 - torch's name for all of them
        for kind, statistic in (("running_mean", module.running_mean), ("running_var", module.running_var))
        if statistic is not None
    }
