"""The last steps of a batch on its device: colour changes, normalisation, and conversion to the output layout.

`UploadBackend` and `ColourBackend` use it.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING

from datasvc.loaders.augment.augment import ColourFactors
from datasvc.loaders.augment.device_colour import change_colours, plan_passes
from datasvc.loaders.decode.gpu.device_stream import place
from datasvc.loaders.decode.pixels import PixelFormat

if TYPE_CHECKING:
    import torch


class DeviceFinish:
    """Converts batches of pixel levels, which are from 0 to 255, to the output format.

    Args:
        pixels: output format.
        device: device of the batches, such as "cuda:1".
    """

    def __init__(self, pixels: PixelFormat, device: str | torch.device) -> None:
        import torch

        self._pixels = pixels
        self._dtype: torch.dtype = getattr(torch, pixels.output)
        self._place = partial(place, device=device)
        # Copy them once, synchronously, so that any stream may read them.
        self._scale, self._shift = (
            torch.from_numpy(values).to(device).reshape(3, 1, 1) for values in (pixels.scale, pixels.shift)
        )

    def finish(
        self, levels: torch.Tensor, colours: ColourFactors | None = None, bad: Iterable[int] = ()
    ) -> torch.Tensor:
        """Return a batch in the output format. The work is queued on the current stream.

        Args:
            levels: `uint8[n, size, size, 3]` on the device. Without colour changes and conversion, the result is a
                view of `levels`, so bad images are replaced in `levels` too.
            colours: colour factors of the images; None: colours do not change.
            bad: indices of images to replace by zeros.

        Raises:
            RuntimeError: the device failed or has no memory left; backends convert this error with `device_errors`.
        """
        import torch

        passes = [] if colours is None else plan_passes(colours)  # a pass makes one change to each image
        layout = torch.contiguous_format if self._pixels.layout == "NCHW" else torch.channels_last
        images = levels.permute(0, 3, 1, 2)  # a view with the axes NCHW
        if passes or self._pixels.output != "uint8":
            # Compute in float32, in new memory that the steps below change in place.
            images = images.to(torch.float32, memory_format=layout, copy=True)
        if passes:
            change_colours(images, passes, self._place)
        if self._pixels.output != "uint8":
            images.mul_(self._scale).add_(self._shift)
        images = images.to(self._dtype, memory_format=layout)
        for index in bad:  # a loop, because a list of indices would have to be copied to the device
            images[index].zero_()
        return images if self._pixels.layout == "NCHW" else images.permute(0, 2, 3, 1)
