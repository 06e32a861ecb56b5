"""Images to classes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from datasvc.cache import Cache
from datasvc.errors import ConfigError
from datasvc.shards import Split
from loaders import ImageBatch, ImageLoader
from loaders.augment import AugmentConfig
from loaders.loader import Loader
from trainer.recipes.config import TrainConfig
from trainer.recipes.models import build_model, combine_losses
from trainer.recipes.task import Examples, Place

_TOP = 5


class Classification:
    """Learns the class of an image: cross entropy, with label smoothing where the run says so (Szegedy et al. 2016).

    Args:
        config: of the run.
        split: that it trains on.

    Raises:
        ConfigError: the split has no labels.
    """

    unit: ClassVar[str] = "images"
    default_model: ClassVar[str] = "small-cnn"
    targets_vary: ClassVar[bool] = False

    def __init__(self, config: TrainConfig, split: Split) -> None:
        if not split.classes:
            raise ConfigError(f"{split!r} has no labels to train on")
        self._config = config
        self._num_classes = len(split.classes)

    def open_loader(
        self, split: Split, *, training: bool, batch_size: int, cache: Cache | None, place: Place
    ) -> Loader[Any]:
        """Return this rank's loader of a split."""
        config = self._config
        if not split.classes:
            raise ConfigError(f"{split!r} has no labels")
        return ImageLoader(
            split,
            batch_size=batch_size,
            training=training,
            cache=cache,
            size=config.size,
            resize=config.resize,
            augment=AugmentConfig(scale=config.scale, ratio=config.ratio, flip=config.flip),
            seed=config.seed,
            **(choose_order(config) if training else {}),
            data_rank=place.rank,
            data_world_size=place.world_size,
            layout="NHWC" if config.channels_last else "NCHW",
            device=str(place.device),
            num_threads=place.num_threads,
            prefetch=config.prefetch,
        )

    def build_model(self, name: str, options: Mapping[str, Any]) -> nn.Module:
        """Return the model, with as many logits as there are classes."""
        model = build_model(name, self._num_classes, **options)
        return model.to(memory_format=torch.channels_last) if self._config.channels_last else model  # type: ignore[call-overload]

    def unpack(self, batch: ImageBatch[Tensor], device: torch.device) -> Examples:
        """Return images `float32[n, 3, size, size]` and labels `int64[n]`."""
        assert batch.labels is not None
        images = batch.images.to(device)
        if self._config.channels_last:
            images = images.permute(0, 3, 1, 2)  # a view: the memory is channels-last as it came
        return Examples(images, batch.labels.to(device), batch.mask.to(device))

    def count_targets(self, examples: Examples) -> int:
        """Return the number of images: none of a training batch pads."""
        return len(examples.targets)

    def sum_loss(self, model: nn.Module, examples: Examples) -> Tensor:
        """Return the cross entropy, with that of auxiliary classifiers in a model that has some."""
        return combine_losses(
            model(examples.inputs),
            lambda logits: F.cross_entropy(
                logits.float(), examples.targets, reduction="sum", label_smoothing=self._config.label_smoothing
            ),
        )

    def count(self, model: nn.Module, examples: Examples) -> Tensor:
        """Return how many are right, right among five, and all; and the sum of their cross entropies."""
        logits = model(examples.inputs).float()
        losses = F.cross_entropy(logits, examples.targets, reduction="none")
        best = logits.topk(min(_TOP, logits.shape[1]), dim=1).indices
        hits = (best == examples.targets[:, None]) & examples.mask[:, None]
        counts = [hits[:, 0].sum(), hits.any(1).sum(), losses[examples.mask].double().sum(), examples.mask.sum()]
        return torch.stack([count.double().cpu() for count in counts])

    def metrics(self, totals: Tensor) -> dict[str, float]:
        """Return top-1 and top-5 accuracy in 0..1, and the mean cross entropy."""
        right, among_five, loss, samples = cast("list[float]", totals.tolist())
        return {"val_accuracy": right / samples, "val_top5": among_five / samples, "val_loss": loss / samples}


def choose_order(config: TrainConfig) -> dict[str, Any]:
    """Return what a loader is told of the order."""
    if config.shuffle == "global":
        return {"shuffle": "global"}
    return {"shuffle": config.shuffle, "lanes": config.lanes, "block": config.block}
