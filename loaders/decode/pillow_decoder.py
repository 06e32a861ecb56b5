"""Decode windows of images with Pillow, where nvImageCodec is not installed or cannot decode an image.

Windows and pixel conversions are those of the other decoders, so Pillow may replace any of them for single images.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from PIL import Image

from datasvc.errors import BadSampleError
from datasvc.loaders.decode.backend import Framework
from datasvc.loaders.decode.pixels import Pixels
from datasvc.shards.images.exif import read_orientation, swaps_sides, turn_upright
from datasvc.shards.images.header import open_image, to_rgb

if TYPE_CHECKING:
    from datasvc.shards.format.mapped_file import Bytes


def decode_window(
    blob: bytes | Bytes,
    start: Sequence[int] | npt.NDArray[np.int32],
    shape: Sequence[int] | npt.NDArray[np.int32],
    size: int,
    *,
    box: Sequence[float] | None = None,
    out: Pixels | None = None,
) -> Pixels:
    """Decode an image upright, crop a window, and scale the window, or a box in it, by `scale_box`.

    Pixels outside the window do not affect the result, as in decoders that decode only the window. So the window is
    cropped before it is scaled. Every image becomes 8-bit RGB: grey values are repeated, palettes are resolved, and
    an alpha channel is dropped. CMYK and YCCK are converted without a colour profile. 16-bit values are rounded to 8
    bits. Floats 0..1 become 0..255. Of an animation, the first frame is used.

    Args:
        blob: the complete encoded image.
        start: top and left of the window in the upright image, pixels.
        shape: height and width of the window, pixels.
        size: side of the output in pixels.
        box: part of the window to scale, see `Windows.boxes`; None: the whole window.
        out: output array, `uint8[size, size, 3]`; None: a new array.

    Returns:
        `uint8[size, size, 3]`; `out` if it was given.

    Raises:
        BadSampleError: the blob is not an image, is truncated or too large, has 32-bit pixels, or is too small for
            the window; the message has the reason.
    """
    content = blob.data if isinstance(blob, np.ndarray) else blob
    (top, left), (height, width) = map(int, start), map(int, shape)
    scaled_box = (0, 0, width, height) if box is None else box
    with open_image(content) as image:
        kind = image.format or ""
        orientation = read_orientation(content, kind)
        upright_size = image.size[::-1] if swaps_sides(orientation) else image.size
        window = (left, top, left + width, top + height)
        _check_window(upright_size, window)  # before the image is decoded
        scaled = scale_box(to_rgb(turn_upright(image, orientation).crop(window), kind), scaled_box, size)
    out = np.empty((size, size, 3), np.uint8) if out is None else out
    np.copyto(out, scaled)
    return out


def scale_box(image: Image.Image, box: Sequence[float], size: int) -> Pixels:
    """Scale a box of an image to `uint8[size, size, 3]` with Pillow's anti-aliased BILINEAR filter.

    Args:
        image: image in RGB.
        box: left, top, right and bottom in pixels, fractions allowed. The filter reads pixels around the box too.
        size: side of the output in pixels.
    """
    left, top, right, bottom = box
    return np.asarray(image.resize((size, size), Image.Resampling.BILINEAR, box=(left, top, right, bottom)))


def _check_window(image_size: tuple[int, int], window: tuple[int, int, int, int]) -> None:
    """Raise BadSampleError if the window is not inside the image."""
    (width, height), (left, top, right, bottom) = image_size, window
    if not (0 <= left < right <= width and 0 <= top < bottom <= height):
        raise BadSampleError(
            f"is {width}x{height} pixels, too small for its window {left}..{right} x {top}..{bottom}"
        )


# Both filters are anti-aliased, and their results differ by at most one level of 255. Torch is six times as fast.
# Pillow is for callers without torch.


def make_resizer(framework: Framework, size: int) -> Callable[[Pixels], Pixels]:
    """Return a function, for use in one thread, that scales `uint8[height, width, 3]` to `uint8[size, size, 3]`.

    Each result is valid until the next call. "torch" selects torch's kernel, "numpy" Pillow's, without torch.
    """
    if framework == "torch":
        return _make_torch_resizer(size)
    return lambda window: np.asarray(Image.fromarray(window).resize((size, size), Image.Resampling.BILINEAR))


def _make_torch_resizer(size: int) -> Callable[[Pixels], Pixels]:
    """Return a resizer with torch's kernel for bytes, which reads channels-last pixels and starts no threads."""
    import torch

    # The operator behind `interpolate(mode="bilinear", antialias=True)`; this variant writes to existing memory.
    scale = torch.ops.aten._upsample_bilinear2d_aa.out  # noqa: SLF001 - the operator's name
    scaled = torch.empty(1, size, size, 3, dtype=torch.uint8, device="cpu")
    out, pixels = scaled.permute(0, 3, 1, 2), scaled[0].numpy()

    def resize(window: Pixels) -> Pixels:
        source = torch.from_numpy(window).permute(2, 0, 1).unsqueeze(0)
        scale(source, [size, size], False, None, None, out=out)  # no align_corners, no scale factors
        return pixels

    return resize
