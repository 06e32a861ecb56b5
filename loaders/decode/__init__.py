"""Decode windows of images into batches of pixels, in CPU threads or with DALI on a GPU."""

from datasvc.loaders.decode.backend import BackendConfig, DecodedImages, ImageBackend
from datasvc.loaders.decode.pixels import PixelFormat

__all__ = ["BackendConfig", "DecodedImages", "ImageBackend", "PixelFormat"]
