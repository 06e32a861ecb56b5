"""The `BatchDecoder` of `ImageLoader`: plans crops, decodes with a backend, and masks or reports bad samples.

A bad sample is one whose image does not decode. The argument `columns` of `ImageLoader` adds columns to a batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from datasvc.errors import BadSampleError, ConfigError
from datasvc.keyed_random import Integers
from datasvc.loaders.augment.augment import (
    AugmentConfig,
    Evaluation,
    Windows,
    plan_centre_boxes,
    plan_centre_windows,
    plan_random_windows,
    plan_whole_images,
)
from datasvc.loaders.augment.edits import Edit, plan_edit
from datasvc.loaders.augment.fit import Fit
from datasvc.loaders.augment.mosaic import Mosaics, plan_mosaics
from datasvc.loaders.augment.objects import View, find_masks
from datasvc.loaders.core.batch import register_tree
from datasvc.loaders.core.batches import SampleBatch, read_lists
from datasvc.loaders.core.state import changed_fields
from datasvc.loaders.decode.backend import DecodedImages, Framework, ImageBackend, OnBad
from datasvc.loaders.decode.gpu.device_stream import place
from datasvc.loaders.decode.masks import MaskDecoder, MaskRun
from datasvc.loaders.images.annotations import (
    AnnotationColumns,
    BatchObjects,
    Drawn,
    collect_objects,
    read_blobs,
    read_sizes,
)
from datasvc.loaders.images.image_batch import BatchDisplay, ImageBatch
from datasvc.loaders.profiling.step_profiler import StepProfiler
from datasvc.loaders.profiling.step_times import Stage
from datasvc.printable import count_text
from datasvc.shards import Shard
from datasvc.shards.format.mapped_file import Bytes
from datasvc.shards.format.schema import HEIGHT, LABEL, WIDTH

_SQUARE_SETTINGS: Final = {"scale", "ratio", "resize", "evaluation", "mosaic", "mosaic_epochs"}  # of `AugmentConfig`
_RESIZE_RATIO = 256 / 224  # of the shorter side before the centre crop to the crop's side, as usual for ImageNet


class ImageDecoder:
    """A `BatchDecoder` of images.

    Args:
        backend: decoder of the images, which this object closes.
        framework: array type of the batches.
        columns: the columns of images, masks, boxes and keypoints.
        masks: decoder of the masks, which this object closes; None without masks.
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
        columns: AnnotationColumns,
        masks: MaskDecoder | None,
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
        self._columns, self._masks = columns, masks
        self._plan = plan
        self._describe = describe
        self._numeric_columns, self._list_columns = numbers, lists
        self._on_bad = on_bad
        self._is_mixture, self._device = is_mixture, device
        self._display = display
        self._profiler = profiler
        self._in_progress: deque[FedBatch] = deque()

    def feed(self, batch: SampleBatch) -> None:
        """See `BatchDecoder`."""
        # Do not decode masked samples: their images are zeros, so that nothing of them reaches batch statistics.
        kept = batch.without_masked()
        widths, heights = image_sizes(kept, self._columns)
        windows = self._plan.windows(kept, widths, heights)
        shards = kept.sample_shards
        others = [read_blobs(kept, name) for name in self._columns.images[1:]]
        blobs = [blob for column in (kept.blobs, *others) for blob in column]
        placed = windows if not others else windows.repeat(widths, heights, 1 + len(others))
        edit = self._plan.edit(kept, 1 + len(others))
        self._backend.feed(blobs, placed, edit, partial(_read, blobs, shards * (1 + len(others))))
        views, runs = [], []
        if self._columns.has_objects or self._masks is not None:
            views = self._columns.views(windows, widths, heights, self._plan.side)
        frame = self._plan.frame(windows)
        if self._masks is not None:
            for name in self._columns.masks:
                masks = read_blobs(kept, name)
                runs.append(self._masks.start(masks, views, partial(_read, masks, shards), frame))
        drawn: list[Drawn] = []
        if self._masks is not None and self._columns.polygons is not None:
            names = [self._columns.polygons, self._columns.runs]
            stored = read_lists(kept, [name for name in names if name is not None])
            polygons, lengths = (stored.get(name or "", [None] * len(views)) for name in names)
            if isinstance(self._plan.size, Fit):  # before they are drawn
                self._plan.size.check_masks(int(sum(map(np.sum, map(find_masks, polygons, lengths)))), frame)
            drawn = self._masks.draw(polygons, lengths, views)
        self._in_progress.append(FedBatch(batch, windows, views, runs, drawn))

    def take(self) -> ImageBatch[Any]:
        """See `BatchDecoder`."""
        with self._profiler.waiting(Stage.DECODE):
            decoded = self._backend.take()
            fed = self._in_progress.popleft()
            masks = [run.finish() for run in fed.masks]
        with self._profiler.stage(Stage.COLLATE):
            return self._collate(fed, decoded, masks)

    def close(self) -> None:
        """See `BatchDecoder`."""
        self._backend.close()
        if self._masks is not None:
            self._masks.close()
        self._in_progress.clear()

    def _collate(
        self, fed: FedBatch, decoded: DecodedImages, masks: Sequence[tuple[npt.NDArray[np.int32], dict[int, str]]]
    ) -> ImageBatch[Any]:
        """Return the batch for the caller; bad samples are masked."""
        batch, kept, count = fed.batch, fed.kept, len(fed.windows.flips)
        images = [
            decoded.images[number * count : (number + 1) * count] for number in range(len(self._columns.images))
        ]
        reasons: dict[int, str] = {}
        for index, reason in sorted(decoded.bad.items()):
            name = self._columns.images[index // count]
            reasons.setdefault(int(kept[index % count]), reason if len(images) == 1 else f"{name}: {reason}")
        for name, (_, found) in zip(self._columns.masks, masks, strict=True):
            for index, reason in sorted(found.items()):
                reasons.setdefault(int(kept[index]), f"{name}: {reason}")
        objects = BatchObjects()
        mosaics = self._plan.mosaics(batch)
        if mosaics is not None:
            zeros = np.setdiff1d(np.arange(len(batch.positions)), kept).tolist()
            mosaics = mosaics.without([*zeros, *reasons])
        if self._columns.has_objects:
            views = {int(index): view for index, view in zip(kept, fed.views, strict=True)}
            views = {index: view for index, view in views.items() if index not in reasons}
            drawn = dict(zip(kept.tolist(), fed.drawn, strict=False))  # none without polygons
            lists = read_lists(batch, self._columns.lists)
            objects = collect_objects(self._columns, lists, views, drawn, self._plan.frame(fed.windows), mosaics)
            self._check(batch, objects.raised, "objects=ObjectConfig(on_bad='drop') or 'mask'")
            reasons |= objects.bad
        bad = self._check(batch, reasons, "decode=DecodeConfig(on_bad='mask')", is_masked=self._on_bad == "mask")
        # The images of a sample are zero together.
        spoiled = sorted(reasons) if len(images) + len(masks) > 1 or objects.bad else []
        filled = [_fill(each, kept, batch, spoiled) for each in images]
        shown = {
            name: _fill(found, kept, batch, spoiled)
            for name, (found, _) in zip(self._columns.masks, masks, strict=True)
        }
        if mosaics is not None:
            mosaics = mosaics.without(sorted(objects.bad))
            is_planar = self._display.pixels.layout == "NCHW"
            for each in filled:
                mosaics.compose(each, channels_first=is_planar)
            for each in shown.values():
                mosaics.compose(each)
        delivered = [self._deliver(each) for each in filled]
        mask = batch.mask
        if bad:
            # Change a copy: the ledger still needs `batch.mask`, in which bad samples are True.
            mask = mask.copy()
            mask[list(bad)] = False
        stored = batch.columns.get(LABEL)
        # A column `label` of another type is in the batch only if the caller requested it, see `holds_labels`.
        labels = stored.astype(np.int64) if stored is not None and stored.dtype.kind in "iu" else None
        columns: dict[str, Any] = {name: self._deliver(batch.columns[name]) for name in self._numeric_columns}
        columns |= read_lists(batch, self._list_columns)
        return ImageBatch(
            images=delivered[0],
            labels=None if labels is None else self._deliver(labels),
            mask=self._deliver(mask),
            epoch=batch.epoch,
            positions=batch.positions,
            columns=columns,
            bad=bad,
            sources=self._deliver(batch.sources) if self._is_mixture else None,
            display=self._display,
            views=dict(zip(self._columns.images, delivered, strict=True)) if len(delivered) > 1 else {},
            masks={name: self._deliver(each) for name, each in shown.items()},
            objects={name: self._deliver(values) for name, values in objects.arrays.items()},
            windows=_fill(fed.windows.scaled, kept, batch),
            flips=_fill(fed.windows.flips.astype(np.bool_), kept, batch),
            num_bad_boxes=objects.num_bad_boxes,
            mosaics=mosaics,
            sizes=None if fed.windows.sizes is None else _fill(fed.windows.sizes, kept, batch),
        )

    def _check(
        self, batch: SampleBatch, reasons: Mapping[int, str], setting: str, *, is_masked: bool = False
    ) -> dict[int, str]:
        """Return the reasons with the names of samples. Raises BadSampleError: there are some, not masked."""
        bad = {
            index: f"{self._describe(batch, index)}: {reason}"
            for index, reason in sorted(reasons.items())
            if batch.mask[index]  # a failure of a padding sample loses no data
        }
        if bad and not is_masked:
            raise BadSampleError(
                f"{len(bad)} of {count_text(len(batch.blobs), 'sample')} of a batch cannot be decoded: "
                f"{'; '.join(bad.values())}; "
                f"delete them from the data set, ingest it with --decode-check --on-bad skip, or give {setting}"
            )
        return bad

    def _deliver(self, values: Any) -> Any:
        """Return values in the caller's framework, on the device; a tensor on the CPU shares the array's memory."""
        # Values that are not a NumPy array are a tensor of the backend, which is on the device already.
        if self._framework == "numpy" or not isinstance(values, np.ndarray):
            return values
        import torch

        return torch.from_numpy(values) if self._device is None else place(values, self._device)


@dataclass(frozen=True)
class FedBatch:
    """A batch in progress; windows, views, masks and drawn masks are those of its samples that are not masked."""

    batch: SampleBatch
    windows: Windows
    views: Sequence[View]
    masks: Sequence[MaskRun]
    drawn: Sequence[Drawn]

    @property
    def kept(self) -> Integers:
        """Indices of the samples that are not masked, `int64[k]`."""
        masked = self.batch.masked
        return np.arange(len(self.batch.positions)) if masked is None else np.flatnonzero(~masked)


def _fill(values: Any, kept: Integers, batch: SampleBatch, spoiled: Sequence[int] = ()) -> Any:
    """Return values of the samples `kept` as values of all samples of a batch, with zeros for the others.

    The samples `spoiled` become zeros too.
    """
    if len(kept) == len(batch.positions):
        if len(spoiled):
            values[list(spoiled)] = 0
        return values
    shape = (len(batch.positions), *values.shape[1:])
    if isinstance(values, np.ndarray):
        zeros: Any = np.zeros(shape, values.dtype)
        zeros[kept] = values
    else:
        zeros = values.new_zeros(shape)
        zeros[place(kept, str(zeros.device)) if zeros.is_cuda else kept] = values
    if len(spoiled):
        zeros[list(spoiled)] = 0
    return zeros


def image_sizes(batch: SampleBatch, columns: AnnotationColumns) -> tuple[Integers, Integers]:
    """Return widths and heights of the first images of a batch, `int[n]` each, in pixels."""
    return (batch.columns[WIDTH], batch.columns[HEIGHT]) if columns.has_stored_sizes else read_sizes(batch)


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
        size: side of the output in pixels, or how images keep their own shape.
        seed: seed of order and augmentation.
        augment: windows, colours and transform of the images.

    Raises:
        ConfigError: `augment.resize` is smaller than `size`, or a setting of windows is given with a `Fit`.
    """

    training: bool
    size: int | Fit
    seed: int
    augment: AugmentConfig

    def __post_init__(self) -> None:
        if isinstance(self.size, Fit):
            if given := _SQUARE_SETTINGS & changed_fields(self.augment).keys():
                raise ConfigError(
                    f"AugmentConfig({', '.join(sorted(given))}) is given for images that keep their own shape, which "
                    "are shown as they are: leave it out, or give size in pixels"
                )
        elif self.shorter_side < self.side:
            raise ConfigError(
                f"resize is {self.augment.resize}, below size {self.size}, so the crop does not fit; give a larger "
                "resize in the AugmentConfig"
            )

    @property
    def side(self) -> int:
        """Side of the output in pixels; 1 with a `Fit`."""
        return self.size if isinstance(self.size, int) else 1

    def frame(self, windows: Windows) -> tuple[int, int]:
        """Return height and width of the output of a batch with these windows."""
        return windows.frame or (self.side, self.side)

    @property
    def shorter_side(self) -> int:
        """Evaluation only: length of an image's shorter side before the centre crop, in pixels."""
        return round(self.side * _RESIZE_RATIO) if self.augment.resize is None else self.augment.resize

    @property
    def evaluation(self) -> Evaluation | None:
        """How evaluation scales and crops; None in training, and for images that keep their own shape."""
        return None if self.training or isinstance(self.size, Fit) else self.augment.evaluation

    @property
    def has_boxes(self) -> bool:
        """Whether only a box of each window is scaled, see `Windows.boxes`."""
        return self.evaluation == "torchvision"

    @property
    def changes_colours(self) -> bool:
        """Whether edits change colours, which only training does."""
        return self._colours is not None

    def windows(self, batch: SampleBatch, widths: Integers, heights: Integers) -> Windows:
        """Return the window of each first image of a batch; `widths` and `heights` are their sizes, `int[n]`."""
        drawn: dict[str, Any] = {"seed": self.seed, "epoch": batch.epoch, "config": self.augment}
        if isinstance(self.size, Fit):
            return self.size.plan(widths, heights, batch.positions, training=self.training, **drawn)
        if self.training:
            return plan_random_windows(widths, heights, batch.positions, **drawn)
        if self.evaluation == "whole":
            return plan_whole_images(widths, heights)
        plan = plan_centre_boxes if self.has_boxes else plan_centre_windows
        return plan(widths, heights, size=self.side, resize=self.shorter_side)

    def mosaics(self, batch: SampleBatch) -> Mosaics | None:
        """Return the mosaics of a batch; None without. Raises ConfigError: see `plan_mosaics`."""
        if not self.training or not self.augment.mosaic:
            return None
        is_sample = batch.mask if batch.masked is None else batch.mask | batch.masked
        epochs = self.augment.mosaic_epochs
        return plan_mosaics(
            batch.positions,
            is_sample,
            batch.step.num_samples,
            seed=self.seed,
            epoch=batch.epoch,
            size=self.side,
            probability=self.augment.mosaic if epochs is None or batch.epoch < epochs else 0.0,
        )

    def edit(self, batch: SampleBatch, num_images: int = 1) -> Edit | None:
        """Return the changes of a batch's images after crop and flip, equal for all images of a sample; or None."""
        transform = self.augment.transform
        positions = np.tile(batch.positions, num_images)
        return plan_edit(positions, seed=self.seed, epoch=batch.epoch, colours=self._colours, transform=transform)

    @property
    def _colours(self) -> AugmentConfig | None:
        return self.augment if self.training and self.augment.changes_colours else None
