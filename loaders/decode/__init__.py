"""From encoded images and windows to a batch of pixels: in threads of the CPU, or with DALI on a GPU."""

from datasvc.loaders.decode.backend import DecodeConfig, DecodedImages, ImageBackend
from datasvc.loaders.decode.pixels import PixelFormat

__all__ = ["DecodeConfig", "DecodedImages", "ImageBackend", "PixelFormat"]
