"""Decodes segmentation masks to the window of their image, by the nearest pixel, and draws those of objects.

A mask holds class numbers, which no filter may mix: the indices of a palette, or the levels of one channel of 8 or 16
bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from datasvc.errors import BadSampleError
from datasvc.loaders.augment.objects import draw_masks
from datasvc.shards.images.exif import read_orientation, swaps_sides, turn_upright
from datasvc.shards.images.header import open_image

if TYPE_CHECKING:
    from datasvc.loaders.augment.objects import View
    from datasvc.loaders.decode.backend import Read
    from datasvc.shards.format.mapped_file import Bytes

_MASKS_PER_TASK = 8


@dataclass(frozen=True)
class MaskRun:
    """Masks in progress: their output `int32[n, height, width]`, and tasks whose results are index -> reason."""

    masks: npt.NDArray[np.int32]
    parts: list[Future[dict[int, str]]]

    def finish(self) -> tuple[npt.NDArray[np.int32], dict[int, str]]:
        """Wait, and return the masks, zeros for bad ones, and the bad ones: index -> reason."""
        bad: dict[int, str] = {}
        for part in self.parts:
            bad |= part.result()
        return self.masks, bad


class MaskDecoder:
    """Decodes and draws masks in threads of its own. The masks do not depend on the number of threads."""

    def __init__(self, num_threads: int) -> None:
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="datasvc-masks")

    def start(self, blobs: Sequence[Bytes], views: Sequence[View], read: Read, frame: tuple[int, int]) -> MaskRun:
        """Start to decode masks.

        Args:
            blobs: encoded masks, which stay valid until the run is finished.
            views: view of the image of each mask.
            read: function that reads the bytes of a mask, see `ImageBackend.feed`.
            frame: height and width of the output in pixels.
        """
        masks = np.zeros((len(blobs), *frame), np.int32)

        def decode(indices: range) -> dict[int, str]:
            bad = {}
            for index in indices:
                blob, (width, height) = blobs[index], views[index].shown
                try:
                    content = read(index, np.empty(len(blob), np.uint8))
                    decode_mask(content, views[index], masks[index, :height, :width])
                except BadSampleError as error:
                    bad[index] = str(error)
            return bad

        starts = range(0, len(blobs), _MASKS_PER_TASK)
        tasks = [range(start, min(start + _MASKS_PER_TASK, len(blobs))) for start in starts]
        return MaskRun(masks, [self._pool.submit(decode, task) for task in tasks])

    def draw(
        self, stored: Sequence[Any], runs: Sequence[Any], views: Sequence[View]
    ) -> list[Future[tuple[npt.NDArray[np.bool_], npt.NDArray[np.uint8]]]]:
        """Start to draw the objects of samples, see `draw_masks`; their views are those of their images."""
        samples = zip(stored, views, runs, strict=True)
        return [self._pool.submit(draw_masks, polygons, view, each) for polygons, view, each in samples]

    def close(self) -> None:
        """Drop the masks that are not begun, and wait for the threads."""
        self._pool.shutdown(wait=True, cancel_futures=True)


def decode_mask(blob: Bytes, view: View, out: npt.NDArray[np.int32]) -> None:
    """Decode a mask upright, and write the pixels nearest to those of the output to `out`, `int32[height, width]`.

    Raises:
        BadSampleError: the mask is no image, is a JPEG, has colours, or has another shape than its image. A mask of
            fewer or more pixels that shows the whole image is right.
    """
    content = blob.data
    with open_image(content) as image:
        if image.format in {"JPEG", "MPO"}:
            raise BadSampleError("is a JPEG, which changes class numbers; store masks as PNG")
        orientation = read_orientation(content, image.format or "")
        width, height = image.size[::-1] if swaps_sides(orientation) else image.size
        # Before the mask is decoded. One pixel is allowed for the rounding of a smaller mask.
        if abs(width * view.height - height * view.width) > max(view.width, view.height, width, height):
            raise BadSampleError(
                f"is {width}x{height} pixels, which does not fit its image of {view.width}x{view.height}"
            )
        levels = _levels(turn_upright(image, orientation))
    out[...] = levels[view.nearest(width, height)]


def _levels(image: Image.Image) -> npt.NDArray[Any]:
    """Return the class numbers of a mask, `[height, width]`. Raises BadSampleError: it has colours or floats."""
    if image.mode in {"L", "P", "1", "I"} or image.mode.startswith("I;16"):
        levels = np.asarray(image)
        return levels.astype(np.uint8) if image.mode == "1" else levels
    raise BadSampleError(
        f"has pixels of the mode {image.mode}; expected class numbers: a palette, or one channel of 8 or 16 bits"
    )
