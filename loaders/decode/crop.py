"""Decodes just a window of an encoded image, on the CPU: nvImageCodec, the decoder inside of DALI, called directly.

Image by image rather than in DALI's batches, so that one that does not decode spoils nothing beside it, and so that
the thread that decoded a window goes on with it while it lies in that core's cache.
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

# How JPEG 2000 files start. Damaged ones crash the process in this decoder, and even in its parser; not in Pillow.
_JPEG_2000 = (b"\0\0\0\x0cjP", b"\xff\x4f\xff")


def is_jpeg_2000(blob: Bytes) -> bool:
    """Return whether only Pillow may decode a file: a damaged one would end the process elsewhere."""
    return blob[:8].tobytes().startswith(_JPEG_2000)


def import_codec() -> Any:
    """Return the module. Raises ConfigError where it is not installed."""
    # What does not decode is named by us, and may decode with Pillow.
    os.environ.setdefault("PYNVIMGCODEC_VERBOSITY", "0")
    try:
        from nvidia import nvimgcodec
    except ImportError as error:
        raise ConfigError(
            f"images are decoded by nvImageCodec, which cannot be imported ({error}); install "
            "nvidia-nvimgcodec-cu13, which comes with DALI, or use decode='pillow'"
        ) from error
    return nvimgcodec


class CropDecoder:
    """Decodes windows in the thread that calls; each thread has its own.

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
        self._image: Any = None  # its memory is used again

    def decode(self, blob: Bytes, start: Sequence[int], shape: Sequence[int]) -> Pixels | None:
        """Return a window of an image.

        Args:
            blob: the encoded image.
            start: top and left of the window in the upright image, pixels.
            shape: its height and width.

        Returns:
            `uint8[height, width, 3]`, RGB, valid until the next call; None where the image is not for this decoder.
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
