"""A model, trainers and data of tests with Lightning. Its import is slow: tests import this module when they run."""

from functools import partial

import lightning
import torch

from datasvc.integrations.lightning import SplitsModule, VersionCallback
from datasvc.loaders import ImageLoader

__all__ = ["QUIET", "ImageLoader", "Net", "VersionCallback", "lightning", "splits", "trainer"]

QUIET = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}


class Net(lightning.LightningModule):
    """Notes the positions that it trains on."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3 * 8 * 8, 10)
        self.served = []

    def training_step(self, batch, _):
        batch = batch["a"] if isinstance(batch, dict) else batch
        if not isinstance(batch, list):
            self.served.append((batch.epoch, int(batch.positions[0])))
        images, labels = batch
        return torch.nn.functional.cross_entropy(self.layer(images.flatten(1)), labels)

    def validation_step(self, batch, _):
        self.log("samples", float(batch.mask.sum()), reduce_fx="sum")

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


def trainer(steps, **options):
    return lightning.Trainer(max_steps=steps, use_distributed_sampler=False, **QUIET, **options)


def splits(digits, **options):
    return SplitsModule(digits, partial(ImageLoader, batch_size=256, size=8), **options)
