"""The task of classifying sounds, such as keywords, by mel spectrograms of their clips."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from datasvc.cache import Cache
from datasvc.loaders import AudioAugment, AudioBatch, AudioLoader, DataRanks, Loader, MelConfig, Mixture
from datasvc.shards import Split
from datasvc.trainer.recipes.models import build_model
from datasvc.trainer.recipes.settings.config import TrainConfig
from datasvc.trainer.recipes.settings.groups.training import AUDIO_MODEL
from datasvc.trainer.recipes.tasks.classification import Classification, order_arguments, refuse_image_settings
from datasvc.trainer.recipes.tasks.task import NO_TARGET, DataPlacement, Examples

_WINDOWS_PER_S, _HOPS_PER_S = 40, 100  # windows of 25 ms, every 10 ms


class AudioClassification(Classification):
    """Learns the class of a clip, with the loss and the metrics of `Classification`.

    Raises:
        ConfigError: the split has no labels, or a setting is for images.
    """

    unit: ClassVar[str] = "clips"
    default_model: ClassVar[str] = AUDIO_MODEL

    def __init__(self, config: TrainConfig, split: Split | Mixture) -> None:
        refuse_image_settings(config, f"{split!r} holds sounds", "channels_last")
        super().__init__(config, split)

    def open_loader(
        self, split: Split | Mixture, *, training: bool, batch_size: int, cache: Cache | None, place: DataPlacement
    ) -> Loader[Any]:
        """Return this rank's loader of a split or mixture."""
        config = self._config
        self.check_labels(split)
        return AudioLoader(
            split,
            batch_size=batch_size,
            training=training,
            cache=cache,
            seconds=config.clip_seconds,
            rate=config.sample_rate,
            features="mel",
            mel=MelConfig(
                num_mels=config.mels,
                window=max(1, config.sample_rate // _WINDOWS_PER_S),
                hop=max(1, config.sample_rate // _HOPS_PER_S),
            ),
            augment=AudioAugment(config.gain_db, time_masks=config.time_masks, freq_masks=config.freq_masks),
            **order_arguments(config, training=training),
            ranks=DataRanks(place.rank, place.world_size),
            num_threads=place.num_threads,
            prefetch=config.prefetch,
            on_bad=config.on_bad,
            ledger=config.ledger if training else None,
        )

    def build_model(self, name: str, options: Mapping[str, Any]) -> nn.Module:
        """Return the model, with one logit per class."""
        return build_model(name, self._num_classes, **options)

    def make_example(self, _block: int | None, /) -> Tensor:
        """Return the input of one clip, `float32[1, 1, mels, frames]` on the meta device."""
        frames = 1 + round(self._config.clip_seconds * _HOPS_PER_S)
        return torch.zeros(1, 1, self._config.mels, frames, device="meta")

    def unpack(self, batch: AudioBatch[Tensor], device: torch.device) -> Examples:  # type: ignore[override]
        """Return mel spectrograms `float32[n, 1, mels, frames]` and labels `int64[n]`."""
        assert batch.labels is not None
        labels = batch.labels.masked_fill(~batch.mask, NO_TARGET)
        return Examples(batch.features.to(device), labels.to(device), batch.mask.to(device))
