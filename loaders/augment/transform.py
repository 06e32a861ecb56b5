"""Users' transforms of decoded images, with reproducible random numbers: `AugmentConfig(transform=...)`.

A transform gets a random generator that depends on (seed, epoch, position) only. So it draws the same numbers after a
resume, in a batch of any size, on any rank and in any thread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from datasvc.errors import ConfigError

Image = npt.NDArray[np.uint8]
# (image `uint8[height, width, 3]`, generator) -> image of the same shape and dtype, which may be the argument itself,
# changed in place. Called from several threads in parallel, after crop, scaling, flip and colour changes.
Transform: TypeAlias = Callable[[Image, np.random.Generator], Image]


def apply_transform(transform: Transform, image: Image, generator: np.random.Generator) -> None:
    """Replace an image, `uint8[height, width, 3]`, in place by the result of a transform.

    Errors that the transform raises are passed on unchanged.

    Raises:
        ConfigError: the transform does not return an array of the image's shape and dtype.
    """
    changed = transform(image, generator)
    if changed is image:
        return
    if not isinstance(changed, np.ndarray) or (changed.shape, changed.dtype) != (image.shape, image.dtype):
        actual = (
            f"{changed.dtype}{list(changed.shape)}" if isinstance(changed, np.ndarray) else type(changed).__name__
        )
        raise ConfigError(f"transform returned {actual}; expected a NumPy array, uint8{list(image.shape)}")
    np.copyto(image, changed)
