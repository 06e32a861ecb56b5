"""GPU backend: DALI decodes JPEGs on the GPU, and CPU threads decode other formats.

nvJPEG decodes only JPEG, so images of other formats go to the CPU when a batch is fed, in parallel to the JPEGs. An
image on which DALI fails makes its pipeline unusable: the CPU then decodes the JPEGs of that batch too and reports
the bad images, and a new pipeline is built.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

from datasvc.errors import ConfigError, DeviceError
from datasvc.loaders.augment.augment import ColourFactors, Windows
from datasvc.loaders.augment.device_colour import change_colours, plan_passes
from datasvc.loaders.augment.edits import Edit
from datasvc.loaders.decode.backend import Backend, BackendConfig, DecodedImages, Read
from datasvc.loaders.decode.cpu import CpuBackend, CpuRun
from datasvc.loaders.decode.gpu.dali import BACKENDS, DaliPipeline, Graph, device_errors
from datasvc.loaders.decode.gpu.device_stream import place
from datasvc.loaders.decode.pixels import PixelFormat, import_codec
from datasvc.loaders.profiling.step_profiler import StepProfiler
from datasvc.printable import count_text
from datasvc.shards.images.header import is_plain_jpeg

if TYPE_CHECKING:
    import torch

    from datasvc.shards.format.mapped_file import Bytes


_LOG = logging.getLogger(__name__)
# A failure of DALI is unexplained if the CPU decodes all images of the batch. After so many successive ones, the
# device counts as the cause.
_MAX_UNEXPLAINED: Final = 3


@dataclass(frozen=True)
class _SubBatch:
    """Some images of a batch, and their indices in that batch. The images are referenced until the batch is taken.

    `windows` and `read` (see `ImageBackend.feed`) are for these images only.
    """

    indices: Sequence[int]
    images: Sequence[Bytes]
    windows: Windows
    read: Read | None

    @classmethod
    def of(cls, indices: Sequence[int], images: Sequence[Bytes], windows: Windows, read: Read | None) -> _SubBatch:
        """Return the images at `indices`, ascending, of a batch."""
        if len(indices) == len(images):
            return cls(indices, images, windows, read)
        return cls(
            indices,
            [images[index] for index in indices],
            windows.select(indices),
            None if read is None else partial(_read_of_sub_batch, read, indices),
        )


@dataclass(frozen=True)
class _DividedBatch:
    """A batch in progress: the images for DALI, the images for the CPU, and the CPU's run."""

    by_dali: _SubBatch
    by_cpu: _SubBatch
    run: CpuRun | None


class GpuBackend:
    """An `ImageBackend` that decodes on the GPU; with `device_id` None the same graph runs on the CPU.

    Args:
        config: settings of the backend.
        graph: graph of the DALI pipeline, see `datasvc.loaders.decode.gpu.dali`.
        profiler: profiler of the loader; None: times are discarded.

    Raises:
        ConfigError: DALI is not installed.
        DeviceError: the GPU cannot be used.
    """

    def __init__(
        self, config: BackendConfig, graph: Graph = "window", *, profiler: StepProfiler | None = None
    ) -> None:
        self._config, self._graph = config, graph
        self._name = BACKENDS[graph]
        self._profiler = profiler or StepProfiler()
        self._pipeline = DaliPipeline(config, graph)
        self._cpu_backend: CpuBackend | None = None  # created for the first image that DALI cannot decode
        self._in_progress: deque[_DividedBatch] = deque()
        self._num_unexplained = 0  # successive batches on which DALI failed, although the CPU decoded all images

    def feed(
        self, images: Sequence[Bytes], windows: Windows, edit: Edit | None = None, read: Read | None = None
    ) -> None:
        """See `ImageBackend`. `edit` must be None. DALI reads mapped memory, so only the CPU calls `read`."""
        assert edit is None, "colours and transforms are planned for the CPU"
        plain = [is_plain_jpeg(image.data) for image in images]
        by_dali = _SubBatch.of([index for index, is_plain in enumerate(plain) if is_plain], images, windows, read)
        by_cpu = _SubBatch.of([index for index, is_plain in enumerate(plain) if not is_plain], images, windows, read)
        self._in_progress.append(_DividedBatch(by_dali, by_cpu, self._start_on_cpu(by_cpu)))
        self._feed(by_dali)

    def take(self) -> DecodedImages:
        """See `ImageBackend`. Raises DeviceError: the GPU, not an image, failed, or it has no memory left."""
        batch = self._in_progress[0]
        has_failed = False
        try:
            with device_errors(self._name):
                dali_images = DecodedImages(self._pipeline.take(), {}) if batch.by_dali.images else None
        except RuntimeError as error:
            dali_images = self._decode_after_failure(batch.by_dali, error)
            has_failed = True
        else:
            self._num_unexplained = 0
        if has_failed:
            # Rebuild after the `except` block, not in it: the error's traceback refers to the pipeline's memory.
            self._rebuild_pipeline()
        cpu_images = None if batch.run is None else self._cpu().finish(batch.run)
        with device_errors(self._name):
            decoded = self._join(batch, dali_images, cpu_images)
        self._in_progress.popleft()
        return decoded

    def close(self) -> None:
        """See `ImageBackend`."""
        # Close the pipeline first: its threads read the images' memory and must finish before that is released.
        self._pipeline.close()
        if self._cpu_backend is not None:
            self._cpu_backend.close()
        self._in_progress.clear()

    def _rebuild_pipeline(self) -> None:
        """Replace the pipeline, and feed it all batches in progress except the failed one."""
        self._pipeline.close()  # frees its memory before the next one allocates
        self._pipeline = DaliPipeline(self._config, self._graph)
        for batch in list(self._in_progress)[1:]:
            self._feed(batch.by_dali)

    def _feed(self, sub_batch: _SubBatch) -> None:
        if sub_batch.images:
            with device_errors(self._name):
                self._pipeline.feed(sub_batch.images, sub_batch.windows)

    def _start_on_cpu(self, sub_batch: _SubBatch) -> CpuRun | None:
        return (
            self._cpu().start(sub_batch.images, sub_batch.windows, read=sub_batch.read) if sub_batch.images else None
        )

    def _decode_after_failure(self, sub_batch: _SubBatch, error: RuntimeError) -> DecodedImages:
        """Decode on the CPU the images on which DALI failed, to find the bad ones."""
        run = self._start_on_cpu(sub_batch)
        assert run is not None
        decoded = self._cpu().finish(run)
        if decoded.bad:
            self._num_unexplained = 0
            return decoded
        self._num_unexplained += 1
        if self._num_unexplained >= _MAX_UNEXPLAINED:
            other = "gpu-whole" if self._graph == "window" else "gpu-window"
            raise DeviceError(
                f"DALI failed on {count_text(self._num_unexplained, 'batch', 'batches')} in a row, although "
                "every image decodes on the CPU; "
                f"use decode={other!r} or decode='cpu'; the error of DALI was: {error}"
            ) from error
        _LOG.warning("DALI failed on a batch, which the CPU decodes more slowly: %s", error)
        return decoded

    def _join(
        self, batch: _DividedBatch, dali_images: DecodedImages | None, cpu_images: DecodedImages | None
    ) -> DecodedImages:
        """Return the two sub-batches of a batch as one batch on the device."""
        import torch

        count = len(batch.by_dali.images) + len(batch.by_cpu.images)
        parts = [
            (sub_batch.indices, self._to_device(decoded.images), decoded.bad)
            for sub_batch, decoded in ((batch.by_dali, dali_images), (batch.by_cpu, cpu_images))
            if decoded is not None
        ]
        bad: dict[int, str] = {}  # by index in the batch, not in the sub-batch
        for indices, _, reasons in parts:
            bad |= {indices[index]: reason for index, reason in reasons.items()}
        if len(parts) == 1:
            return DecodedImages(parts[0][1], bad)
        pixels, device_id = self._config.pixels, self._config.device_id
        device = "cpu" if device_id is None else f"cuda:{device_id}"
        out = torch.empty(pixels.shape(count, self._config.size), dtype=getattr(torch, pixels.output), device=device)
        for indices, images, _ in parts:
            out[torch.as_tensor(indices, device=device)] = images
        return DecodedImages(out, bad)

    def _to_device(self, images: object) -> torch.Tensor:
        import torch

        device_id = self._config.device_id
        return torch.as_tensor(images, device="cpu" if device_id is None else f"cuda:{device_id}")

    def _cpu(self) -> CpuBackend:
        if self._cpu_backend is None:
            self._cpu_backend = CpuBackend(
                self._config, backend=_cpu_decoder(), framework="torch", profiler=self._profiler
            )
        return self._cpu_backend


def _cpu_decoder() -> Backend:
    try:
        import_codec()
    except ConfigError:
        return "pillow"
    return "cpu"


def _read_of_sub_batch(read: Read, indices: Sequence[int], index: int, buffer: Bytes) -> Bytes:
    """Read an image of a sub-batch with the `Read` of its batch."""
    return read(indices[index], buffer)


# `UploadBackend` and `ColourBackend` use it.


class DeviceFinish:
    """Converts batches of pixel levels, which are from 0 to 255, to the output format.

    Args:
        pixels: output format.
        device: device of the batches, such as "cuda:1".
    """

    def __init__(self, pixels: PixelFormat, device: str | torch.device) -> None:
        import torch

        self._pixels = pixels
        self._dtype: torch.dtype = getattr(torch, pixels.output)
        self._place = partial(place, device=device)
        # Copy them once, synchronously, so that any stream may read them.
        self._scale, self._shift = (
            torch.from_numpy(values).to(device).reshape(3, 1, 1) for values in (pixels.scale, pixels.shift)
        )

    def finish(
        self, levels: torch.Tensor, colours: ColourFactors | None = None, bad: Iterable[int] = ()
    ) -> torch.Tensor:
        """Return a batch in the output format. The work is queued on the current stream.

        Args:
            levels: `uint8[n, size, size, 3]` on the device. Without colour changes and conversion, the result is a
                view of `levels`, so bad images are replaced in `levels` too.
            colours: colour factors of the images; None: colours do not change.
            bad: indices of images to replace by zeros.

        Raises:
            RuntimeError: the device failed or has no memory left; backends convert this error with `device_errors`.
        """
        import torch

        passes = [] if colours is None else plan_passes(colours)  # a pass makes one change to each image
        layout = torch.contiguous_format if self._pixels.layout == "NCHW" else torch.channels_last
        images = levels.permute(0, 3, 1, 2)  # a view with the axes NCHW
        if passes or self._pixels.output != "uint8":
            # Compute in float32, in new memory that the steps below change in place.
            images = images.to(torch.float32, memory_format=layout, copy=True)
        if passes:
            change_colours(images, passes, self._place)
        if self._pixels.output != "uint8":
            images.mul_(self._scale).add_(self._shift)
        images = images.to(self._dtype, memory_format=layout)
        for index in bad:  # a loop, because a list of indices would have to be copied to the device
            images[index].zero_()
        return images if self._pixels.layout == "NCHW" else images.permute(0, 2, 3, 1)
