"""Backend that decodes on the CPU, and copies the pixels to a GPU, which converts them to the output format.

Pixels are copied as `uint8`, which has a quarter of the size of float32. Threads decode to page-locked memory. While
the caller uses a batch, the next one is copied and converted on a separate stream. Invariant: while a copy reads a
slot of page-locked memory, nothing is decoded to that slot.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, cast

import numpy as np

from datasvc.loaders.augment.augment import ColourFactors, Windows
from datasvc.loaders.augment.edits import Edit
from datasvc.loaders.decode.backend import Backend, BackendConfig, DecodedImages, Read
from datasvc.loaders.decode.cpu import CpuBackend, CpuRun
from datasvc.loaders.decode.gpu.dali import BACKENDS, Graph, device_errors
from datasvc.loaders.decode.gpu.device_stream import CudaStream, Pixels
from datasvc.loaders.decode.gpu.gpu import DeviceFinish, GpuBackend
from datasvc.loaders.decode.pixels import PixelFormat
from datasvc.loaders.profiling.step_profiler import StepProfiler
from datasvc.loaders.profiling.step_times import Stage

if TYPE_CHECKING:
    import torch

    from datasvc.shards.format.mapped_file import Bytes


# Besides the `prefetch` batches that are decoded, two may still be copied: the caller's batch and the next one.
_NUM_COPYING: Final = 2


@dataclass(frozen=True)
class _DecodingBatch:
    """A batch that threads decode to `slot`; `colours` are the colour changes that the device makes afterwards."""

    slot: Pixels
    run: CpuRun
    colours: ColourFactors | None


@dataclass(frozen=True)
class _UploadedBatch:
    """A batch in transfer to the device. The event `end` marks the end of the transfer."""

    images: torch.Tensor
    end: torch.cuda.Event
    decoded: DecodedImages


class PinnedRing:
    """Slots of page-locked memory; a released slot is used again when the copy from it is complete.

    Args:
        allocate: function that returns a new slot.
        keep: number of slots that `take` allocates before it waits for copies instead.
    """

    def __init__(self, allocate: Callable[[], Pixels], *, keep: int) -> None:
        self._allocate, self._keep = allocate, keep
        self._free: list[Pixels] = []
        self._copying: deque[tuple[torch.cuda.Event, Pixels]] = deque()
        self._num_slots = 0

    def take(self) -> Pixels:
        """Return a slot that no copy reads. If none is free, wait for the oldest copy, or allocate a slot."""
        while self._copying and self._copying[0][0].query():  # type: ignore[no-untyped-call]
            self._free.append(self._copying.popleft()[1])
        if self._free:
            return self._free.pop()
        if self._num_slots >= self._keep and self._copying:  # without a copy there is nothing to wait for: allocate
            copy_end, slot = self._copying[0]
            copy_end.synchronize()
            self._copying.popleft()
            return slot
        self._num_slots += 1
        return self._allocate()

    def release(self, slot: Pixels, copy_end: torch.cuda.Event) -> None:
        """Release a slot that a copy may still read. The event `copy_end` marks the end of the copy."""
        self._copying.append((copy_end, slot))

    def close(self) -> None:
        """Wait for every copy, then drop the slots."""
        for copy_end, _ in self._copying:
            copy_end.synchronize()
        self._copying.clear()
        self._free.clear()
        self._num_slots = 0


class UploadBackend:
    """An `ImageBackend` that decodes on the CPU and normalises on a device.

    The device also changes the colours. If the user has a transform, the CPU does, before the transform runs there.

    Args:
        config: settings of the backend.
        backend: "cpu" or "pillow".
        device: name of the device, such as "cuda:1".
        profiler: records the time of the transfers.
        stream: stream for the copies; None: a new stream of `device`.

    Raises:
        ConfigError: the decoder is not installed; torch does not find the GPU.
        DeviceError: the GPU cannot be used, or has too little memory.
    """

    def __init__(
        self,
        config: BackendConfig,
        *,
        backend: Backend,
        device: str,
        profiler: StepProfiler,
        stream: CudaStream | None = None,
    ) -> None:
        self._profiler, self._name = profiler, backend
        with device_errors(backend):
            self._stream = CudaStream(device) if stream is None else stream
            self._device_finish = DeviceFinish(config.pixels, device)
        decoder_config = dataclasses.replace(config, pixels=PixelFormat("uint8", "NHWC"))
        self._shape = decoder_config.shape
        self._ring = PinnedRing(lambda: self._stream.allocate(self._shape), keep=config.prefetch + _NUM_COPYING)
        self._decoder = CpuBackend(decoder_config, backend=backend, framework="torch", profiler=profiler)
        self._fed: deque[_DecodingBatch] = deque()
        self._uploaded: deque[_UploadedBatch] = deque()

    def feed(
        self, images: Sequence[Bytes], windows: Windows, edit: Edit | None = None, read: Read | None = None
    ) -> None:
        """See `ImageBackend`."""
        if not self._uploaded:  # when the last `take` called `_upload_ahead`, the next batch was not decoded yet
            self._upload_ahead()
        colours = None
        if edit is not None and edit.transform is None:
            colours, edit = edit.colours, None
        # This counts as transfer, because `PinnedRing.take` waits for the device if all slots are in use.
        with self._profiler.stage(Stage.TRANSFER), device_errors(self._name):
            slot = self._ring.take() if images else np.empty((0, *self._shape[1:]), np.uint8)
        self._fed.append(_DecodingBatch(slot, self._decoder.start(images, windows, edit, read, out=slot), colours))

    def take(self) -> DecodedImages:
        """See `ImageBackend`. Raises DeviceError: the GPU failed or has no memory left."""
        if not self._uploaded:
            self._upload()
        uploaded = self._uploaded.popleft()
        with self._profiler.stage(Stage.TRANSFER), device_errors(self._name):
            # The caller's stream waits for the copy; the host does not.
            self._stream.hand_over(uploaded.images, uploaded.end)
        self._upload_ahead()
        return DecodedImages(uploaded.images, uploaded.decoded.bad)

    def close(self) -> None:
        """See `ImageBackend`."""
        self._decoder.close()
        self._fed.clear()
        self._uploaded.clear()
        self._ring.close()

    def _upload_ahead(self) -> None:
        """If the next batch is decoded, start to copy it. The copy runs while the caller uses the previous batch."""
        # If decoding failed, `is_decoded` is False, and `take` raises the error when it reaches this batch.
        if self._fed and self._fed[0].run.is_decoded:
            self._upload()

    def _upload(self) -> None:
        """Wait until the oldest batch is decoded, and start to copy it to the device."""
        fed = self._fed[0]
        decoded = self._decoder.finish(fed.run)
        self._fed.popleft()
        with self._profiler.stage(Stage.TRANSFER), device_errors(self._name):
            with self._stream.active():
                pixels = self._stream.copy(fed.slot[: len(decoded.images)])
                images = self._device_finish.finish(pixels, fed.colours, decoded.bad)
            end = self._stream.record()
            if len(images):  # an empty batch has no slot of the ring
                self._ring.release(fed.slot, end)
        self._uploaded.append(_UploadedBatch(images, end, decoded))


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
