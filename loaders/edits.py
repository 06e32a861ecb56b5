"""What is done to decoded images beside crop and flip: colours, then a transform of the user's."""

from __future__ import annotations

from datasvc.keyed import Integers
from loaders.augment import AugmentConfig, generators, plan_colours
from loaders.colour import augment_colour
from loaders.decode.backend import Edit
from loaders.decode.pixels import Pixels
from loaders.transform import Transform, apply_transform


def plan_edit(
    positions: Integers, *, seed: int, epoch: int, colours: AugmentConfig | None, transform: Transform | None
) -> Edit | None:
    """Return what is done to each image of a batch, given its index there; None: nothing.

    Args:
        positions: of the samples in the epoch, `int64[n]`.
        seed: of the order.
        epoch: of the order.
        colours: how far colours go; None leaves them alone.
        transform: the user's.
    """
    if colours is None and transform is None:
        return None
    factors = None if colours is None else plan_colours(positions, seed=seed, epoch=epoch, config=colours)
    random = [] if transform is None else generators(seed, epoch, positions)

    def edit(index: int, image: Pixels) -> None:
        if factors is not None:
            augment_colour(image[None], factors[index : index + 1])
        if transform is not None:
            try:
                apply_transform(transform, image, random[index])
            except Exception as error:
                error.add_note(f"in the transform of the sample at position {positions[index]} of epoch {epoch}")
                raise

    return edit
