"""The user's own changes of decoded images: any callable, exact over resumes because its random numbers are.

A transform is given its random numbers: a generator that depends on (seed, epoch, position) alone. What it draws
there is drawn again when the run resumes there, in a batch of any size, on any rank and thread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from datasvc.errors import ConfigError

Image = npt.NDArray[np.uint8]
# (image `uint8[height, width, 3]`, its generator) -> image of the same shape; it may be changed in place. Called from
# several threads at once, after the window was cut, scaled and flipped and the colours were changed.
Transform: TypeAlias = Callable[[Image, np.random.Generator], Image]


def apply_transform(transform: Transform, image: Image, generator: np.random.Generator) -> None:
    """Replace an image by what the transform makes of it.

    Args:
        transform: the user's.
        image: `uint8[height, width, 3]`, changed in place.
        generator: of the image's position, from `datasvc.loaders.augment.augment.generators`.

    Raises:
        ConfigError: the transform returns no image of the same shape and type. What it raises itself comes through.
    """
    changed = transform(image, generator)
    if changed is image:
        return
    if not isinstance(changed, np.ndarray) or (changed.shape, changed.dtype) != (image.shape, image.dtype):
        found = f"{changed.dtype}{list(changed.shape)}" if isinstance(changed, np.ndarray) else type(changed).__name__
        raise ConfigError(f"transform returned {found}; expected uint8{list(image.shape)}, a NumPy array")
    np.copyto(image, changed)
