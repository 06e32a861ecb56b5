"""Scale windows with the anti-aliased bilinear filter of Pillow or of torch, which is six times as fast.

Their results differ by at most one level of 255.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from PIL import Image

from datasvc.loaders.decode.backend import Framework
from datasvc.loaders.decode.pixels import Pixels


class Resizer(Protocol):
    """Scales windows, for use in one thread."""

    def resize(self, window: Pixels) -> Pixels:
        """Return `uint8[height, width, 3]` scaled to `uint8[size, size, 3]`, valid until the next call."""


class TorchResizer:
    """A `Resizer` with torch's anti-aliased kernel for bytes, which reads channels-last pixels and starts no threads.

    Args:
        size: side of the output in pixels.
    """

    def __init__(self, size: int) -> None:
        import torch

        self._size = [size, size]
        self._scaled = torch.empty(1, size, size, 3, dtype=torch.uint8)
        self._out = self._scaled.permute(0, 3, 1, 2)
        self._from_numpy = torch.from_numpy
        # The operator behind `interpolate(mode="bilinear", antialias=True)`; this form writes to existing memory.
        self._scale = torch.ops.aten._upsample_bilinear2d_aa.out  # noqa: SLF001 - the operator's name

    def resize(self, window: Pixels) -> Pixels:
        """See `Resizer`."""
        source = self._from_numpy(window).permute(2, 0, 1).unsqueeze(0)
        self._scale(source, self._size, False, None, None, out=self._out)
        scaled: Pixels = self._scaled[0].numpy()
        return scaled


class PillowResizer:
    """A `Resizer` with Pillow, which does not import torch.

    Args:
        size: side of the output in pixels.
    """

    def __init__(self, size: int) -> None:
        self._size = (size, size)

    def resize(self, window: Pixels) -> Pixels:
        """See `Resizer`."""
        return np.asarray(Image.fromarray(window).resize(self._size, Image.Resampling.BILINEAR))


def make_resizer(framework: Framework, size: int) -> Resizer:
    """Return torch's resizer for "torch"; for "numpy", Pillow's, which does not import torch."""
    return TorchResizer(size) if framework == "torch" else PillowResizer(size)
