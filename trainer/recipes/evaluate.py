"""Accuracy over all ranks, every sample counted once: padding is masked."""

from __future__ import annotations

import torch
from torch import nn

import trainer as hvd
from loaders import ImageLoader


@torch.no_grad()
def evaluate(model: nn.Module, loader: ImageLoader, device: torch.device) -> dict[str, float]:
    """Return accuracy and mean loss over the split. Every rank calls this.

    Args:
        model: put into evaluation mode and back.
        loader: with tail="pad", so that all ranks take equally many steps; run to the end of its epoch.
        device: of the model.

    Returns:
        {"val_accuracy": in 0..1, "val_loss": mean cross entropy}, the same on all ranks.
    """
    model.eval()
    totals = torch.zeros(3, dtype=torch.float64)  # correct, loss, samples
    for batch in loader:
        assert batch.labels is not None
        mask = batch.mask
        logits = model(batch.images.to(device)).float().cpu()
        losses = nn.functional.cross_entropy(logits, batch.labels, reduction="none")
        totals[0] += ((logits.argmax(1) == batch.labels) & mask).sum()
        totals[1] += losses[mask].double().sum()
        totals[2] += mask.sum()
    model.train()
    totals = hvd.allreduce(totals, name="evaluate.totals", op=hvd.Sum)
    correct, loss, samples = totals.tolist()
    return {"val_accuracy": correct / samples, "val_loss": loss / samples}
