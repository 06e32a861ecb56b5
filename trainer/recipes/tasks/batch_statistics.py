"""Prepares the statistics of batch normalisation for evaluations and saves, because they differ between ranks.

Either the moving averages of the training are averaged over the ranks, or the statistics are recomputed over some
batches (Akiba et al. 2017). Invariant: training does not read the statistics, so nothing here changes the training.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import update_bn

import datasvc.trainer as hvd
from datasvc.trainer.recipes.tasks.task import Examples


@torch.no_grad()
def replace_statistics_by_averages(model: nn.Module) -> None:
    """Set the running means and variances on every rank to their average over the ranks; training does not read them.

    Every rank must call this before an evaluation.
    """
    averages = compute_average_statistics(model)
    for name, statistic in batch_statistics(model).items():
        statistic.copy_(averages[name])


def recompute_statistics(model: nn.Module, batches: Iterable[Examples]) -> None:
    """Set the running means and variances on every rank to the mean of those of the batches of all ranks.

    All batches have the same weight, as in `torch.optim.swa_utils.update_bn`. The model computes in training mode,
    without gradients and not compiled, and is in that mode afterwards; its layers may draw random numbers. Its counts
    of batches remain. Every rank must call this, with equally many batches.
    """
    counts = [module.num_batches_tracked for module in batch_norms(model).values()]
    counts_before = [(count, count.clone()) for count in counts if count is not None]
    # `update_bn` changes the momenta, for which a compiled model would be compiled once more.
    with torch.compiler.set_stance("force_eager"):
        update_bn(batches, _CallsWithExamples(model))
    for count, count_before in counts_before:
        count.copy_(count_before)
    replace_statistics_by_averages(model)


@contextmanager
def keeping_statistics(model: nn.Module) -> Iterator[None]:
    """Set the running means and variances back to their present values at the end of the context."""
    kept = {name: statistic.clone() for name, statistic in batch_statistics(model).items()}
    try:
        yield
    finally:
        for name, statistic in batch_statistics(model).items():
            statistic.copy_(kept[name])


@torch.no_grad()
def compute_average_statistics(model: nn.Module) -> dict[str, Tensor]:
    """Return the averages over all ranks, keyed as in `state_dict()`. Every rank must call this.

    The model is not changed, because saves use this function, and a save must not influence the training.
    """
    # Average copies, because the all-reduce overwrites its tensors.
    statistics = {name: statistic.clone() for name, statistic in batch_statistics(model).items()}
    if statistics and hvd.size() > 1:
        hvd.grouped_allreduce_(list(statistics.values()), name="batch_statistics", op=hvd.Average)
    return statistics


def batch_statistics(model: nn.Module) -> dict[str, Tensor]:
    """Return the model's running means and variances, not copied, keyed as in `state_dict()`."""
    return {
        f"{path}.{kind}" if path else kind: statistic
        for path, module in batch_norms(model).items()
        for kind, statistic in (("running_mean", module.running_mean), ("running_var", module.running_var))
        if statistic is not None
    }


def batch_norms(model: nn.Module) -> dict[str, nn.modules.batchnorm._BatchNorm]:
    """Return the batch normalisations of a model by their path."""
    return {
        path: module
        for path, module in model.named_modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm)  # noqa: SLF001 - torch's name for all of them
    }


class _CallsWithExamples(nn.Module):
    """A model that takes `Examples`, because `update_bn` calls a model with one argument."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, examples: Examples) -> None:
        self.model(examples.inputs, **examples.extra)
