"""Settings of decoding, and `ImageBackend`, the interface of the backends that decode images for `ImageLoader`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args

import numpy.typing as npt

from datasvc.cache.peers.membership import parse_node
from datasvc.errors import ConfigError
from datasvc.loaders.augment.augment import Windows
from datasvc.loaders.augment.edits import Edit
from datasvc.loaders.decode.pixels import PixelFormat
from datasvc.loaders.decode.reduced import DecodeScale, parse_decode_scale
from datasvc.shards.format.mapped_file import Bytes

if TYPE_CHECKING:
    import torch

Backend = Literal["cpu", "gpu-window", "gpu-whole", "pillow"]
Decode = Literal["auto", "cpu", "gpu", "gpu-window", "gpu-whole", "pillow"]
OnBad = Literal["raise", "mask"]
Framework = Literal["torch", "numpy"]
# Reads an encoded image: (index in the batch, buffer `uint8[size]`) -> the bytes, in that buffer or in other memory.
Read = Callable[[int, Bytes], Bytes]


def check_on_bad(on_bad: str) -> None:
    """Raise ConfigError if `on_bad` is no `OnBad`."""
    if on_bad not in get_args(OnBad):
        raise ConfigError(f"on_bad is {on_bad!r}; expected one of {', '.join(get_args(OnBad))}")


@dataclass(frozen=True)
class DecodeConfig:
    """How images are decoded.

    Attributes:
        backend: "cpu" decodes only the window of each image (its crop), in threads; "pillow" is slower and needs no
            further package; "gpu-window" decodes the window on the loader's device with DALI; "gpu-whole" decodes
            the whole image there and then cuts the window; "gpu" is the faster one of these two. "auto" is "cpu", or
            "pillow" if the decoder of "cpu" is not installed; with a GPU it is the fastest backend that works. If
            several are possible, they are measured on the first batches, in another process. Data rank 0 chooses for
            all ranks of a torch.distributed process group. The choice is logged and stored in the state. All backends
            cut equal windows. Pixels differ by up to two levels of 255 between "cpu" and "pillow", and by up to about
            eight on a GPU.
        num_threads: number of decoding threads, at least 1; None: the processors available to this process, divided
            by the number of ranks that the launcher started on this node. If the launcher binds each rank to separate
            processors, give their number.
        prefetch: batches in progress while the caller trains; 0: each batch is decoded in the call that returns it.
        on_bad: treatment of samples that do not decode: "raise" an error, or "mask": zeros as image, False in the
            mask, and the sample's name in `batch.bad`.
        servers: URLs of nodes that decode a part of the images, `datasvc serve --decode-threads`, for machines with
            few processors for their GPUs. The token and certificates are those of `DATASVC_TOKEN`, `DATASVC_CA` and
            `DATASVC_TLS_NAME`. Pixels are those decoded here, which is checked first. What a server does not decode
            is decoded here, and it is tried again later. Only for "cpu" and "pillow"; "auto" is one of these then.
        decode_scale: "auto": "cpu" and "pillow" decode a large JPEG at 1/2, 1/4 or 1/8 of its size where that takes
            less time and gives at least two to five times the pixels of the output in each direction; windows of
            photos then differ by less than one level of 255 in the mean, for outputs of 32 pixels or more. "full":
            at full size, as on a GPU, in earlier releases, and always for `evaluation="torchvision"`. A state has
            "auto" if an image of the data set is large enough; after a state without it, "auto" decodes at full size
            too.

    Raises:
        ConfigError: a value is out of range.
    """

    backend: Decode = "auto"
    num_threads: int | None = None
    prefetch: int = 2
    on_bad: OnBad = "raise"
    servers: tuple[str, ...] = ()
    decode_scale: DecodeScale = "auto"

    def __post_init__(self) -> None:
        parse_decode_scale(self.decode_scale)
        if self.backend not in get_args(Decode):
            raise ConfigError(f"decode is {self.backend!r}; expected one of {', '.join(get_args(Decode))}")
        check_on_bad(self.on_bad)
        for name, value, lowest in (("num_threads", self.num_threads, 1), ("prefetch", self.prefetch, 0)):
            if value is not None and value < lowest:
                raise ConfigError(f"{name} is {value}; expected at least {lowest}")
        object.__setattr__(self, "servers", tuple(map(parse_node, self.servers)))


@dataclass(frozen=True)
class BackendConfig:
    """Settings of a decoding backend.

    Attributes:
        batch_size: maximum number of images in a batch.
        size: side of an image in pixels.
        pixels: format of the pixels.
        num_threads: number of decoding threads.
        prefetch: number of batches in progress at the same time.
        device_id: index of the GPU that receives the images; None: the CPU.
        max_width: width of the widest image in the data set; 0 if unknown. Decoders on a GPU allocate memory for the
            largest image at the start, and not whenever a larger image arrives.
        max_height: height of the tallest image in the data set; 0 if unknown.
        changes_colours: whether batches may come with an `Edit` of colours.
        is_pinned: whether batches are in page-locked host memory.
        has_boxes: whether windows come with boxes.
        servers: URLs of nodes that decode a part of the images, see `DecodeConfig`.
        frame: of images that keep their own shape: height and width of the largest batch, see `Fit`; None: all images
            have the sides `size`.
        decode_scale: see `DecodeConfig`; for decoders on the CPU.
    """

    batch_size: int
    size: int
    pixels: PixelFormat
    num_threads: int
    prefetch: int
    device_id: int | None = None
    max_width: int = 0
    max_height: int = 0
    changes_colours: bool = False
    is_pinned: bool = False
    has_boxes: bool = False
    servers: tuple[str, ...] = ()
    frame: tuple[int, int] | None = None
    decode_scale: DecodeScale = "full"

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of a full batch; of images that keep their own shape, of the largest one."""
        return self.pixels.shape(self.batch_size, self.frame or self.size)


@dataclass(frozen=True)
class DecodedImages:
    """A decoded batch.

    Attributes:
        images: images of shape `PixelFormat.shape(n, size)`, or of `Windows.frame` in place of `size`: an array from
            the CPU, or a tensor on a GPU. An image that cannot be decoded is all zeros. The memory is not reused
            while a reference to it exists.
        bad: index in the batch -> reason why that image could not be decoded.
    """

    images: npt.NDArray[Any] | torch.Tensor
    bad: Mapping[int, str]


class ImageBackend(Protocol):
    """Decodes batches, several at the same time; `take` returns them in the order of `feed`."""

    def feed(
        self, images: Sequence[Bytes], windows: Windows, edit: Edit | None = None, read: Read | None = None
    ) -> None:
        """Start decoding a batch.

        Args:
            images: 0 to `batch_size` encoded images; the caller keeps them, unchanged, until `take`.
            windows: window of each image.
            edit: changes of the images, called from any thread after scaling and before normalisation.
            read: function that reads the bytes of an image into a buffer, called from any thread; None: use `images`.
        """

    def take(self) -> DecodedImages:
        """Wait until the oldest batch is decoded, and return it."""

    def close(self) -> None:
        """Stop, and release all resources, including batches that were not taken."""
