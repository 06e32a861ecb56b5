"""Decodes a window of a large JPEG at 1/2, 1/4 or 1/8 of its size, where that takes less time.

libjpeg then transforms only the low frequencies of each block. Pillow can do it in every installation, so pixels do
not depend on optional packages. A decoder of windows at full size omits the transform outside the window, so the
smaller size saves time only where the window is a large part of the rows down to its end.

The choice depends on the file, the window, the size of the output and the backend alone. Saved states rely on it:
another rule needs another value of `DecodeScale`. Pixels also depend on the JPEG library that Pillow has.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, Literal, get_args

import numpy as np
from PIL import Image

from datasvc.errors import BadSampleError
from datasvc.loaders.augment.augment import parse_choice
from datasvc.loaders.decode.jpeg_frame import JpegFrame
from datasvc.shards.images.header import open_image, to_rgb

if TYPE_CHECKING:
    from datasvc.loaders.decode.pixels import Pixels
    from datasvc.shards.format.mapped_file import Bytes

DecodeScale = Literal["auto", "full"]

_FACTORS: Final = (8, 4, 2)
# Of the pixels in the rows above the window, counted twice, and beside it: the share that the window must exceed. In
# the rows above, a decoder of windows saves time too. Measured: 12 megapixels, 0.08 to 0.31 bytes a pixel.
_MIN_SHARE: Final = 0.25
_MAX_BLOCK_ROWS: Final = 32  # height of a JPEG's largest unit of blocks, in pixels
# Pillow warns of larger images by default. Not its setting, because the choice must be the same in each process.
_MAX_PIXELS: Final = 89_478_485


def parse_decode_scale(value: object) -> DecodeScale:
    """Return a scale of that name. Raises ConfigError: there is none."""
    scale: DecodeScale = parse_choice(value, get_args(DecodeScale), "decode_scale")
    return scale


def smallest_reduced(size: int, *, is_uneven: bool = False) -> int:
    """Return the shorter side of the smallest windows that may be decoded at a reduced scale, in pixels.

    `is_uneven`: see `JpegFrame`.
    """
    return _FACTORS[-1] * _min_density(size, is_uneven=is_uneven) * size


def _min_density(size: int, *, is_uneven: bool) -> int:
    """Return the decoded pixels per side and output pixel, at least.

    The mean difference to the full size is below one level of 255 with it, also in windows of which each pixel is
    sharp. Windows of small outputs are small, so that a part of much detail can fill one. Uneven colours have a
    smaller size than the other pixels, also at a reduced scale.
    """
    return (4 if size < 64 else 3 if size < 224 else 2) + is_uneven


def may_reduce(width: float, height: float, size: int) -> bool:
    """Return whether a window of so many pixels is large enough for a reduced scale, if its file is a JPEG."""
    return min(width, height) >= smallest_reduced(size)


def decode_reduced(
    blob: Bytes,
    start: Sequence[int],
    shape: Sequence[int],
    size: int,
    *,
    box: Sequence[float] | None = None,
    decodes_windows: bool = True,
) -> Pixels | None:
    """Decode a window of a JPEG at a reduced scale, and scale it to the output.

    Args:
        blob: the complete encoded image.
        start: top and left of the window in the upright image, pixels.
        shape: height and width of the window, pixels.
        size: side of the output in pixels.
        box: part of the window to scale, see `Windows.boxes`; None: the whole window.
        decodes_windows: whether the decoder at full size decodes only the window, so that the reduced scale can take
            longer than it.

    Returns:
        `uint8[size, size, 3]`, RGB; None if the image has to be decoded at full size: it is no JPEG in grey or YCbCr,
        is damaged, too large for Pillow or too small for the window, its window has too few pixels, or the full size
        takes less time.
    """
    frame = JpegFrame.of(blob.data)
    if frame is None:
        return None
    (y, x), (height, width) = start, shape
    in_window = (0, 0, width, height) if box is None else box
    scaled = frame.stored([x + in_window[0], y + in_window[1], x + in_window[2], y + in_window[3]])
    window = frame.stored([x, y, x + width, y + height])
    factor = _choose_factor(scaled, _min_density(size, is_uneven=frame.is_uneven) * size)
    if factor is None or not frame.holds(window):
        return None
    # A decoder has to read all scans of a progressive file, so its windows save little.
    if decodes_windows and not frame.is_progressive and not _is_faster(window, frame):
        return None
    num_rows = _rows_to_decode(frame, int(window[3]))
    if frame.width * num_rows > _MAX_PIXELS:
        return None
    try:
        with open_image(_cut(blob.data, frame, num_rows)) as image:
            image.draft(None, (image.width // factor, image.height // factor))
            # Whole pixels that contain the window: others beside it do not affect the result.
            left, top = window[0] // factor, window[1] // factor
            crop = to_rgb(image.crop((left, top, -(-window[2] // factor), -(-window[3] // factor))), "JPEG")
            _repeat_partial_edges(crop, window, frame, factor)
    except BadSampleError:
        return None  # the decoder at full size repairs the file or reports the reason
    x0, y0, x1, y1 = (side / factor for side in scaled)
    inside = (x0 - left, y0 - top, x1 - left, y1 - top)
    resized = crop.resize((size, size), Image.Resampling.BILINEAR, box=inside)
    return frame.turn_upright(np.asarray(resized))


def _choose_factor(box: Sequence[float], min_side: int) -> int | None:
    """Return the factor of the smallest decoded image with so many pixels a side; None: only the full size has."""
    side = min(box[2] - box[0], box[3] - box[1])
    return next((factor for factor in _FACTORS if side >= factor * min_side), None)


def _is_faster(window: Sequence[float], frame: JpegFrame) -> bool:
    """Return whether the reduced scale takes less time than a decoder of windows, by the stored window."""
    left, top, right, bottom = window
    return (right - left) * (bottom - top) > _MIN_SHARE * frame.width * (top + bottom)


def _repeat_partial_edges(crop: Image.Image, window: Sequence[float], frame: JpegFrame, factor: int) -> None:
    """Replace the last column and row of a crop by those before, where they reach beyond the edge of the image.

    The blocks of a JPEG continue there with what its encoder left in its memory.
    """
    width, height = crop.size
    right, bottom = (-(-side // factor) * factor for side in window[2:])
    if right > frame.width and width > 1:
        crop.paste(crop.crop((width - 2, 0, width - 1, height)), (width - 1, 0))
    if bottom > frame.height and height > 1:
        crop.paste(crop.crop((0, height - 2, width, height - 1)), (0, height - 1))


def _rows_to_decode(frame: JpegFrame, bottom: int) -> int:
    """Return the height of the part of the image that a decoder needs for the rows above `bottom`."""
    # One more row of blocks: the colours of the last pixels are interpolated with it.
    return min(frame.height, (bottom // _MAX_BLOCK_ROWS + 2) * _MAX_BLOCK_ROWS)


def _cut(raw: memoryview, frame: JpegFrame, num_rows: int) -> memoryview:
    """Return the file with a smaller height in its frame, so that a decoder ends after so many rows."""
    cut = bytearray(raw)
    struct.pack_into(">H", cut, frame.offset + 1, num_rows)
    return memoryview(cut)
