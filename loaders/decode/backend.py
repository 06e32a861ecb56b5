"""What every way to decode images has in common: how it is set, and how batches go in and come out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy.typing as npt

from datasvc.loaders.augment.augment import ColourFactors, Windows
from datasvc.loaders.decode.pixels import PixelFormat, Pixels
from datasvc.shards.format.mapped_file import Bytes

if TYPE_CHECKING:
    import torch

Backend = Literal["cpu", "gpu-window", "gpu-whole", "pillow"]
Framework = Literal["torch", "numpy"]
# Returns the bytes of an image of a batch: its index there, and a buffer to put them in, or not, `uint8[size]`.
Read = Callable[[int, Bytes], Bytes]


class Edit(Protocol):
    """What is done to the images of a batch beside crop and flip: colours first, then a transform."""

    @property
    def colours(self) -> ColourFactors | None:
        """How colours change, for who changes those of the whole batch; None: not at all."""

    @property
    def transform(self) -> object | None:
        """The user's, which is for the CPU; None: none."""

    def __call__(self, index: int, image: Pixels) -> None:
        """Do all of it to one image in place: its index, and `uint8[size, size, 3]`, upright and mirrored already."""


@dataclass(frozen=True)
class DecodeConfig:
    """What a decoder of images is built from.

    Attributes:
        batch_size: most images of a batch.
        pixels: what becomes of each image.
        num_threads: decoding threads.
        prefetch: batches under way at once.
        device_id: GPU that receives the images; None for the CPU.
        max_width: widest image of the data set, 0 if unknown: GPU memory is allocated once, for it.
        max_height: likewise.
        changes_colours: whether batches may come with an `Edit` of colours.
        is_pinned: whether batches lie in page-locked memory of the host.
    """

    batch_size: int
    pixels: PixelFormat
    num_threads: int
    prefetch: int
    device_id: int | None = None
    max_width: int = 0
    max_height: int = 0
    changes_colours: bool = False
    is_pinned: bool = False


@dataclass(frozen=True)
class DecodedImages:
    """What became of a batch.

    Attributes:
        images: `PixelFormat.shape(n)`; zeros where an image does not decode. An array from the CPU, a tensor on its
            device from a GPU. Nobody writes to it again while it is referenced.
        bad: why an image does not decode, by its index in the batch.
    """

    images: npt.NDArray[Any] | torch.Tensor
    bad: Mapping[int, str]


class ImageBackend(Protocol):
    """Decodes several batches at a time, first in, first out."""

    def feed(
        self, images: Sequence[Bytes], windows: Windows, edit: Edit | None = None, read: Read | None = None
    ) -> None:
        """Start on a batch.

        Args:
            images: 0 to `batch_size` encoded images, which stay alive and unchanged until `take`.
            windows: one for each.
            edit: called for each from any thread, after scaling and before normalising.
            read: called for each from any thread before it is decoded, where it is cheaper than to touch `images`.
        """

    def take(self) -> DecodedImages:
        """Return what became of the oldest batch that was fed, waiting for it."""

    def close(self) -> None:
        """Stop, and let go of everything that was not taken."""
