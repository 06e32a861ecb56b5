"""Format of the images in a batch (dtype, layout, normalisation), conversion to it, and cutting out a crop."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

import numpy as np
import numpy.typing as npt

from datasvc.errors import ConfigError
from datasvc.extras import how_to_install
from datasvc.loaders.decode.jpeg_frame import JpegFrame

if TYPE_CHECKING:
    from datasvc.shards.format.mapped_file import Bytes


Output = Literal["uint8", "float32", "float16", "bfloat16"]
Layout = Literal["NCHW", "NHWC"]
Pixels = npt.NDArray[np.uint8]
Size = int | tuple[int, int]
"""Side of a square output in pixels, or its height and width."""

IMAGENET_MEAN: Final = (0.485, 0.456, 0.406)
IMAGENET_STD: Final = (0.229, 0.224, 0.225)

# NumPy has no bfloat16, so its bits are stored as uint16.
_DTYPES: Final[dict[str, Any]] = {
    "uint8": np.uint8,
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": np.uint16,
}


# First bytes of JPEG 2000 files. A damaged file of this format crashes nvImageCodec and the process, but not Pillow.
_JPEG_2000 = (b"\0\0\0\x0cjP", b"\xff\x4f\xff")
_EXIF: Final = b"Exif\0\0"
_EXIF_REACH: Final = 64  # cameras begin their EXIF block within so many bytes; a later one only costs time


@dataclass(frozen=True)
class PixelFormat:
    """Memory format of a batch of images.

    Attributes:
        output: "uint8": levels 0..255 as decoded; "float32", "float16" and "bfloat16": normalised,
            `(level / 255 - mean) / std`.
        layout: "NCHW", or "NHWC" (channels last).
        mean: mean of each channel, in 0..1.
        std: standard deviation of each channel, in 0..1, above 0.

    Raises:
        ConfigError: a value is out of range.
    """

    output: Output = "float32"
    layout: Layout = "NCHW"
    mean: tuple[float, float, float] = IMAGENET_MEAN
    std: tuple[float, float, float] = IMAGENET_STD

    def __post_init__(self) -> None:
        for name, value, literal in (("output", self.output, Output), ("layout", self.layout, Layout)):
            if value not in get_args(literal):
                raise ConfigError(f"{name} is {value!r}; expected one of {', '.join(get_args(literal))}")
        for name, values in (("mean", self.mean), ("std", self.std)):
            if len(values) != 3 or not np.isfinite(values).all() or (name == "std" and min(values) <= 0):
                raise ConfigError(f"{name} is {values}; expected three numbers{' above 0' if name == 'std' else ''}")

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of the memory; uint16 for the bits of "bfloat16"."""
        dtype: np.dtype[Any] = np.dtype(_DTYPES[self.output])
        return dtype

    @property
    def scale(self) -> npt.NDArray[np.float32]:
        """Factor of each channel in the normalisation `level * scale + shift`, `float32[3]`."""
        return np.asarray(1 / (255 * np.array(self.std)), np.float32)

    @property
    def shift(self) -> npt.NDArray[np.float32]:
        """Offset of each channel in the normalisation `level * scale + shift`, `float32[3]`."""
        return np.asarray(-np.array(self.mean) / np.array(self.std), np.float32)

    def shape(self, count: int, size: Size) -> tuple[int, ...]:
        """Return the shape of `count` images of a size."""
        return (count, 3, *sides_of(size)) if self.layout == "NCHW" else (count, *sides_of(size), 3)


def sides_of(size: Size) -> tuple[int, int]:
    """Return height and width of an output."""
    return (size, size) if isinstance(size, int) else size


def corner_of(image: Any, size: Sequence[int], layout: Layout) -> Any:
    """Return the top left part of an image, an array or a tensor, as a view; `size` is its height and width."""
    height, width = size
    return image[:, :height, :width] if layout == "NCHW" else image[:height, :width]


class PixelWriter:
    """Converts images to a format, one at a time. It reuses its buffers, so each thread needs its own writer."""

    def __init__(self, pixels: PixelFormat, size: Size) -> None:
        height, width = sides_of(size)
        self._planar = pixels.layout == "NCHW"
        self._output = pixels.output
        self._planes = np.empty((3, height, width), np.uint8)
        self._mirrored = np.empty((height, width, 3), np.uint8)
        self._halves = np.empty((3, height, width), pixels.dtype)
        self._scale, self._shift = pixels.scale, pixels.shift
        # For channels last: one value for each element of a row of pixels.
        self._row_scale, self._row_shift = np.tile(self._scale, width), np.tile(self._shift, width)
        self._tables = _level_tables(pixels)

    def write(self, image: Pixels, out: npt.NDArray[Any], *, flip: bool) -> None:
        """Write an image, `uint8[height, width, 3]`, to `out` in the format, mirrored horizontally if `flip`.

        `out` may be a part of a larger image, whose rows have further pixels.
        """
        if self._output == "uint8":
            if self._planar:
                np.copyto(out, _to_planes(image, flip))
            else:
                copy_pixels(image, out, flip=flip)
        elif self._output == "float32":
            self._write_floats(image, out, flip)
        else:
            self._write_halves(image, out, flip)

    def _write_floats(self, image: Pixels, out: npt.NDArray[Any], flip: bool) -> None:
        """Write an image as 32-bit floats."""
        if self._planar:
            # Transpose bytes before the conversion: floats are four times as large.
            np.copyto(self._planes, _to_planes(image, flip))
            for plane, target, scale, shift in zip(self._planes, out, self._scale, self._shift, strict=True):
                np.multiply(plane, scale, out=target)
                np.add(target, shift, out=target)
            return
        if flip:
            copy_pixels(image, self._mirrored, flip=True)
            image = self._mirrored
        rows = out.reshape(len(out), -1)  # a view: the pixels of a row are adjacent
        np.multiply(image.reshape(rows.shape), self._row_scale, out=rows)
        np.add(rows, self._row_shift, out=rows)

    def _write_halves(self, image: Pixels, out: npt.NDArray[Any], flip: bool) -> None:
        """Write an image as 16-bit floats."""
        # Use a lookup table of the 256 levels: rounding float32 values in NumPy takes four times as long.
        np.copyto(self._planes, _to_planes(image, flip))
        halves = out if self._planar else self._halves
        for table, plane, target in zip(self._tables, self._planes, halves, strict=True):
            np.take(table, plane, out=target, mode="clip")  # every level is in range; mode="raise" would buffer `out`
        if not self._planar:
            np.copyto(out, halves.transpose(1, 2, 0))


def _to_planes(image: Pixels, flip: bool) -> Pixels:
    planes = image.transpose(2, 0, 1)
    return planes[:, :, ::-1] if flip else planes


def copy_pixels(image: Pixels, out: Pixels, *, flip: bool) -> None:
    """Copy an image, `uint8[height, width, 3]`, to `out`, mirrored horizontally if `flip`."""
    if not flip:
        np.copyto(out, image)
        return
    for channel in range(3):  # five times as fast as one copy: its inner loop would have only three iterations
        np.copyto(out[:, :, channel], image[:, ::-1, channel])


def _level_tables(pixels: PixelFormat) -> npt.NDArray[Any]:
    """Return the normalised value of each channel and level, `dtype[3, 256]`."""
    levels = np.arange(256, dtype=np.float32)
    values = levels * pixels.scale[:, None] + pixels.shift[:, None]
    if pixels.output == "bfloat16":
        return _to_bfloat16_bits(values)
    return values.astype(pixels.dtype)


def _to_bfloat16_bits(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Return the bits of the nearest bfloat16 (ties to even). They are the upper half of a rounded float32."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


# nvImageCodec is called for each image, not for a batch as in DALI. So an image that cannot be decoded does not
# affect others, and one thread decodes and scales a window while its pixels are in the cache of the processor core.


def is_jpeg_2000(blob: Bytes) -> bool:
    """Return whether a file is JPEG 2000, which only Pillow may decode."""
    return blob[:8].tobytes().startswith(_JPEG_2000)


def import_codec() -> Any:
    """Return the module nvimgcodec. Raises ConfigError: it is not installed."""
    # Turn its log messages off: Pillow may decode an image that nvImageCodec refuses, and the loader reports the
    # images that neither decodes.
    os.environ.setdefault("PYNVIMGCODEC_VERBOSITY", "0")
    try:
        with _without_hints_about_gpus():
            from nvidia import nvimgcodec
    except ImportError as error:
        raise ConfigError(
            f"decode='cpu' needs nvImageCodec, which cannot be imported ({error}): {how_to_install('images')}; "
            "or use decode='pillow'"
        ) from error
    return nvimgcodec


# nvImageCodec writes these to standard error at its import, whatever its verbosity, if the libraries that DALI brings
# are not installed. Decoding on the CPU needs none of them.
_GPU_HINTS = (b"Failed to load nv", b"Note: If using nvImageCodec's Python distribution")


@contextmanager
def _without_hints_about_gpus() -> Iterator[None]:
    """Drop nvImageCodec's hints about libraries for GPUs from file descriptor 2; pass everything else on."""
    try:
        stderr = None if "nvidia.nvimgcodec" in sys.modules else os.dup(2)
    except OSError:  # the process has closed it
        stderr = None
    if stderr is None:
        yield
        return
    with tempfile.TemporaryFile() as held:
        os.dup2(held.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(stderr, 2)
            held.seek(0)
            # Other threads may have written in the meantime, and an import that fails says why.
            for line in held:
                if not line.startswith(_GPU_HINTS):
                    os.write(stderr, line)
            os.close(stderr)


class CropDecoder:
    """Decodes windows of images, for use in one thread. Raises ConfigError: nvImageCodec is not installed."""

    def __init__(self) -> None:
        self._codec = codec = import_codec()
        self._decoder = codec.Decoder(
            device_id=codec.NVIMGCODEC_DEVICE_CPU_ONLY,
            max_num_cpu_threads=1,
            backends=[codec.Backend(codec.CPU_ONLY)],
        )
        self._params = codec.DecodeParams(apply_exif_orientation=True, color_spec=codec.SRGB)
        self._stored_params = codec.DecodeParams(apply_exif_orientation=False, color_spec=codec.SRGB)
        self._image: Any = None  # last decoded image; the next one reuses its memory

    def decode(self, blob: Bytes, start: Sequence[int], shape: Sequence[int]) -> Pixels | None:
        """Decode a window of an image.

        Args:
            blob: the encoded image.
            start: top and left of the window in the upright image, pixels.
            shape: height and width of the window, pixels.

        Returns:
            `uint8[height, width, 3]`, RGB, valid until the next call; None if this decoder cannot decode the image.
        """
        if is_jpeg_2000(blob):
            return None
        window = [start[1], start[0], start[1] + shape[1], start[0] + shape[0]]
        # nvImageCodec would decode all of a photo with an orientation and turn it: up to fifteen times as long.
        frame = JpegFrame.of(blob.data) if _EXIF in blob[:_EXIF_REACH].tobytes() else None
        if frame is not None and frame.orientation != 1:
            pixels = self._decode_window(blob, frame.stored(window), self._stored_params)
            pixels = None if pixels is None else frame.turn_upright(pixels)
        else:
            pixels = self._decode_window(blob, window, self._params)
        # Return None for pixels of another shape or type too: the caller then tries Pillow.
        return pixels if pixels is not None and pixels.shape[:2] == tuple(shape) else None

    def _decode_window(self, blob: Bytes, window: Sequence[float], params: Any) -> Pixels | None:
        left, top, right, bottom = map(int, window)
        codec = self._codec
        try:
            # If the data set has a wrong width or height of 0, this raises an error too.
            stream = codec.CodeStream(blob).get_sub_code_stream(region=codec.Region(top, left, bottom, right))
            image = self._decoder.decode(stream, image=self._image, params=params)
        except (RuntimeError, ValueError):
            image = None
        if image is None:
            self._image = None
            return None
        self._image = image
        pixels: Pixels = np.asarray(image)
        return pixels if pixels.ndim == 3 and pixels.shape[2] == 3 and pixels.dtype == np.uint8 else None
