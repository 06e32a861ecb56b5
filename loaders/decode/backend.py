"""Interface and settings of image decoding backends."""

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
# (index of an image in its batch, buffer `uint8[size]`) -> bytes of the image, in the buffer or elsewhere.
Read = Callable[[int, Bytes], Bytes]


class Edit(Protocol):
    """Changes of a batch's images beside crop and flip: colours first, then the user's transform."""

    @property
    def colours(self) -> ColourFactors | None:
        """Colour factors, for backends that change a whole batch on a GPU; None: colours do not change."""

    @property
    def transform(self) -> object | None:
        """The user's transform, which runs on the CPU; None if there is none."""

    def __call__(self, index: int, image: Pixels) -> None:
        """Apply all changes in place to image `index`, an upright and flipped `uint8[size, size, 3]`."""


@dataclass(frozen=True)
class DecodeConfig:
    """Settings of a decoding backend.

    Attributes:
        batch_size: maximum number of images in a batch.
        pixels: format of the decoded images.
        num_threads: number of decoding threads.
        prefetch: number of batches in progress at the same time.
        device_id: index of the GPU that receives the images; None: the CPU.
        max_width: width of the widest image in the data set, for one allocation of GPU memory; 0 if unknown.
        max_height: height of the highest image in the data set; 0 if unknown.
        changes_colours: whether batches may come with an `Edit` of colours.
        is_pinned: whether batches are in page-locked host memory.
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
    """A decoded batch.

    Attributes:
        images: images of shape `PixelFormat.shape(n)`, zeros for images that do not decode: an array from the CPU, or
            a tensor on a GPU. The memory is not reused while it is referenced.
        bad: reasons why images do not decode, by index in the batch.
    """

    images: npt.NDArray[Any] | torch.Tensor
    bad: Mapping[int, str]


class ImageBackend(Protocol):
    """Decodes several batches at a time, first in, first out."""

    def feed(
        self, images: Sequence[Bytes], windows: Windows, edit: Edit | None = None, read: Read | None = None
    ) -> None:
        """Start decoding a batch.

        Args:
            images: 0 to `batch_size` encoded images, which stay alive and unchanged until `take`.
            windows: window of each image.
            edit: changes of each image, called from any thread after scaling and before normalisation.
            read: function that reads the bytes of an image into a buffer, called from any thread; None: use `images`.
        """

    def take(self) -> DecodedImages:
        """Wait for the oldest batch that was fed, and return it decoded."""

    def close(self) -> None:
        """Stop, and release all resources, including batches that were not taken."""
