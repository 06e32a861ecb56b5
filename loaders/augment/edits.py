"""Changes of decoded images after crop and flip: colours first, then the user's transform.

`ImagePlan` plans one `Edit` per batch, and the decoding backends apply it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from datasvc.keyed_random import Integers
from datasvc.loaders.augment.augment import (
    AugmentConfig,
    ColourFactors,
    Image,
    Transform,
    apply_transform,
    generators,
    plan_colours,
)
from datasvc.loaders.augment.colour import augment_colour


@dataclass(frozen=True)
class Edit:
    """Changes of the images of a batch.

    Attributes:
        positions: `int64[n]`, positions of the samples in the epoch.
        epoch: epoch of the batch.
        colours: colour factors of the images; None: colours do not change. A backend may change the colours on the
            GPU with these factors; then it does not call this edit.
        transform: the user's transform, which runs on the CPU; None if there is none.
        random: random generator of each image, for the transform; empty without a transform.
    """

    positions: Integers
    epoch: int
    colours: ColourFactors | None
    transform: Transform | None
    random: Sequence[np.random.Generator]

    def __call__(self, index: int, image: Image) -> None:
        """Change the image at `index` of the batch in place: `uint8[size, size, 3]`, upright and already flipped."""
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
) -> Edit | None:
    """Return the edit of a batch with samples at `positions`, `int64[n]`; None if nothing changes."""
    if colours is None and transform is None:
        return None
    return Edit(
        positions,
        epoch,
        colours=None if colours is None else plan_colours(positions, seed=seed, epoch=epoch, config=colours),
        transform=transform,
        random=[] if transform is None else generators(seed, epoch, positions),
    )
