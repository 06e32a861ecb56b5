"""Decode one image into its slot in the batch: decode, scale, change colours and normalise, all in one thread.

Each thread of `CpuBackend` has one worker.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from datasvc.errors import BadSampleError
from datasvc.loaders.decode.backend import Backend, Framework
from datasvc.loaders.decode.crop import CropDecoder
from datasvc.loaders.decode.pillow_decoder import decode_window, make_resizer, scale_box
from datasvc.loaders.decode.pixels import PixelFormat, Pixels, PixelWriter, copy_pixels

if TYPE_CHECKING:
    from datasvc.shards.format.mapped_file import Bytes


class ImageWorker:
    """Decodes images, for use in one thread.

    Args:
        pixels: format of the decoded images.
        size: side of a decoded image in pixels.
        backend: "cpu": decode only the window with nvImageCodec, or with Pillow if that fails; "pillow": Pillow only.
        framework: selects the resizer, see `make_resizer`.
    """

    def __init__(self, pixels: PixelFormat, size: int, *, backend: Backend, framework: Framework) -> None:
        self._size = size
        self._crops = CropDecoder() if backend == "cpu" else None
        self._resize = make_resizer(framework, size)
        self._writer = PixelWriter(pixels, size)
        self._encoded = np.empty(0, np.uint8)  # memory of `buffer`
        self._window, self._edited = np.empty((2, size, size, 3), np.uint8)  # images of Pillow, and images to edit

    def buffer(self, size: int) -> Bytes:
        """Return a buffer for an encoded image, `uint8[size]`, valid until the next call."""
        if size > len(self._encoded):
            self._encoded = np.empty(max(size, 2 * len(self._encoded)), np.uint8)
        return self._encoded[:size]

    def decode(
        self,
        blob: Bytes,
        start: Sequence[int],
        shape: Sequence[int],
        out: npt.NDArray[Any],
        *,
        flip: bool,
        box: Sequence[float] | None = None,
        edit: Callable[[Pixels], None] | None = None,
    ) -> str | None:
        """Decode an image.

        Args:
            blob: the encoded image.
            start: top and left of the window in the upright image, pixels.
            shape: height and width of the window, pixels.
            out: slot of the image in the batch, in the pixel format; zeros if the image cannot be decoded.
            flip: whether to mirror the image horizontally.
            box: part of the window to scale, see `Windows.boxes`; None: the whole window.
            edit: function that changes the image in place after scaling and mirroring, `uint8[size, size, 3]`.

        Returns:
            The reason why the image cannot be decoded; None after success.
        """
        crop = None if self._crops is None else self._crops.decode(blob, start, shape)
        if crop is not None:
            image = self._resize(crop) if box is None else scale_box(Image.fromarray(crop), box, self._size)
        else:
            # Pillow decodes some images that nvImageCodec cannot decode, and its error says why an image is bad.
            try:
                image = decode_window(blob, start, shape, self._size, box=box, out=self._window)
            except BadSampleError as error:
                out[...] = 0
                return str(error)
        if edit is not None:
            # Flip before the edit, because an edit gets the image in its final orientation.
            copy_pixels(image, self._edited, flip=flip)
            edit(self._edited)
            image, flip = self._edited, False
        self._writer.write(image, out, flip=flip)
        return None
