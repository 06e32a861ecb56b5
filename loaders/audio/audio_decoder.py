"""The `BatchDecoder` of `AudioLoader`: decodes, resamples and transforms clips in threads.

Each clip is computed alone and by operations whose order of additions is fixed, so equal clips are equal to the last
bit in any batch, thread and number of ranks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from datasvc.errors import BadSampleError
from datasvc.keyed_random import Integers
from datasvc.loaders.audio.clips import AudioAugment, Clips, Wave, mask_spectrogram, plan_clips
from datasvc.loaders.audio.mel import MelConfig, mel_spectrogram
from datasvc.loaders.audio.resample import reach, reduce_rates, resample
from datasvc.loaders.core.batches import SampleBatch, read_lists
from datasvc.loaders.core.pinned import BufferRing
from datasvc.loaders.core.sample_keys import BatchPlaces
from datasvc.loaders.decode.backend import OnBad
from datasvc.loaders.decode.media_loader import MediaBatch
from datasvc.loaders.profiling.step_profiler import StepProfiler
from datasvc.loaders.profiling.step_times import Stage
from datasvc.printable import count_text
from datasvc.shards import Shard
from datasvc.shards.audio.audio_file import decode_blocks, open_audio
from datasvc.shards.format.mapped_file import Bytes
from datasvc.shards.format.schema import FRAMES, LABEL, RATE

# The caller has up to two batches at once: it gets the next one before it drops the one that it has used.
_BATCHES_OF_CALLER = 2
_TASKS_PER_THREAD = 4  # small tasks, so that all threads finish a batch at nearly the same time

A = TypeVar("A")


@dataclass(frozen=True)
class ClipFormat:
    """What a clip of a file becomes.

    Attributes:
        seconds: length of a clip.
        rate: samples per second.
        channels: number of channels.
        mel: settings of mel spectrograms; None: waves.
    """

    seconds: float
    rate: int
    channels: int
    mel: MelConfig | None

    @property
    def num_samples(self) -> int:
        """Samples of a clip."""
        return round(self.seconds * self.rate)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of a clip: `[channels, samples]` or `[channels, mels, frames]`."""
        if self.mel is None:
            return self.channels, self.num_samples
        return self.channels, self.mel.num_mels, self.mel.count_frames(self.num_samples)


@dataclass(frozen=True)
class ClipPlan:
    """How clips are drawn, for `plan_clips`; `augment` is None in an evaluation."""

    seed: int
    augment: AudioAugment | None


@dataclass(frozen=True)
class _ClipJob:
    """A batch to decode, and its output memory: `features[index]` and `lengths[index]` for each of `kept`."""

    batch: SampleBatch
    kept: list[int]
    clips: Clips
    shards: Sequence[Shard]
    features: Wave
    lengths: Integers


class AudioDecoder:
    """A `BatchDecoder` of sounds, see `AudioLoader`.

    Args:
        form: what clips become.
        plan: how they are drawn.
        batch_size: maximum number of samples of a batch.
        num_threads: number of decoding threads.
        prefetch: batches in progress.
        on_bad: "raise" an error for samples that do not decode, or "mask" them.
        describe: returns the name of a sample, given its batch and its index in the batch.
        numbers, lists: names of the further columns that are delivered as arrays, and as lists.
        is_mixture: whether batches have `sources`.
        profiler: measures the decode time.
    """

    def __init__(
        self,
        form: ClipFormat,
        plan: ClipPlan,
        *,
        batch_size: int,
        num_threads: int,
        prefetch: int,
        on_bad: OnBad,
        describe: Callable[[SampleBatch, int], str],
        numbers: Sequence[str],
        lists: Sequence[str],
        is_mixture: bool,
        profiler: StepProfiler,
    ) -> None:
        self._form, self._plan = form, plan
        self._num_threads, self._on_bad = num_threads, on_bad
        self._describe, self._numbers, self._lists = describe, numbers, lists
        self._is_mixture, self._profiler = is_mixture, profiler
        keep = max(1, prefetch) + _BATCHES_OF_CALLER
        self._ring = BufferRing((batch_size, *form.shape), np.float32, keep=keep)
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="datasvc-audio")
        self._in_progress: deque[tuple[_ClipJob, list[Future[dict[int, str]]]]] = deque()

    def feed(self, batch: SampleBatch) -> None:
        """See `BatchDecoder`."""
        count = len(batch.positions)
        clips = plan_clips(
            batch.columns[FRAMES],
            batch.columns[RATE],
            batch.positions,
            seconds=self._form.seconds,
            seed=self._plan.seed,
            epoch=batch.epoch,
            augment=self._plan.augment,
        )
        features = self._ring.take()[:count]
        kept = list(range(count))
        if batch.masked is not None:
            # Do not decode masked samples: they are zeros, so that nothing of them reaches batch statistics.
            kept = np.flatnonzero(~batch.masked).tolist()
            features[batch.masked] = 0
        job = _ClipJob(batch, kept, clips, batch.sample_shards, features, np.zeros(count, np.int64))
        size = max(1, -(-len(kept) // (_TASKS_PER_THREAD * self._num_threads)))
        tasks = [
            self._pool.submit(self._decode, job, kept[start : start + size]) for start in range(0, len(kept), size)
        ]
        self._in_progress.append((job, tasks))

    def take(self) -> AudioBatch[npt.NDArray[Any]]:
        """See `BatchDecoder`."""
        job, tasks = self._in_progress[0]
        bad: dict[int, str] = {}
        with self._profiler.waiting(Stage.DECODE):
            for task in tasks:
                bad |= task.result()
        self._in_progress.popleft()
        batch = job.batch
        # A failure of a padding sample loses no data.
        bad = {index: f"{self._describe(batch, index)}: {bad[index]}" for index in sorted(bad) if batch.mask[index]}
        if bad and self._on_bad == "raise":
            raise BadSampleError(
                f"{len(bad)} of {count_text(len(batch.positions), 'sample')} of a batch cannot be decoded: "
                f"{'; '.join(bad.values())}; delete them from the data set, ingest it with --decode-check --on-bad "
                "skip, or give on_bad='mask'"
            )
        mask = batch.mask.copy()
        mask[list(bad)] = False
        stored = batch.columns.get(LABEL)
        numbers: dict[str, Any] = {name: batch.columns[name] for name in self._numbers}
        return AudioBatch(
            features=job.features,
            labels=stored.astype(np.int64) if stored is not None and stored.dtype.kind in "iu" else None,
            length=job.lengths,
            mask=mask,
            epoch=batch.epoch,
            positions=batch.positions,
            columns=numbers | read_lists(batch, self._lists),
            bad=bad,
            sources=batch.sources if self._is_mixture else None,
        )

    def close(self) -> None:
        """See `BatchDecoder`."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._in_progress.clear()

    def _decode(self, job: _ClipJob, indices: Sequence[int]) -> dict[int, str]:
        """Decode some clips of a batch; return those that cannot be decoded: index -> reason."""
        bad: dict[int, str] = {}
        with self._profiler.stage(Stage.DECODE):
            for index in indices:
                try:
                    job.lengths[index] = self._decode_one(job, index)
                except BadSampleError as error:
                    job.features[index] = 0
                    bad[index] = str(error)
        return bad

    def _decode_one(self, job: _ClipJob, index: int) -> int:
        """Write the clip of a sample to the batch; return its length without padding, in samples or frames."""
        form = self._form
        start = int(job.clips.starts[index])
        wave, length = decode_clip(job.batch.blobs[index], job.shards[index].read, start=start, form=form)
        wave *= job.clips.gains[index]
        if form.mel is None:
            job.features[index] = wave
            return length
        mels = mel_spectrogram(wave, form.rate, form.mel)
        length = min(form.mel.count_frames(length), int(mels.shape[2]))
        augment = self._plan.augment
        if augment is not None and augment.has_masks:
            mask_spectrogram(mels, length, job.clips.masks[:, :, index], augment)
        job.features[index] = mels
        return length


def decode_clip(
    content: Bytes, read: Callable[[Bytes, Bytes], Bytes], *, start: int, form: ClipFormat
) -> tuple[Wave, int]:
    """Decode, mix and resample a clip; only its own part of the file is decoded.

    Samples around the clip take part in the filter, so a clip is equal to that part of the whole file resampled.

    Args:
        content: the encoded file, `uint8[size]`.
        read: reads a part of it, see `open_audio`.
        start: first frame of the clip in the file.
        form: length, rate and channels of the clip.

    Returns:
        `float32[channels, num_samples]`, zeros after the end of the file; and the samples that are not padding.

    Raises:
        BadSampleError: the file is damaged, or has other channels; the message has the reason.
    """
    with open_audio(content, read) as file:
        if file.channels not in (1, form.channels) and form.channels != 1:
            raise BadSampleError(f"has {file.channels} channels; expected 1 or {form.channels}, or give channels=1")
        up, down = reduce_rates(file.samplerate, form.rate)
        # The context before the clip is a multiple of `down` frames, after which outputs fall on the clip's own grid.
        context = -(-reach(up, down) // down) * down
        needed = -(-form.num_samples * down // up)
        begin, stop = start - context, min(start + needed + reach(up, down), file.frames)
        wave = np.zeros((form.channels, max(stop - begin, 0)), np.float32)  # zeros before the start of the file
        position = first = max(-begin, 0)
        for block in decode_blocks(file, begin + first, stop - begin - first):
            # Stereo to mono is the mean; mono is the same in all channels.
            wave[:, position : position + len(block)] = block.mean(1) if form.channels == 1 else block.T
            position += len(block)
        if position < wave.shape[1]:
            raise BadSampleError(f"is truncated: it ends after frame {begin + position:,} of {file.frames:,}")
        frames = file.frames
    length = min(form.num_samples, -(-(frames - start) * up // down))
    clip = resample(wave, up, down, first=context * up // down, count=form.num_samples)
    clip[:, length:] = 0  # the filter rings after the end of the file
    return clip, length


@dataclass(frozen=True, repr=False)
class AudioBatch(MediaBatch[A]):
    """One rank's part of a global batch. It unpacks as `(features, labels)`. `A` is a torch tensor or a NumPy array.

    The loader does not reuse the memory while a reference to it exists.

    Attributes:
        features: waves `float32[n, channels, samples]`, in -1..1 before the gain, or mel spectrograms
            `float32[n, channels, mels, frames]`; zeros for samples that do not decode and for masked ones.
        labels: `int64[n]`; None if the data set has no labels.
        length: `int64[n]`, samples or frames that are not padding; 0 for samples that do not decode or are masked.
        mask: `bool[n]`, False for padding samples of the last batch, samples that do not decode, and masked ones.
        epoch: epoch of the batch, counted from 0.
        positions: `int64[n]`, positions of the samples in the epoch; always a NumPy array.
        columns: the columns of the loader's argument `columns`, by name: `[n]` for numbers and booleans, otherwise a
            list of Python values with None for null.
        bad: samples that do not decode: index in the batch -> name of the sample and reason.
        sources: `int64[n]`, for a mixture: index of each sample's split in `mixture.splits`; None for a single split.
        places: where the samples are stored, for `keys`; set by the loader.
    """

    features: A
    labels: A | None
    length: A
    mask: A
    epoch: int
    positions: Integers
    columns: Mapping[str, A | list[Any]] = field(default_factory=dict)
    bad: Mapping[int, str] = field(default_factory=dict)
    sources: A | None = None
    places: BatchPlaces | None = field(default=None, repr=False, compare=False)

    @property
    def _pair(self) -> tuple[A, A | None]:
        return self.features, self.labels
