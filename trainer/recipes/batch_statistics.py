"""Statistics of batch normalisation: each rank follows its own samples, and a checkpoint needs one truth."""

from __future__ import annotations

import torch
from torch import nn

import trainer as hvd


@torch.no_grad()
def average_batch_statistics(model: nn.Module) -> None:
    """Set the running means and variances of all ranks to their average; training itself does not use them.

    Every rank calls this, before it evaluates or commits.
    """
    buffers = [
        buffer
        for module in model.modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm)  # noqa: SLF001 - torch's name for all of them
        for buffer in (module.running_mean, module.running_var)
        if buffer is not None
    ]
    if buffers and hvd.size() > 1:
        hvd.grouped_allreduce_(buffers, name="batch_statistics", op=hvd.Average)
