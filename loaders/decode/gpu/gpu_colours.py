"""Backend that decodes on a GPU and changes colours: DALI returns `uint8` pixels, and torch changes them there."""

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
    """An `ImageBackend` that decodes with a `GpuBackend`, and changes the colours of its images on the GPU.

    For arguments and errors see `GpuBackend`.
    """

    def __init__(
        self, config: BackendConfig, graph: Graph = "window", *, profiler: StepProfiler | None = None
    ) -> None:
        self._name = BACKENDS[graph]
        device = "cpu" if config.device_id is None else f"cuda:{config.device_id}"
        with device_errors(self._name):
            self._finish = DeviceFinish(config.pixels, device)
        inner_format = dataclasses.replace(config.pixels, output="uint8", layout="NHWC")
        # Create it last: it starts threads and allocates memory, which nothing would free if a later step failed.
        self._inner = GpuBackend(dataclasses.replace(config, pixels=inner_format), graph, profiler=profiler)
        self._in_progress: deque[ColourFactors | None] = deque()  # colours of each batch that is not taken yet

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
        # Queue the work on the caller's stream: the batch is valid there.
        with device_errors(self._name):
            images = self._finish.finish(cast("torch.Tensor", decoded.images), colours, decoded.bad)
        return DecodedImages(images, decoded.bad)

    def close(self) -> None:
        """See `ImageBackend`."""
        self._inner.close()
        self._in_progress.clear()
