"""The frame of a JPEG as it is stored, and where windows of the upright image lie in it.

Phones store photos as the sensor reads them, with an EXIF orientation. Decoders that turn a photo themselves decode
all of it first, so windows are cut from the stored photo here, and turned afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from datasvc.shards.images.exif import read_orientation, swaps_sides
from datasvc.shards.images.jpeg_segments import FRAME, PLAIN_FRAMES, PROGRESSIVE, jpeg_segments

_MIRRORED_COLUMNS: Final = {2, 3, 7, 8}  # orientations
_MIRRORED_ROWS: Final = {3, 4, 6, 7}
_ROWS_AT_ONCE: Final = 64  # of a transposition: their columns stay in the processor's cache


@dataclass(frozen=True)
class JpegFrame:
    """The frame of a JPEG of 8 bits in grey or YCbCr.

    Attributes:
        offset: of its content in the file.
        width: of the stored image in pixels.
        height: of the stored image in pixels.
        is_progressive: whether the pixels are in several scans.
        is_uneven: whether colours are stored at a smaller size in one direction than in the other, as in 4:2:2.
        orientation: EXIF orientation, 1 to 8.
    """

    offset: int
    width: int
    height: int
    is_progressive: bool
    is_uneven: bool
    orientation: int

    @classmethod
    def of(cls, raw: memoryview) -> JpegFrame | None:
        """Return the frame of an encoded image; None for any other file than such a JPEG."""
        if bytes(raw[:2]) != b"\xff\xd8":
            return None
        for marker, offset, stop in jpeg_segments(raw):
            if marker in PLAIN_FRAMES and offset + FRAME.size <= stop <= len(raw):
                bits, height, width, components = FRAME.unpack_from(raw, offset)
                if bits != 8 or components not in {1, 3}:
                    return None
                # Three bytes for each component: its id, its sampling factors (4 bits each) and a table.
                sampling = [divmod(pair, 16) for pair in raw[offset + FRAME.size + 1 :][: 3 * components : 3]]
                is_uneven = any(across * sampling[0][1] != down * sampling[0][0] for across, down in sampling)
                return cls(offset, width, height, marker == PROGRESSIVE, is_uneven, read_orientation(raw, "JPEG"))
        return None

    def holds(self, window: Sequence[float]) -> bool:
        """Return whether a window, as `stored` returns it, has pixels and lies inside the image."""
        left, top, right, bottom = window
        return 0 <= left < right <= self.width and 0 <= top < bottom <= self.height

    def stored(self, box: Sequence[float]) -> list[float]:
        """Return a box of the upright image, left, top, right and bottom, in the stored image."""
        left, top, right, bottom = box
        is_swapped = swaps_sides(self.orientation)
        columns, rows = ((top, bottom), (left, right)) if is_swapped else ((left, right), (top, bottom))
        if self.orientation in _MIRRORED_COLUMNS:
            columns = (self.width - columns[1], self.width - columns[0])
        if self.orientation in _MIRRORED_ROWS:
            rows = (self.height - rows[1], self.height - rows[0])
        return [columns[0], rows[0], columns[1], rows[1]]

    def turn_upright(self, pixels: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        """Return a copy of a part of the stored image, `uint8[height, width, 3]`, turned upright."""
        rows = slice(None, None, -1 if self.orientation in _MIRRORED_ROWS else 1)
        columns = slice(None, None, -1 if self.orientation in _MIRRORED_COLUMNS else 1)
        turned = pixels[rows, columns]
        if swaps_sides(self.orientation):
            turned = turned.transpose(1, 0, 2)
        upright = np.empty(turned.shape, np.uint8)
        for first in range(0, len(upright), _ROWS_AT_ONCE):
            for channel in range(3):  # twice as fast as one copy, see `copy_pixels`
                part = (slice(first, first + _ROWS_AT_ONCE), slice(None), channel)
                upright[part] = turned[part]
        return upright
