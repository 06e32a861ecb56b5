"""Plans the crop and the edits of each image before it is decoded, for `ImageDecoder`.

An edit changes colours or runs the user's transform. A plan depends only on the image's size, the settings, and the
sample's epoch and position.
"""

from __future__ import annotations

from dataclasses import dataclass

from datasvc.errors import ConfigError
from datasvc.loaders.augment.augment import (
    AugmentConfig,
    Evaluation,
    Windows,
    plan_centre_boxes,
    plan_centre_windows,
    plan_random_windows,
)
from datasvc.loaders.augment.edits import Edit, plan_edit
from datasvc.loaders.core.batches import SampleBatch
from datasvc.shards.format.schema import HEIGHT, WIDTH

_RESIZE_RATIO = 256 / 224  # of the shorter side before the centre crop to the crop's side, as usual for ImageNet


@dataclass(frozen=True)
class ImagePlan:
    """Plans the windows (crops) and edits of batches by the settings of a loader.

    Attributes:
        training: True: random windows, flips and colours; False: centre crops.
        size: side of the output in pixels.
        seed: seed of order and augmentation.
        augment: windows, colours and transform of the images.

    Raises:
        ConfigError: `augment.resize` is smaller than `size`.
    """

    training: bool
    size: int
    seed: int
    augment: AugmentConfig

    def __post_init__(self) -> None:
        if self.shorter_side < self.size:
            raise ConfigError(
                f"resize is {self.augment.resize}, below size {self.size}, so the crop does not fit; give a larger "
                "resize in the AugmentConfig"
            )

    @property
    def shorter_side(self) -> int:
        """Evaluation only: length of an image's shorter side before the centre crop, in pixels."""
        return round(self.size * _RESIZE_RATIO) if self.augment.resize is None else self.augment.resize

    @property
    def evaluation(self) -> Evaluation | None:
        """How evaluation scales and crops; None in training."""
        return None if self.training else self.augment.evaluation

    @property
    def has_boxes(self) -> bool:
        """Whether only a box of each window is scaled, see `Windows.boxes`."""
        return self.evaluation == "torchvision"

    @property
    def changes_colours(self) -> bool:
        """Whether edits change colours, which only training does."""
        return self._colours is not None

    def windows(self, batch: SampleBatch) -> Windows:
        """Return the window of each image of a batch."""
        widths, heights = batch.columns[WIDTH], batch.columns[HEIGHT]
        if self.training:
            return plan_random_windows(
                widths, heights, batch.positions, seed=self.seed, epoch=batch.epoch, config=self.augment
            )
        plan = plan_centre_boxes if self.has_boxes else plan_centre_windows
        return plan(widths, heights, size=self.size, resize=self.shorter_side)

    def edit(self, batch: SampleBatch) -> Edit | None:
        """Return the changes of a batch's images after crop and flip; None if there are none."""
        transform = self.augment.transform
        return plan_edit(
            batch.positions, seed=self.seed, epoch=batch.epoch, colours=self._colours, transform=transform
        )

    @property
    def _colours(self) -> AugmentConfig | None:
        return self.augment if self.training and self.augment.changes_colours else None
