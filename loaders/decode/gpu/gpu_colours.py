"""Colour changes of batches that a GPU decodes: DALI returns `uint8` levels, and torch changes them on the GPU."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from datasvc.loaders.augment.augment import ColourFactors, Windows
from datasvc.loaders.augment.edits import Edit
from datasvc.loaders.decode.backend import BackendConfig, DecodedImages, Read
from datasvc.loaders.decode.gpu.dali import BACKENDS, Graph, device_errors
from datasvc.loaders.decode.gpu.finish import DeviceFinish
from datasvc.loaders.decode.gpu.gpu import GpuBackend
from datasvc.loaders.profiling.step_profiler import StepProfiler

if TYPE_CHECKING:
    import torch

    from datasvc.shards.format.mapped_file import Bytes


class ColourBackend:
    """An `ImageBackend` that changes the colours of the images of a `GpuBackend` on their device.

    For arguments and errors see `GpuBackend`.
    """

    def __init__(
        self, config: BackendConfig, graph: Graph = "window", *, profiler: StepProfiler | None = None
    ) -> None:
        self._name = BACKENDS[graph]
        device = "cpu" if config.device_id is None else f"cuda:{config.device_id}"
        with device_errors(self._name):
            self._finish = DeviceFinish(config.pixels, device)
        levels_format = dataclasses.replace(config.pixels, output="uint8", layout="NHWC")
        # Created last: it starts threads and allocates memory, and if a later step failed, nothing would free them.
        self._inner = GpuBackend(dataclasses.replace(config, pixels=levels_format), graph, profiler=profiler)
        self._in_progress: deque[ColourFactors | None] = deque()  # factors of each batch that was fed

    def feed(
        self, images: Sequence[Bytes], windows: Windows, edit: Edit | None = None, read: Read | None = None
    ) -> None:
        """See `ImageBackend`; `edit` must not have a transform."""
        assert edit is None or edit.transform is None, "transforms are planned for the CPU"
        self._inner.feed(images, windows, None, read)
        self._in_progress.append(None if edit is None else edit.colours)

    def take(self) -> DecodedImages:
        """See `ImageBackend`. Raises DeviceError: the GPU failed or has no memory left."""
        decoded = self._inner.take()
        colours = self._in_progress.popleft()
        # The batch is valid on the caller's stream, so the work is queued there.
        with device_errors(self._name):
            images = self._finish.finish(cast("torch.Tensor", decoded.images), colours, decoded.bad)
        return DecodedImages(images, decoded.bad)

    def close(self) -> None:
        """See `ImageBackend`."""
        self._inner.close()
        self._in_progress.clear()
