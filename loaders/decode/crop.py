"""Decoding of only a window of an image on the CPU, with nvImageCodec, the decoder inside of DALI.

It is called per image instead of through DALI's batches, so that an image that does not decode does not affect
others, and so that one thread decodes and scales a window while it is in the core's cache.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from datasvc.errors import ConfigError
from datasvc.loaders.decode.pixels import Pixels

if TYPE_CHECKING:
    from datasvc.shards.format.mapped_file import Bytes

# First bytes of JPEG 2000 files. Damaged ones crash the process in this decoder and in its parser, but not in Pillow.
_JPEG_2000 = (b"\0\0\0\x0cjP", b"\xff\x4f\xff")


def is_jpeg_2000(blob: Bytes) -> bool:
    """Return whether a file is JPEG 2000, which only Pillow may decode."""
    return blob[:8].tobytes().startswith(_JPEG_2000)


def import_codec() -> Any:
    """Return the module nvimgcodec. Raises ConfigError: it is not installed."""
    # Its own messages are silenced: images that it refuses may decode with Pillow, and others are reported by name.
    os.environ.setdefault("PYNVIMGCODEC_VERBOSITY", "0")
    try:
        from nvidia import nvimgcodec
    except ImportError as error:
        raise ConfigError(
            f"decode='cpu' needs nvImageCodec, which cannot be imported ({error}); install "
            "nvidia-nvimgcodec-cu13, which comes with DALI, or use decode='pillow'"
        ) from error
    return nvimgcodec


class CropDecoder:
    """Decoder of windows, for use in one thread.

    Raises:
        ConfigError: nvImageCodec is not installed.
    """

    def __init__(self) -> None:
        self._codec = codec = import_codec()
        self._decoder = codec.Decoder(
            device_id=codec.NVIMGCODEC_DEVICE_CPU_ONLY,
            max_num_cpu_threads=1,
            backends=[codec.Backend(codec.CPU_ONLY)],
        )
        self._params = codec.DecodeParams(apply_exif_orientation=True, color_spec=codec.SRGB)
        self._image: Any = None  # the last image, whose memory is reused

    def decode(self, blob: Bytes, start: Sequence[int], shape: Sequence[int]) -> Pixels | None:
        """Return a window of an image.

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
        region = codec.Region(start[0], start[1], start[0] + shape[0], start[1] + shape[1])
        try:
            stream = codec.CodeStream(blob).get_sub_code_stream(region=region)
            image = self._decoder.decode(stream, image=self._image, params=self._params)
        except (RuntimeError, ValueError):
            image = None
        if image is None:
            self._image = None
            return None
        self._image = image
        pixels: Pixels = np.asarray(image)
        return pixels if pixels.shape == (*shape, 3) and pixels.dtype == np.uint8 else None
