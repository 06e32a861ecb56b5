"""What is to become of each image of a batch: planned from its size and position, before anything is decoded."""

from __future__ import annotations

from dataclasses import dataclass

from datasvc.errors import ConfigError
from datasvc.loaders.augment.augment import AugmentConfig, Windows, plan_centre_windows, plan_random_windows
from datasvc.loaders.augment.edits import plan_edit
from datasvc.loaders.augment.transform import Transform
from datasvc.loaders.core.batches import SampleBatch
from datasvc.loaders.decode.backend import Edit
from datasvc.shards.format.schema import HEIGHT, WIDTH

# Shorter side before the centre crop, as a share of the crop: 256 for 224.
_RESIZE_SHARE = 256 / 224


@dataclass(frozen=True)
class ImagePlan:
    """How images are cropped and changed.

    Attributes:
        training: random windows, flips and colours; otherwise the centre.
        size: side of the output in pixels.
        resize: evaluation: shorter side before the centre crop; None is `size` * 256 / 224.
        seed: of order and augmentation.
        augment: training: how windows and colours are drawn.
        transform: the user's; None: none.

    Raises:
        ConfigError: the crop would not fit.
    """

    training: bool
    size: int
    resize: int | None
    seed: int
    augment: AugmentConfig
    transform: Transform | None

    def __post_init__(self) -> None:
        if self.shorter_side < self.size:
            raise ConfigError(f"resize is {self.resize}, below size {self.size}: the crop would not fit")

    @property
    def shorter_side(self) -> int:
        """Evaluation: what an image's shorter side is scaled to before the crop, pixels."""
        return round(self.size * _RESIZE_SHARE) if self.resize is None else self.resize

    @property
    def changes_colours(self) -> bool:
        """Whether colours are changed."""
        return self._colours is not None

    def windows(self, batch: SampleBatch) -> Windows:
        """Return the window of each image of a batch."""
        widths, heights = batch.columns[WIDTH], batch.columns[HEIGHT]
        if self.training:
            return plan_random_windows(
                widths, heights, batch.positions, seed=self.seed, epoch=batch.epoch, config=self.augment
            )
        return plan_centre_windows(widths, heights, size=self.size, resize=self.shorter_side)

    def edit(self, batch: SampleBatch) -> Edit | None:
        """Return what else is done to each image of a batch; None: nothing."""
        return plan_edit(
            batch.positions, seed=self.seed, epoch=batch.epoch, colours=self._colours, transform=self.transform
        )

    @property
    def _colours(self) -> AugmentConfig | None:
        return self.augment if self.training and self.augment.changes_colours else None
