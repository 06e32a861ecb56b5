"""Decode only a window of an image on the CPU, with nvImageCodec, the decoder that DALI uses.

nvImageCodec is called for each image, not for a batch as in DALI. So an image that cannot be decoded does not affect
others, and one thread decodes and scales a window while its pixels are in the cache of the processor core.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from datasvc.errors import ConfigError
from datasvc.extras import how_to_install
from datasvc.loaders.decode.pixels import Pixels

if TYPE_CHECKING:
    from datasvc.shards.format.mapped_file import Bytes

# First bytes of JPEG 2000 files. A damaged file of this format crashes nvImageCodec and the process, but not Pillow.
_JPEG_2000 = (b"\0\0\0\x0cjP", b"\xff\x4f\xff")


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
        codec = self._codec
        try:
            # Top, left, bottom, right. If the data set has a wrong width or height of 0, this raises an error too.
            region = codec.Region(start[0], start[1], start[0] + shape[0], start[1] + shape[1])
            stream = codec.CodeStream(blob).get_sub_code_stream(region=region)
            image = self._decoder.decode(stream, image=self._image, params=self._params)
        except (RuntimeError, ValueError):
            image = None
        if image is None:
            self._image = None
            return None
        self._image = image
        pixels: Pixels = np.asarray(image)
        # Return None for pixels of another shape or type too: the caller then tries Pillow.
        return pixels if pixels.shape == (*shape, 3) and pixels.dtype == np.uint8 else None
