"""The `BatchDecoder` of `VideoLoader`: decodes clips in threads, a clip a task, and masks or reports bad samples."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt
from PIL import Image

from datasvc.errors import BadSampleError, CorruptDataError
from datasvc.keyed_random import Integers
from datasvc.loaders.augment.augment import Windows
from datasvc.loaders.augment.edits import Edit
from datasvc.loaders.core.batches import SampleBatch, read_lists
from datasvc.loaders.core.pinned import BufferRing
from datasvc.loaders.core.sample_keys import BatchPlaces
from datasvc.loaders.decode.backend import Framework, OnBad
from datasvc.loaders.decode.media_loader import MediaBatch
from datasvc.loaders.decode.pixels import PixelFormat, Pixels, PixelWriter, copy_pixels
from datasvc.loaders.decode.worker import make_resizer, scale_box
from datasvc.loaders.images.image_decoder import ImagePlan
from datasvc.loaders.profiling.step_profiler import StepProfiler
from datasvc.loaders.profiling.step_times import Stage
from datasvc.loaders.video.clips import ClipConfig, ClipFrames, plan_clips, plan_reads, read_frame_index
from datasvc.printable import count_text
from datasvc.shards import Shard
from datasvc.shards.format.schema import LABEL, VIDEO, VIDEO_FRAMES, VIDEO_HEIGHT, VIDEO_WIDTH
from datasvc.shards.video.video_file import ReadBytes, decode_frames
from datasvc.threads import run_before_threads_end

A = TypeVar("A")
_BATCHES_OF_CALLER: Final = 2  # it gets the next batch before it drops the one that it has used
_STOP_FLAGS: weakref.WeakSet[threading.Event] = weakref.WeakSet()


def _stop_all() -> None:
    for stop_flag in list(_STOP_FLAGS):
        stop_flag.set()


# At exit, for example after Ctrl-C, the threads stop. Otherwise they would decode all prefetched clips first.
run_before_threads_end(_stop_all)


@dataclass(frozen=True)
class ClipSettings:
    """Settings of a `ClipDecoder`.

    Attributes:
        clip: frames of a clip.
        plan: window, flip and colours of a clip.
        pixels: format of the frames.
        resizer: library that scales the frames, see `make_resizer`.
        batch_size: largest number of samples of a batch.
        num_threads: number of decoding threads.
        prefetch: number of batches in progress at the same time.
        on_bad: "raise" an error for samples that do not decode, or "mask" them.
        numbers: names of the numeric columns to deliver as arrays; `SampleBatch.columns` has their values.
        lists: names of the columns to deliver as lists; their values are read from the shards.
        is_mixture: whether samples come from a mixture; then batches have `sources`.
    """

    clip: ClipConfig
    plan: ImagePlan
    pixels: PixelFormat
    resizer: Framework
    batch_size: int
    num_threads: int
    prefetch: int
    on_bad: OnBad
    numbers: Sequence[str]
    lists: Sequence[str]
    is_mixture: bool

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the clips of a full batch."""
        return (self.batch_size, *self.pixels.shape(self.clip.frames, self.plan.side))


@dataclass(frozen=True)
class _ClipRun:
    """A batch in progress: its samples, clips and output memory, and the reason of each sample if it is bad."""

    batch: SampleBatch
    clips: ClipFrames
    out: npt.NDArray[Any]
    reasons: Mapping[int, Future[str | None]]


class ClipDecoder:
    """A `BatchDecoder` of clips, which makes batches of NumPy arrays.

    Args:
        settings: settings of the decoder.
        describe: returns the name of a sample, given its batch and its index in the batch.
        profiler: profiler of the loader.
    """

    def __init__(
        self,
        settings: ClipSettings,
        *,
        describe: Callable[[SampleBatch, int], str],
        profiler: StepProfiler,
    ) -> None:
        if settings.resizer == "torch":
            import torch  # noqa: F401 - before the threads start, which could get an incomplete module
        self._settings = settings
        self._describe, self._profiler = describe, profiler
        self._ring = BufferRing(settings.shape, settings.pixels.dtype, keep=settings.prefetch + _BATCHES_OF_CALLER)
        self._pool = ThreadPoolExecutor(settings.num_threads, thread_name_prefix="datasvc-clips")
        self._thread_local = threading.local()
        self._stopped = threading.Event()
        _STOP_FLAGS.add(self._stopped)
        self._in_progress: deque[_ClipRun] = deque()

    def feed(self, batch: SampleBatch) -> None:
        """See `BatchDecoder`."""
        plan = self._settings.plan
        clips = plan_clips(
            np.maximum(batch.columns[VIDEO_FRAMES], 1),  # a sample without frames does not decode
            batch.positions,
            config=self._settings.clip,
            seed=plan.seed,
            epoch=batch.epoch,
            training=plan.training,
        )
        windows = plan.windows(batch, batch.columns[VIDEO_WIDTH], batch.columns[VIDEO_HEIGHT])
        out = self._ring.take()[: len(batch.positions)]
        task = partial(self._decode, batch, clips, windows, plan.edit(batch), batch.sample_shards, out)
        masked = np.zeros(len(out), np.bool_) if batch.masked is None else batch.masked
        out[masked] = 0  # nothing of a masked sample reaches a model
        reasons = {index: self._pool.submit(task, index) for index in np.flatnonzero(~masked).tolist()}
        self._in_progress.append(_ClipRun(batch, clips, out, reasons))

    def take(self) -> VideoBatch[Any]:
        """See `BatchDecoder`."""
        run = self._in_progress[0]
        with self._profiler.waiting(Stage.DECODE):
            found = {index: future.result() for index, future in run.reasons.items()}
        self._in_progress.popleft()
        batch = run.batch
        bad = {
            index: f"{self._describe(batch, index)}: {reason}"
            for index, reason in found.items()
            if reason is not None and batch.mask[index]  # a failure of a padding sample loses no data
        }
        if bad and self._settings.on_bad == "raise":
            raise BadSampleError(
                f"{len(bad)} of {count_text(len(batch.positions), 'sample')} of a batch cannot be decoded: "
                f"{'; '.join(bad.values())}; delete them from the data set, ingest it with --decode-check --on-bad "
                "skip, or give on_bad='mask'"
            )
        with self._profiler.stage(Stage.COLLATE):
            return self._collate(run, bad)

    def close(self) -> None:
        """See `BatchDecoder`."""
        self._stopped.set()
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._in_progress.clear()

    def _decode(
        self,
        batch: SampleBatch,
        clips: ClipFrames,
        windows: Windows,
        edit: Edit | None,
        shards: Sequence[Shard],
        out: npt.NDArray[Any],
        index: int,
    ) -> str | None:
        """Decode one clip into its slot of `out`; return why it is bad, and then the slot is zeros."""
        if self._stopped.is_set():
            raise CancelledError
        with self._profiler.stage(Stage.DECODE):
            try:
                self._decode_clip(batch, clips, windows, edit, shards[index], out[index], index)
            except BadSampleError as error:
                out[index] = 0
                return str(error)
            except CorruptDataError as error:
                if not shards[index].is_partial:
                    raise
                out[index] = 0  # a part of a video, while the others of its shard are intact
                return str(error)
        return None

    def _decode_clip(
        self,
        batch: SampleBatch,
        clips: ClipFrames,
        windows: Windows,
        edit: Edit | None,
        shard: Shard,
        out: npt.NDArray[Any],
        index: int,
    ) -> None:
        config, length = self._settings.clip, int(clips.lengths[index])
        frame_index = read_frame_index(shard, int(batch.rows[index]))
        if length < config.frames and config.short == "bad":
            raise BadSampleError(f"has {frame_index.frames} frames, and a clip spans {config.span}")
        numbers = clips.numbers[index, :length].tolist()
        writer, content = self._writer(), batch.blobs[index]
        read: ReadBytes = shard.read
        if shard.is_partial:
            read = shard.reader(VIDEO, int(batch.rows[index]), plan_reads(frame_index, numbers, len(content)))
        for number, pixels in decode_frames(content, frame_index, numbers, read):
            if self._stopped.is_set():
                raise CancelledError
            change = None if edit is None else partial(edit, index)
            step = (number - numbers[0]) // config.stride
            writer.write(pixels, windows.select([index]), out[step], number=number, edit=change)
        out[length:] = out[length - 1]

    def _writer(self) -> _FrameWriter:
        """Return the writer of the calling thread; writers reuse their buffers, so threads cannot share one."""
        if not hasattr(self._thread_local, "writer"):
            settings = self._settings
            self._thread_local.writer = _FrameWriter(settings.pixels, settings.plan.side, settings.resizer)
        writer: _FrameWriter = self._thread_local.writer
        return writer

    def _collate(self, run: _ClipRun, bad: Mapping[int, str]) -> VideoBatch[Any]:
        batch, settings = run.batch, self._settings
        # A change of a copy: the ledger still needs `batch.mask`, in which bad samples are True.
        mask = batch.mask.copy()
        mask[list(bad)] = False
        stored = batch.columns.get(LABEL)
        columns: dict[str, Any] = {name: batch.columns[name] for name in settings.numbers}
        return VideoBatch(
            clips=run.out,
            labels=stored.astype(np.int64) if stored is not None and stored.dtype.kind in "iu" else None,
            mask=mask,
            lengths=np.where(mask, run.clips.lengths, 0),
            frame_numbers=run.clips.numbers,
            epoch=batch.epoch,
            positions=batch.positions,
            columns=columns | read_lists(batch, settings.lists),
            bad=bad,
            sources=batch.sources if settings.is_mixture else None,
        )


class _FrameWriter:
    """Cuts the window of a frame, scales it as images are scaled, and writes it in the pixel format."""

    def __init__(self, pixels: PixelFormat, size: int, framework: Framework) -> None:
        self._size = size
        self._resize = make_resizer(framework, size)
        self._writer = PixelWriter(pixels, size)
        self._edited = np.empty((size, size, 3), np.uint8)

    def write(
        self,
        pixels: Pixels,
        window: Windows,
        out: npt.NDArray[Any],
        *,
        number: int,
        edit: Callable[[Pixels], None] | None,
    ) -> None:
        """Write a frame, `uint8[height, width, 3]`, to `out`; `window` has the window of its clip.

        Raises:
            BadSampleError: the frame is too small for the window: its size differs from that of the first frame.
        """
        (top, left), (height, width), flip = window.starts[0], window.shapes[0], bool(window.flips[0])
        crop = pixels[top : top + height, left : left + width]
        if crop.shape[:2] != (height, width):
            shape = f"{pixels.shape[1]} x {pixels.shape[0]}"
            raise BadSampleError(f"frame {number} is {shape} pixels, smaller than the first frame")
        if window.boxes is None:
            scaled = self._resize(np.ascontiguousarray(crop))
        else:
            scaled = scale_box(Image.fromarray(crop), window.boxes[0], self._size)
        if edit is not None:
            copy_pixels(scaled, self._edited, flip=flip)
            edit(self._edited)
            scaled, flip = self._edited, False
        self._writer.write(scaled, out, flip=flip)


@dataclass(frozen=True)
class VideoBatch(MediaBatch[A]):
    """One rank's part of a global batch. It unpacks as `(clips, labels)`. `A` is a torch tensor or a NumPy array.

    Attributes:
        clips: `[n, frames, 3, size, size]` or `[n, frames, size, size, 3]` (channels last), of the loader's output
            type; zeros for samples that do not decode and for masked ones. Models that take the frames third, such
            as torchvision's, get `clips.transpose(1, 2)`. The loader does not reuse the memory while a reference to
            it exists.
        labels: `int64[n]`; None if the data set has no labels.
        mask: `bool[n]`, False for padding of the last batch, for samples that do not decode, and for masked ones.
        lengths: `int64[n]`, number of frames that the video has; the last of them is repeated after it. 0 where
            `mask` is False.
        frame_numbers: `int64[n, frames]`, number of each frame in its video.
        epoch: epoch of the batch, counted from 0.
        positions: `int64[n]`, positions of the samples in the epoch; always a NumPy array.
        columns: the columns of the loader's argument `columns`, see `ImageBatch`.
        bad: samples that do not decode: index in the batch -> name of the sample and reason.
        sources: `int64[n]`, for a mixture: index of each sample's split in it; None for a single split.
        places: where the samples are stored, for `keys`; set by the loader.
    """

    clips: A
    labels: A | None
    mask: A
    lengths: A
    frame_numbers: A
    epoch: int
    positions: Integers
    columns: Mapping[str, A | list[Any]] = field(default_factory=dict)
    bad: Mapping[int, str] = field(default_factory=dict)
    sources: A | None = None
    places: BatchPlaces | None = field(default=None, repr=False, compare=False)

    @property
    def _pair(self) -> tuple[A, A | None]:
        return self.clips, self.labels
