"""Windows of images decoded by Pillow: where DALI is not installed, and for what its decoder does not read.

The windows are those of the DALI path, and so is what becomes of every kind of pixel, so that a sample may go either
way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from PIL import Image

from datasvc.errors import BadSampleError
from datasvc.shards.images.exif import read_orientation, swaps_sides, turn_upright
from datasvc.shards.images.header import open_image

if TYPE_CHECKING:
    from datasvc.shards.format.mapped_file import Bytes

Pixels = npt.NDArray[np.uint8]


def decode_window(
    blob: bytes | Bytes,
    start: Sequence[int] | npt.NDArray[np.int32],
    shape: Sequence[int] | npt.NDArray[np.int32],
    flip: bool,
    size: int,
    *,
    image_size: tuple[int, int] | None = None,
    out: Pixels | None = None,
) -> Pixels:
    """Decode an image, upright, cut a window out of it, and scale that with Pillow's anti-aliased BILINEAR.

    Pixels outside the window count for nothing, as where only the window is decoded; a `resize(box=window)` of the
    whole image would let them into the outermost pixels. All become 8-bit RGB: grey is repeated, CMYK and YCCK are
    converted without a colour profile, 16 bits are rounded to 8, floats count from 0 to 1, a palette is looked up, an
    alpha channel is dropped and the colours below it shown. Of an animation it is the first frame.

    Args:
        blob: the encoded image, whole.
        start: top and left of the window in the upright image, pixels.
        shape: its height and width.
        flip: mirror it, left and right.
        size: side of the output in pixels.
        image_size: width and height that the upright image must have; None: any.
        out: `uint8[size, size, 3]` that takes the result; None makes a new array.

    Returns:
        `uint8[size, size, 3]`, `out` where it was given.

    Raises:
        BadSampleError: no image, truncated, absurdly large, of 32-bit pixels, of another size than `image_size`, or
            too small for the window; says which.
    """
    content = blob.data if isinstance(blob, np.ndarray) else blob
    (top, left), (height, width) = map(int, start), map(int, shape)
    with open_image(content) as image:
        kind = image.format or ""
        orientation = read_orientation(content, kind)
        found = image.size[::-1] if swaps_sides(orientation) else image.size
        box = (left, top, left + width, top + height)
        _check_sizes(found, image_size, box)
        window = to_rgb(turn_upright(image, orientation).crop(box), kind)
        scaled = np.asarray(window.resize((size, size), Image.Resampling.BILINEAR))
    out = np.empty((size, size, 3), np.uint8) if out is None else out
    np.copyto(out, scaled[:, ::-1] if flip else scaled)
    return out


def to_rgb(image: Image.Image, kind: str) -> Image.Image:
    """Return a decoded image as 8-bit RGB, see `decode_window`; the same object if it is.

    Args:
        image: of any mode.
        kind: format of the file that it comes from, in Pillow's words.

    Raises:
        BadSampleError: it has 32-bit integers for pixels.
    """
    if image.mode == "RGB":
        return image
    if image.mode.startswith("I;16") or (image.mode == "I" and kind != "TIFF"):
        # Pillow itself clips 16 bits at 255. 65535 is odd, so no value lies half way.
        levels = (np.asarray(image).astype(np.uint32) * 255 + 32767) // 65535
        return Image.fromarray(levels.astype(np.uint8)).convert("RGB")
    if image.mode == "F":
        levels = np.rint(np.clip(np.nan_to_num(np.asarray(image)), 0, 1) * 255)
        return Image.fromarray(levels.astype(np.uint8)).convert("RGB")
    if image.mode == "I":
        raise BadSampleError("has 32-bit integer pixels, whose range nobody knows; store it with 8 or 16 bits")
    if image.mode == "P" and isinstance(image.info.get("transparency"), bytes):
        image = image.convert("RGBA")  # else Pillow warns that the alpha channel is lost, as it is to be
    return image.convert("RGB")


def _check_sizes(found: tuple[int, int], expected: tuple[int, int] | None, box: tuple[int, int, int, int]) -> None:
    """Refuse, before anything is decoded, what is not the image that the window was drawn for."""
    width, height = found
    if expected is not None and found != tuple(expected):
        raise BadSampleError(
            f"is {width}x{height} pixels, {expected[0]}x{expected[1]} by its columns: one of them is wrong"
        )
    left, top, right, bottom = box
    if not (0 <= left < right <= width and 0 <= top < bottom <= height):
        raise BadSampleError(
            f"is {width}x{height} pixels, too small for its window {left}..{right} x {top}..{bottom}"
        )
