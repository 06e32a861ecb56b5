"""The task of classifying images: its loaders, model, loss and metrics."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar, cast

import pyarrow as pa
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from datasvc.cache import Cache
from datasvc.errors import ConfigError
from datasvc.loaders import (
    DataRanks,
    DecodeConfig,
    DecodeGroup,
    ImageBatch,
    ImageLoader,
    Loader,
    Mixture,
    OrderConfig,
    PixelFormat,
)
from datasvc.loaders.core.mixture import weighted_splits
from datasvc.shards import Split, open_dataset
from datasvc.shards.format.schema import LABEL
from datasvc.shards.format.shard_table import MAX_CLASSES
from datasvc.trainer.recipes.models import build_model, combine_losses, main_logits
from datasvc.trainer.recipes.models.registry import import_function
from datasvc.trainer.recipes.settings.config import TrainConfig
from datasvc.trainer.recipes.settings.groups.training import IMAGE_MODEL
from datasvc.trainer.recipes.tasks.task import NO_TARGET, DataPlacement, Examples

_TOP = 5


class Classification:
    """Learns the class of an image by cross entropy, with optional label smoothing (Szegedy et al. 2016).

    Raises:
        ConfigError: the split has no labels, or labels that are not class numbers.
    """

    unit: ClassVar[str] = "images"
    default_model: ClassVar[str] = IMAGE_MODEL
    num_sums: ClassVar[int] = 4
    masks_samples = False
    losses: list[Tensor] | None = None

    def __init__(self, config: TrainConfig, split: Split | Mixture) -> None:
        self._config = config
        self._num_classes = count_classes(split)
        self._transform = None if config.transform is None else import_function(config.transform, what="transform")

    @property
    def targets_vary(self) -> bool:
        """Whether ranks may have different numbers of targets: images that do not decode or are masked have none."""
        return self._config.on_bad == "mask" or self.masks_samples

    def open_loader(
        self, split: Split | Mixture, *, training: bool, batch_size: int, cache: Cache | None, place: DataPlacement
    ) -> Loader[Any]:
        """Return this rank's loader of a split or mixture."""
        config = self._config
        self.check_labels(split)
        # A decode group shares batches in the memory of the CPU; `unpack` copies them to the device.
        group = DecodeGroup(config.decode_group, config.decode_lag) if config.decode_group and training else None
        return ImageLoader(
            split,
            batch_size=batch_size,
            training=training,
            cache=cache,
            size=config.size,
            **order_arguments(config, training=training),
            ranks=DataRanks(place.rank, place.world_size),
            pixels=PixelFormat(layout="NHWC" if config.channels_last else "NCHW", mean=config.mean, std=config.std),
            augment=config.build_augment(self._transform),
            device=str(place.device) if group is None else "cpu",
            decode=DecodeConfig(
                config.decode,
                num_threads=place.num_threads,
                prefetch=config.prefetch,
                on_bad=config.on_bad,
                servers=config.decode_servers,
                decode_scale=config.decode_scale,
            ),
            ledger=config.ledger if training else None,
            decode_group=group,
        )

    def check_labels(self, split: Split | Mixture) -> None:
        """Raise ConfigError if a sample has no label or a label outside the classes."""
        _check_labels(split, self._num_classes)

    def build_model(self, name: str, options: Mapping[str, Any]) -> nn.Module:
        """Return the model, with one logit per class."""
        model = build_model(name, self._num_classes, **options)
        return model.to(memory_format=torch.channels_last) if self._config.channels_last else model  # type: ignore[call-overload]

    def make_example(self, _block: int | None, /) -> Tensor:
        """Return the input of one image, `float32[1, 3, size, size]` on the meta device."""
        return torch.zeros(1, 3, self._config.size, self._config.size, device="meta")

    def unpack(self, batch: ImageBatch[Tensor], device: torch.device) -> Examples:
        """Return images `float32[n, 3, size, size]` and labels `int64[n]`."""
        assert batch.labels is not None
        images = batch.images.to(device)
        if self._config.channels_last:
            images = images.permute(0, 3, 1, 2)  # a view: the loader's memory is channels-last already
        # Not only if `targets_vary`: a shard may have purged samples that no table lists.
        labels = batch.labels.masked_fill(~batch.mask, NO_TARGET)
        return Examples(images, labels.to(device), batch.mask.to(device))

    def count_targets(self, examples: Examples) -> int:
        """Return the number of images that decode and are not masked; training batches have no padding."""
        return int(examples.mask.sum()) if self.targets_vary else len(examples.targets)

    def sum_loss(self, model: Callable[..., Any], examples: Examples) -> Tensor:
        """Return the cross entropy, including that of auxiliary classifiers of the model."""
        cross_entropy = partial(F.cross_entropy, label_smoothing=self._config.label_smoothing)
        outputs = model(examples.inputs)
        if self.losses is not None:
            with torch.no_grad():
                logits = main_logits(outputs).float()
                self.losses.append(cross_entropy(logits, examples.targets, reduction="none"))
        return combine_losses(
            outputs, lambda logits: cross_entropy(logits.float(), examples.targets, reduction="sum")
        )

    def sum_metrics(self, model: Callable[..., Any], examples: Examples) -> Tensor:
        """Return the numbers of top-1 hits and top-5 hits, the sum of cross entropies, and the number of samples."""
        # In float32, because autocast may return 16 bits, which are too few for the logarithms of cross entropy.
        logits = model(examples.inputs).float()
        losses = F.cross_entropy(logits, examples.targets, reduction="none")
        best = logits.topk(min(_TOP, logits.shape[1]), dim=1).indices
        hits = (best == examples.targets[:, None]) & examples.mask[:, None]
        counts = [hits[:, 0].sum(), hits.any(1).sum(), losses[examples.mask].double().sum(), examples.mask.sum()]
        return torch.stack([count.double().cpu() for count in counts])

    def metrics(self, totals: Tensor) -> dict[str, float]:
        """Return top-1 and, with more than 5 classes, top-5 accuracy in 0..1, and the mean cross entropy."""
        right, among_five, loss, samples = cast("list[float]", totals.tolist())
        top_5 = {"val_top5": among_five / samples} if self._num_classes > _TOP else {}  # else it is always 1
        return {"val_accuracy": right / samples, **top_5, "val_loss": loss / samples}


def count_classes(split: Split | Mixture) -> int:
    """Return the number of classes of a split or mixture.

    Without class names, the classes are numbered 0 to the largest label in any split of the versions.

    Raises:
        ConfigError: a split has no labels, or labels that are not class numbers.
    """
    for part in weighted_splits(split):
        if LABEL not in part.table.sample_schema.names:
            raise ConfigError(f"{part!r} has no labels to train on: none of its columns is called {LABEL!r}")
    num_classes = len(split.classes)
    if not num_classes:
        # Count over all splits, so that a label that occurs only in `val` has a logit too.
        versions = [open_dataset(part.repository, part.dataset) for part in weighted_splits(split)]
        counts = [other.table.label_counts for version in versions for other in version.values()]
        num_classes = 1 + max((max(labels) for labels in counts if labels), default=-1)
    if num_classes > MAX_CLASSES:
        raise ConfigError(
            f"the labels of {split!r} go up to {num_classes - 1}, but labels must be below {MAX_CLASSES}: "
            "renumber them from 0, or convert them to class names, and ingest the data again"
        )
    _check_labels(split, num_classes)
    return num_classes


def _check_labels(split: Split | Mixture, num_classes: int) -> None:
    """Raise ConfigError if a sample has no label or a label outside the classes."""
    for part in weighted_splits(split):
        # The labels of a split of a mixture are indices of the split's own class names.
        _check_labels_of_split(part, len(part.classes) or num_classes)


def _check_labels_of_split(split: Split, num_classes: int) -> None:
    table = split.table
    counts = table.label_counts
    if LABEL not in table.sample_schema.names:
        raise ConfigError(f"{split!r} has no labels: none of its columns is called {LABEL!r}")
    if not pa.types.is_integer(table.sample_schema.field(LABEL).type):
        raise ConfigError(f"the labels of {split!r} are {table.sample_schema.field(LABEL).type}, not integers")
    if not counts:
        if split.classes:
            return  # tables of format 1 have no label counts
        raise ConfigError(
            f"the labels of {split!r} are not counted: there are none, or more than {MAX_CLASSES} different ones; "
            f"name the classes with `datasvc classes {split.dataset.partition('@')[0]} FILE`"
        )
    outside = [label for label in counts if not 0 <= label < num_classes]
    if outside:
        number = sum(counts[label] for label in outside)
        raise ConfigError(
            f"{number} samples of {split!r} have labels outside 0..{num_classes - 1}, such as {outside[0]}: delete "
            f"them (datasvc delete {split.dataset.partition('@')[0]} --where 'label < 0 or label >= {num_classes}')"
        )
    num_unlabelled = table.num_samples - sum(counts.values())
    if num_unlabelled:
        raise ConfigError(
            f"{num_unlabelled} samples of {split!r} have no label: delete them "
            f"(datasvc delete {split.dataset.partition('@')[0]} --where 'label is null')"
        )


def refuse_image_settings(config: TrainConfig, holds: str, *others: str) -> None:
    """Raise ConfigError if a setting for images, or one of `others`, is given; `holds` says what the data are."""
    for name in ("transform", "jitter", "mean", "std", "decode", "decode_group", *others):
        if getattr(config, name) != getattr(TrainConfig, name):
            raise ConfigError(f"--{name.replace('_', '-')} is for images, and {holds}; leave it out")


def order_arguments(config: TrainConfig, *, training: bool) -> dict[str, Any]:
    """Return the loader's arguments for the access order: for training, from the run's settings; else, table order.

    Without `block` and `lanes`, the loader derives them from the sizes of the shards and of the cache.
    """
    if training and config.shuffle == "windowed":
        if config.block is None and config.lanes == 1:
            return {"seed": config.seed, "shuffle": "windowed"}
        return {"order": OrderConfig(config.seed, "windowed", config.lanes, config.block, config.sticky)}
    return {"order": OrderConfig(config.seed, "global" if training else None)}
