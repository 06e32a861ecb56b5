"""Batches decoded by DALI on a GPU. What DALI does not decode spoils its pipeline, so another one is built then."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt

from loaders.augment import Windows
from loaders.decode.backend import DecodeConfig, DecodedImages, Edit, Read
from loaders.decode.crop import is_jpeg_2000
from loaders.decode.dali import DaliPipeline
from loaders.decode.worker import ImageWorker

if TYPE_CHECKING:
    import torch

    from datasvc.shards.mapped_file import Bytes

_LOG = logging.getLogger(__name__)
_HARMLESS = np.frombuffer(b"P6 1 1 255\n\0\0\0", np.uint8)  # a PPM of one black pixel


class GpuBackend:
    """An `ImageBackend` whose images never leave the GPU; with `device_id` None the same graph runs on the CPU.

    Args:
        config: what it is built from.

    Raises:
        ConfigError: DALI is not installed.
    """

    def __init__(self, config: DecodeConfig) -> None:
        self._config = config
        self._pipeline = DaliPipeline(config)
        self._under_way: deque[tuple[Sequence[Bytes], Windows]] = deque()

    def feed(
        self, images: Sequence[Bytes], windows: Windows, edit: Edit | None = None, read: Read | None = None
    ) -> None:
        """See `ImageBackend`; `edit` is not for GPUs, and `read` of no use: DALI reads the mapping."""
        del read
        assert edit is None, "colours and transforms are planned for the CPU"
        self._under_way.append((images, windows))
        self._feed(images, windows)

    def take(self) -> DecodedImages:
        """See `ImageBackend`."""
        images, windows = self._under_way[0]
        try:
            decoded = self._taken(images, windows) if images else self._to_device(self._empty(0), {})
        except RuntimeError as error:
            if type(error).__name__ == "OutOfMemoryError":
                raise
            decoded = self._decode_one_by_one(images, windows)
            if not decoded.bad:
                _LOG.warning("DALI failed on a batch that Pillow decodes, which is slower: %s", error)
            self._build_again()
        self._under_way.popleft()
        return decoded

    def close(self) -> None:
        """See `ImageBackend`."""
        # First: DALI's threads read the images where they lie, and must be done before these go.
        self._pipeline.close()
        self._under_way.clear()

    def _build_again(self) -> None:
        """Replace the pipeline, and feed it all batches but the one that failed."""
        self._pipeline.close()  # before the next one takes its memory
        self._pipeline = DaliPipeline(self._config)
        for images, windows in list(self._under_way)[1:]:
            self._feed(images, windows)

    def _feed(self, images: Sequence[Bytes], windows: Windows) -> None:
        if not images:
            return
        others = _not_for_dali(images)
        if others:
            # Something harmless in their place: every batch that is fed must run.
            images = [_HARMLESS if index in others else image for index, image in enumerate(images)]
            starts, shapes = windows.starts.copy(), windows.shapes.copy()
            starts[others], shapes[others] = 0, 1
            windows = Windows(starts, shapes, windows.flips)
        self._pipeline.feed(images, windows)

    def _taken(self, images: Sequence[Bytes], windows: Windows) -> DecodedImages:
        """Return what DALI made of the oldest batch, and Pillow of the images that are not for DALI."""
        decoded = self._pipeline.take()
        others = _not_for_dali(images)
        if not others:
            return DecodedImages(decoded, {})
        few = Windows(windows.starts[others], windows.shapes[others], windows.flips[others])
        by_pillow = self._decode_one_by_one([images[index] for index in others], few)
        decoded[others] = cast("torch.Tensor", by_pillow.images)
        return DecodedImages(decoded, {others[index]: reason for index, reason in by_pillow.bad.items()})

    def _decode_one_by_one(self, images: Sequence[Bytes], windows: Windows) -> DecodedImages:
        """Let Pillow decode a batch that DALI failed on; it says what is bad, and decodes what only DALI refuses."""
        worker = ImageWorker(self._config.pixels, backend="pillow", framework="torch")
        out, bad = self._empty(len(images)), {}
        starts, shapes = windows.starts.tolist(), windows.shapes.tolist()
        for index, image in enumerate(images):
            flip = bool(windows.flips[index])
            reason = worker.decode(image, starts[index], shapes[index], out[index], flip=flip)
            if reason is not None:
                bad[index] = reason
        return self._to_device(out, bad)

    def _empty(self, count: int) -> npt.NDArray[Any]:
        return np.empty(self._config.pixels.shape(count), self._config.pixels.dtype)

    def _to_device(self, out: npt.NDArray[Any], bad: dict[int, str]) -> DecodedImages:
        import torch

        images = torch.from_numpy(out)
        if self._config.pixels.output == "bfloat16":
            images = images.view(torch.bfloat16)
        return DecodedImages(images if self._config.device_id is None else images.cuda(self._config.device_id), bad)


def _not_for_dali(images: Sequence[Bytes]) -> list[int]:
    """Return which images might end the process in DALI."""
    return [index for index, image in enumerate(images) if is_jpeg_2000(image)]
