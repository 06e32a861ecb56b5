"""The `BatchDecoder` of `ImageLoader`: plans crops, decodes with a backend, and masks or reports bad samples.

A bad sample is one whose image does not decode. The argument `columns` of `ImageLoader` adds columns to a batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import pyarrow as pa

from datasvc.errors import BadSampleError, ConfigError
from datasvc.keyed_random import Integers
from datasvc.loaders.augment.augment import (
    AugmentConfig,
    Evaluation,
    Windows,
    plan_centre_boxes,
    plan_centre_windows,
    plan_random_windows,
)
from datasvc.loaders.augment.edits import Edit, plan_edit
from datasvc.loaders.core.batch import Batch, register_tree
from datasvc.loaders.core.batches import SampleBatch
from datasvc.loaders.core.mixture import Mixture, check_column, weighted_splits
from datasvc.loaders.core.sample_keys import BatchPlaces
from datasvc.loaders.decode.backend import DecodedImages, Framework, ImageBackend, OnBad
from datasvc.loaders.decode.gpu.device_stream import place
from datasvc.loaders.profiling.step_profiler import StepProfiler
from datasvc.loaders.profiling.step_times import Stage
from datasvc.printable import count_text
from datasvc.shards import Shard, Split
from datasvc.shards.format.mapped_file import Bytes
from datasvc.shards.format.reader import python_value, text_errors
from datasvc.shards.format.schema import HEIGHT, LABEL, WIDTH
from datasvc.shown import Shown

if TYPE_CHECKING:
    from datasvc.loaders.decode.pixels import PixelFormat


_RESIZE_RATIO = 256 / 224  # of the shorter side before the centre crop to the crop's side, as usual for ImageNet


A = TypeVar("A")


class ImageDecoder:
    """A `BatchDecoder` of images.

    Args:
        backend: decoder of the images, which this object closes.
        framework: array type of the batches.
        plan: crop, colour changes and transform of each image.
        describe: returns the name of a sample, given its batch and its index in the batch.
        numbers: names of the numeric columns to deliver as arrays; `SampleBatch.columns` has their values.
        lists: names of the columns to deliver as lists; their values are read from the shards.
        on_bad: "raise" an error for samples that do not decode, or "mask" them.
        is_mixture: whether samples come from a mixture; then batches have `sources`.
        device: device of labels, mask and numeric columns, such as "cuda:1"; None: the CPU.
        display: how a notebook shows the batches.
        profiler: profiler of the loader, which measures waits for the backend and the assembly of batches.
    """

    def __init__(
        self,
        backend: ImageBackend,
        *,
        framework: Framework,
        plan: ImagePlan,
        describe: Callable[[SampleBatch, int], str],
        numbers: Sequence[str],
        lists: Sequence[str],
        on_bad: OnBad,
        is_mixture: bool,
        device: str | None,
        display: BatchDisplay,
        profiler: StepProfiler,
    ) -> None:
        if framework == "torch":
            register_tree(ImageBatch)
        self._backend = backend
        self._framework = framework
        self._plan = plan
        self._describe = describe
        self._numeric_columns, self._list_columns = numbers, lists
        self._on_bad = on_bad
        self._is_mixture, self._device = is_mixture, device
        self._display = display
        self._profiler = profiler
        self._in_progress: deque[SampleBatch] = deque()

    def feed(self, batch: SampleBatch) -> None:
        """See `BatchDecoder`."""
        # Do not decode masked samples: their images are zeros, so that nothing of them reaches batch statistics.
        kept = batch.without_masked()
        read = partial(_read, kept.blobs, kept.sample_shards)
        self._backend.feed(kept.blobs, self._plan.windows(kept), self._plan.edit(kept), read)
        self._in_progress.append(batch)

    def take(self) -> ImageBatch[Any]:
        """See `BatchDecoder`."""
        with self._profiler.waiting(Stage.DECODE):
            decoded = self._backend.take()
        batch = self._in_progress.popleft()
        if batch.masked is not None:
            decoded = _with_zeros(decoded, np.flatnonzero(~batch.masked), len(batch.positions))
        bad = {
            index: f"{self._describe(batch, index)}: {reason}"
            for index, reason in sorted(decoded.bad.items())
            if batch.mask[index]  # a failure of a padding sample loses no data
        }
        if bad and self._on_bad == "raise":
            raise BadSampleError(
                f"{len(bad)} of {count_text(len(batch.blobs), 'sample')} of a batch cannot be decoded: "
                f"{'; '.join(bad.values())}; "
                "delete them from the data set, ingest it with --decode-check --on-bad skip, or give "
                "decode=DecodeConfig(on_bad='mask')"
            )
        with self._profiler.stage(Stage.COLLATE):
            return self._collate(batch, decoded, bad)

    def close(self) -> None:
        """See `BatchDecoder`."""
        self._backend.close()
        self._in_progress.clear()

    def _collate(self, batch: SampleBatch, decoded: DecodedImages, bad: Mapping[int, str]) -> ImageBatch[Any]:
        """Return the batch for the caller; samples in `bad` (index -> reason) are masked."""
        mask = batch.mask
        if bad:
            # Change a copy: the ledger still needs `batch.mask`, in which bad samples are True.
            mask = mask.copy()
            mask[list(bad)] = False
        stored = batch.columns.get(LABEL)
        # A column `label` of another type is in the batch only if the caller requested it, see `holds_labels`.
        labels = stored.astype(np.int64) if stored is not None and stored.dtype.kind in "iu" else None
        columns: dict[str, Any] = {name: self._deliver(batch.columns[name]) for name in self._numeric_columns}
        return ImageBatch(
            images=self._deliver(decoded.images),
            labels=None if labels is None else self._deliver(labels),
            mask=self._deliver(mask),
            epoch=batch.epoch,
            positions=batch.positions,
            columns=columns | read_lists(batch, self._list_columns),
            bad=bad,
            sources=self._deliver(batch.sources) if self._is_mixture else None,
            display=self._display,
        )

    def _deliver(self, values: Any) -> Any:
        """Return values in the caller's framework, on the device; a tensor on the CPU shares the array's memory."""
        # Values that are not a NumPy array are a tensor of the backend, which is on the device already.
        if self._framework == "numpy" or not isinstance(values, np.ndarray):
            return values
        import torch

        return torch.from_numpy(values) if self._device is None else place(values, self._device)


def _with_zeros(decoded: DecodedImages, kept: Integers, size: int) -> DecodedImages:
    """Return the images of a batch of `size` samples: those at the indices `kept` are decoded, the others zeros."""
    bad = {int(kept[index]): reason for index, reason in decoded.bad.items()}
    shape = (size, *decoded.images.shape[1:])
    if isinstance(decoded.images, np.ndarray):
        zeros: Any = np.zeros(shape, decoded.images.dtype)
        zeros[kept] = decoded.images
        return DecodedImages(zeros, bad)
    zeros = decoded.images.new_zeros(shape)
    zeros[place(kept, str(zeros.device)) if zeros.is_cuda else kept] = decoded.images
    return DecodedImages(zeros, bad)


def _read(blobs: Sequence[Bytes], shards: Sequence[Shard], index: int, buffer: Bytes) -> Bytes:
    """Return the bytes of an image, without access to mapped pages; for the reason, see `Shard.read`."""
    return shards[index].read(blobs[index], buffer)


# An edit changes colours or runs the user's transform. A plan depends only on the image's size, the settings, and the
# sample's epoch and position.


@dataclass(frozen=True)
class ImagePlan:
    """Plans the windows (crops) and edits of batches by the settings of a loader.

    Attributes:
        training: True: random windows, flips and colours; False: centre crops.
        size: side of the output in pixels.
        seed: seed of order and augmentation.
        augment: windows, colours and transform of the images.

    Raises:
        ConfigError: `augment.resize` is smaller than `size`.
    """

    training: bool
    size: int
    seed: int
    augment: AugmentConfig

    def __post_init__(self) -> None:
        if self.shorter_side < self.size:
            raise ConfigError(
                f"resize is {self.augment.resize}, below size {self.size}, so the crop does not fit; give a larger "
                "resize in the AugmentConfig"
            )

    @property
    def shorter_side(self) -> int:
        """Evaluation only: length of an image's shorter side before the centre crop, in pixels."""
        return round(self.size * _RESIZE_RATIO) if self.augment.resize is None else self.augment.resize

    @property
    def evaluation(self) -> Evaluation | None:
        """How evaluation scales and crops; None in training."""
        return None if self.training else self.augment.evaluation

    @property
    def has_boxes(self) -> bool:
        """Whether only a box of each window is scaled, see `Windows.boxes`."""
        return self.evaluation == "torchvision"

    @property
    def changes_colours(self) -> bool:
        """Whether edits change colours, which only training does."""
        return self._colours is not None

    def windows(self, batch: SampleBatch) -> Windows:
        """Return the window of each image of a batch."""
        widths, heights = batch.columns[WIDTH], batch.columns[HEIGHT]
        if self.training:
            return plan_random_windows(
                widths, heights, batch.positions, seed=self.seed, epoch=batch.epoch, config=self.augment
            )
        plan = plan_centre_boxes if self.has_boxes else plan_centre_windows
        return plan(widths, heights, size=self.size, resize=self.shorter_side)

    def edit(self, batch: SampleBatch) -> Edit | None:
        """Return the changes of a batch's images after crop and flip; None if there are none."""
        transform = self.augment.transform
        return plan_edit(
            batch.positions, seed=self.seed, epoch=batch.epoch, colours=self._colours, transform=transform
        )

    @property
    def _colours(self) -> AugmentConfig | None:
        return self.augment if self.training and self.augment.changes_colours else None


@dataclass(frozen=True)
class BatchDisplay:
    """What the loader knows of its batches that their arrays do not say.

    Attributes:
        pixels: format of the images, by which they are converted back to levels.
        classes: class names; label i belongs to `classes[i]`.
    """

    pixels: PixelFormat
    classes: tuple[str, ...]


@dataclass(frozen=True, repr=False)
class ImageBatch(Shown, Batch[A]):
    """One rank's part of a global batch. It unpacks as `(images, labels)`. `A` is a torch tensor or a NumPy array.

    All tensors are on the loader's device.

    Attributes:
        images: `[n, 3, size, size]` or `[n, size, size, 3]`, of the loader's output type; zeros for samples that do
            not decode and for masked ones. The loader does not reuse the memory while a reference to it exists.
        labels: `int64[n]`; None if the data set has no labels.
        mask: `bool[n]`, False for padding of the last batch, for samples that do not decode, and for masked ones,
            see `Masked`.
        epoch: epoch of the batch, counted from 0.
        positions: `int64[n]`, positions of the samples in the epoch; always a NumPy array.
        columns: the columns of the loader's argument `columns`, by name: `[n]` for numbers and booleans, otherwise a
            list of Python values with None for null.
        bad: samples that do not decode: index in the batch -> name of the sample and reason.
        sources: `int64[n]`, for a mixture: index of each sample's split in `mixture.splits` and `mixture.names`; None
            for a single split.
        display: how a notebook shows the batch; set by the loader.
        places: where the samples are stored, for `keys`; set by the loader.
    """

    images: A
    labels: A | None
    mask: A
    epoch: int
    positions: Integers
    columns: Mapping[str, A | list[Any]] = field(default_factory=dict)
    bad: Mapping[int, str] = field(default_factory=dict)
    sources: A | None = None
    display: BatchDisplay | None = field(default=None, repr=False, compare=False)
    places: BatchPlaces | None = field(default=None, repr=False, compare=False)

    @property
    def _pair(self) -> tuple[A, A | None]:
        return self.images, self.labels


# Numbers and booleans are delivered as arrays, everything else as lists of Python values.


def is_array_column(data_type: pa.DataType) -> bool:
    """Return whether a column of this type is delivered as an array or tensor."""
    return any(is_kind(data_type) for is_kind in (pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean))


def divide_columns(samples: Split | Mixture, columns: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the columns that are delivered as arrays, and those that are delivered as lists.

    Raises:
        ConfigError: a split lacks a column; or a column has numbers or booleans in one split of a mixture, and
            another type in another split.
    """
    arrays = []
    for name in dict.fromkeys(columns):
        check_column(samples, name)
        types = {split.table.sample_schema.field(name).type for split in weighted_splits(samples)}
        if any(map(is_array_column, types)):
            if len(types) > 1:
                raise ConfigError(
                    f"column {name!r} of {samples!r} has several types, {sorted(map(str, types))}; ingest the splits "
                    "with one type, or leave the column out"
                )
            arrays.append(name)
    return arrays, [name for name in columns if name not in arrays]


def read_lists(batch: SampleBatch, columns: Sequence[str]) -> dict[str, list[Any]]:
    """Return columns of a batch as lists of Python values.

    A value is None if it is null, or if its shard lacks the column, which other shards of the split have.

    Raises:
        CorruptDataError: a text is not UTF-8.
    """
    lists: dict[str, list[Any]] = {name: [None] * len(batch.positions) for name in columns}
    for part in batch.parts:
        for name, values in lists.items():
            if name in part.shard.schema.names:
                stored = part.shard.column(name)
                with text_errors(part.shard.name):
                    for index, row in zip(part.indices.tolist(), part.rows.tolist(), strict=True):
                        values[index] = python_value(stored[row])
    return lists
