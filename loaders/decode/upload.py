"""Batches decoded on the CPU for a GPU: bytes are copied there, a quarter of the floats that they become."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from loaders.augment import Windows
from loaders.decode.backend import Backend, DecodeConfig, DecodedImages, Edit, Read
from loaders.decode.cpu import CpuBackend
from loaders.decode.pixels import PixelFormat
from loaders.step_times import Stage
from loaders.stopwatch import Stopwatch

if TYPE_CHECKING:
    import torch

    from datasvc.shards.mapped_file import Bytes


class UploadBackend:
    """An `ImageBackend` that decodes on the CPU and normalises on a device.

    Args:
        config: what it is built from.
        backend: "cpu" or "pillow".
        device: "cuda", "cuda:1".
        stopwatch: times what the threads do, and the copies.
    """

    def __init__(self, config: DecodeConfig, *, backend: Backend, device: str, stopwatch: Stopwatch) -> None:
        self._pixels, self._device = config.pixels, device
        levels = dataclasses.replace(config.pixels, output="uint8", layout="NHWC")
        self._stopwatch = stopwatch
        self._inner = CpuBackend(
            dataclasses.replace(config, pixels=levels), backend=backend, framework="torch", stopwatch=stopwatch
        )

    def feed(
        self, images: Sequence[Bytes], windows: Windows, edit: Edit | None = None, read: Read | None = None
    ) -> None:
        """See `ImageBackend`."""
        self._inner.feed(images, windows, edit, read)

    def take(self) -> DecodedImages:
        """See `ImageBackend`."""
        decoded = self._inner.take()
        with self._stopwatch.stage(Stage.TRANSFER):
            images = normalise_on_device(decoded.images, self._pixels, self._device, bad=list(decoded.bad))
        return DecodedImages(images, decoded.bad)

    def close(self) -> None:
        """See `ImageBackend`."""
        self._inner.close()


def normalise_on_device(
    levels: npt.NDArray[Any] | torch.Tensor, pixels: PixelFormat, device: str, *, bad: Sequence[int] = ()
) -> torch.Tensor:
    """Return images on a device as the format says.

    Args:
        levels: `uint8[n, size, size, 3]` in memory, which may be used again once this returns.
        pixels: the format.
        device: where they shall lie.
        bad: indices of images that become zeros.
    """
    import torch

    # A copy even where the device is the CPU; from memory that is not pinned it is done when this returns.
    images = torch.as_tensor(levels).to(device, copy=True)
    if pixels.layout == "NCHW":
        images = images.permute(0, 3, 1, 2).contiguous()
    if pixels.output == "uint8":
        return images
    shape = (3, 1, 1) if pixels.layout == "NCHW" else (3,)
    scale = torch.from_numpy(pixels.scale).to(device).reshape(shape)
    shift = torch.from_numpy(pixels.shift).to(device).reshape(shape)
    normalised: torch.Tensor = images.float().mul_(scale).add_(shift).to(getattr(torch, pixels.output))
    normalised[list(bad)] = 0
    return normalised
