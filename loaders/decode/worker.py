"""Decode one image into its slot in the batch: decode, scale, change colours and normalise, all in one thread.

Each thread of `CpuBackend` has one worker.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from datasvc.errors import BadSampleError
from datasvc.loaders.augment.augment import place_region
from datasvc.loaders.decode.backend import Backend, Framework
from datasvc.loaders.decode.pixels import CropDecoder, PixelFormat, Pixels, PixelWriter, Size, copy_pixels, sides_of
from datasvc.loaders.decode.reduced import DecodeScale, decode_reduced, may_reduce
from datasvc.shards.images.exif import read_orientation, swaps_sides, turn_upright
from datasvc.shards.images.header import open_image, read_header, to_rgb

if TYPE_CHECKING:
    from datasvc.shards.format.mapped_file import Bytes


class ImageWorker:
    """Decodes images, for use in one thread.

    Args:
        pixels: format of the decoded images.
        size: side of a decoded image in pixels, unless `scale` gets another size.
        backend: "cpu": decode only the window with nvImageCodec, or with Pillow if that fails; "pillow": Pillow only.
        framework: selects the resizer, see `make_resizer`.
        decode_scale: "auto": decode large JPEGs at a reduced scale where that is faster, see `decode_reduced`.
    """

    def __init__(
        self,
        pixels: PixelFormat,
        size: int,
        *,
        backend: Backend,
        framework: Framework,
        decode_scale: DecodeScale = "full",
    ) -> None:
        self._size = size
        self._may_reduce = decode_scale == "auto"
        self._crops = CropDecoder() if backend == "cpu" else None
        self._encoded = np.empty(0, np.uint8)  # memory of `buffer`
        self._make_output = partial(_Output, pixels, framework)
        self._output = self._make_output(sides_of(size))

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
        region: Sequence[float] | None = None,
        size: Size | None = None,
        edit: Callable[[Pixels], None] | None = None,
    ) -> str | None:
        """Decode an image: `scale` and `write`; for the arguments see there.

        Returns:
            The reason why the image cannot be decoded; None after success. `out` is zeros then.
        """
        try:
            image = self.scale(blob, start, shape, box=box, region=region, size=size)
        except BadSampleError as error:
            out[...] = 0
            return str(error)
        self.write(image, out, flip=flip, edit=edit)
        return None

    def scale(
        self,
        blob: Bytes,
        start: Sequence[int],
        shape: Sequence[int],
        *,
        box: Sequence[float] | None = None,
        region: Sequence[float] | None = None,
        size: Size | None = None,
    ) -> Pixels:
        """Decode the window of an image, and scale it to `uint8[height, width, 3]`, valid until the next call.

        Args:
            blob: the encoded image.
            start: top and left of the window in the upright image, pixels.
            shape: height and width of the window, pixels.
            box: part of the window to scale, see `Windows.boxes`; None: the whole window.
            region: replaces `start`, `shape` and `box`, see `Windows.regions`; with a box, the window has a margin.
            size: size of the output; None: that of the worker.

        Raises:
            BadSampleError: the image cannot be decoded; the message has the reason.
        """
        output = self._output_of(sides_of(self._size if size is None else size))
        if region is not None:
            header = read_header(blob.data)
            start, shape, box = place_region(
                region, header.width, header.height, size=self._size, has_margin=box is not None
            )
        if size is None and self._may_reduce and may_reduce(shape[1], shape[0], self._size):
            has_windows = self._crops is not None
            reduced = decode_reduced(blob, start, shape, self._size, box=box, decodes_windows=has_windows)
            if reduced is not None:
                return reduced
        crop = None if self._crops is None else self._crops.decode(blob, start, shape)
        if crop is not None:
            return output.resize(crop) if box is None else scale_box(Image.fromarray(crop), box, output.size)
        # Pillow decodes some images that nvImageCodec cannot decode, and its error says why an image is bad.
        return decode_window(blob, start, shape, output.size, box=box, out=output.window)

    def write(
        self, image: Pixels, out: npt.NDArray[Any], *, flip: bool, edit: Callable[[Pixels], None] | None = None
    ) -> None:
        """Write a scaled image to its slot in the batch.

        Args:
            image: `uint8[height, width, 3]`.
            out: slot of the image in the batch, in the pixel format.
            flip: whether to mirror the image horizontally.
            edit: function that changes the image in place after mirroring, `uint8[height, width, 3]`.
        """
        output = self._output_of(image.shape[:2])
        if edit is not None:
            # Flip before the edit, because an edit gets the image in its final orientation.
            copy_pixels(image, output.edited, flip=flip)
            edit(output.edited)
            image, flip = output.edited, False
        output.writer.write(image, out, flip=flip)

    def _output_of(self, size: tuple[int, int]) -> _Output:
        """Return what is needed for an output of a size, height and width. Only that of the last size is kept."""
        if self._output.size != size:
            self._output = self._make_output(size)
        return self._output


class _Output:
    """The memory of images of one size, and their conversion.

    Attributes:
        size: height and width in pixels.
        resize: see `make_resizer`.
        window: memory for an image of Pillow, `uint8[height, width, 3]`.
        edited: memory for an image to edit, of the same shape.
    """

    def __init__(self, pixels: PixelFormat, framework: Framework, size: tuple[int, int]) -> None:
        self.size = size
        self.resize = make_resizer(framework, size)
        self.writer = PixelWriter(pixels, size)
        self.window, self.edited = np.empty((2, *size, 3), np.uint8)


# Windows and pixel conversions are those of the other decoders, so Pillow may replace any of them for single images.


def decode_window(
    blob: bytes | Bytes,
    start: Sequence[int] | npt.NDArray[np.int32],
    shape: Sequence[int] | npt.NDArray[np.int32],
    size: Size,
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
        size: size of the output.
        box: part of the window to scale, see `Windows.boxes`; None: the whole window.
        out: output array, `uint8[height, width, 3]`; None: a new array.

    Returns:
        `uint8[height, width, 3]`; `out` if it was given.

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
    out = np.empty((*sides_of(size), 3), np.uint8) if out is None else out
    np.copyto(out, scaled)
    return out


def scale_box(image: Image.Image, box: Sequence[float], size: Size) -> Pixels:
    """Scale a box of an image to `uint8[height, width, 3]` with Pillow's anti-aliased BILINEAR filter.

    Args:
        image: image in RGB.
        box: left, top, right and bottom in pixels, fractions allowed. The filter reads pixels around the box too.
        size: size of the output.
    """
    (left, top, right, bottom), (height, width) = box, sides_of(size)
    return np.asarray(image.resize((width, height), Image.Resampling.BILINEAR, box=(left, top, right, bottom)))


def _check_window(image_size: tuple[int, int], window: tuple[int, int, int, int]) -> None:
    """Raise BadSampleError if the window is not inside the image."""
    (width, height), (left, top, right, bottom) = image_size, window
    if not (0 <= left < right <= width and 0 <= top < bottom <= height):
        raise BadSampleError(
            f"is {width}x{height} pixels, too small for its window {left}..{right} x {top}..{bottom}"
        )


# Both filters are anti-aliased, and their results differ by at most one level of 255. Torch is six times as fast.
# Pillow is for callers without torch.


def make_resizer(framework: Framework, size: Size) -> Callable[[Pixels], Pixels]:
    """Return a function, for use in one thread, that scales `uint8[height, width, 3]` to an output of a size.

    Each result is valid until the next call. "torch" selects torch's kernel, "numpy" Pillow's, without torch.
    """
    height, width = sides_of(size)
    if framework == "torch":
        return _make_torch_resizer(height, width)
    return lambda window: np.asarray(Image.fromarray(window).resize((width, height), Image.Resampling.BILINEAR))


def _make_torch_resizer(height: int, width: int) -> Callable[[Pixels], Pixels]:
    """Return a resizer with torch's kernel for bytes, which reads channels-last pixels and starts no threads."""
    import torch

    # The operator behind `interpolate(mode="bilinear", antialias=True)`; this variant writes to existing memory.
    scale = torch.ops.aten._upsample_bilinear2d_aa.out  # noqa: SLF001 - the operator's name
    scaled = torch.empty(1, height, width, 3, dtype=torch.uint8, device="cpu")
    out, pixels = scaled.permute(0, 3, 1, 2), scaled[0].numpy()

    def resize(window: Pixels) -> Pixels:
        source = torch.from_numpy(window).permute(2, 0, 1).unsqueeze(0)
        scale(source, [height, width], False, None, None, out=out)  # no align_corners, no scale factors
        return pixels

    return resize
