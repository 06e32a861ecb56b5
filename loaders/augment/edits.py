"""What is done to decoded images beside crop and flip: colours, then a transform of the user's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from datasvc.keyed_random import Integers
from datasvc.loaders.augment.augment import AugmentConfig, ColourFactors, generators, plan_colours
from datasvc.loaders.augment.colour import augment_colour
from datasvc.loaders.augment.transform import Image, Transform, apply_transform


@dataclass(frozen=True)
class Edits:
    """An `Edit` of a batch.

    Attributes:
        positions: of the samples in the epoch, `int64[n]`.
        epoch: of the batch.
        colours: factors for each image; None leaves colours alone.
        transform: the user's; None: none.
        random: its generator for each image.
    """

    positions: Integers
    epoch: int
    colours: ColourFactors | None
    transform: Transform | None
    random: Sequence[np.random.Generator]

    def __call__(self, index: int, image: Image) -> None:
        """Change an image of the batch in place: its index there, and `uint8[size, size, 3]`."""
        if self.colours is not None:
            augment_colour(image[None], self.colours[index : index + 1])
        if self.transform is not None:
            try:
                apply_transform(self.transform, image, self.random[index])
            except Exception as error:
                error.add_note(
                    f"in the transform of the sample at position {self.positions[index]} of epoch {self.epoch}"
                )
                raise


def plan_edit(
    positions: Integers, *, seed: int, epoch: int, colours: AugmentConfig | None, transform: Transform | None
) -> Edits | None:
    """Return what is done to each image of a batch; None: nothing.

    Args:
        positions: of the samples in the epoch, `int64[n]`.
        seed: of the order.
        epoch: of the order.
        colours: how far colours go; None leaves them alone.
        transform: the user's.
    """
    if colours is None and transform is None:
        return None
    return Edits(
        positions,
        epoch,
        None if colours is None else plan_colours(positions, seed=seed, epoch=epoch, config=colours),
        transform,
        [] if transform is None else generators(seed, epoch, positions),
    )
