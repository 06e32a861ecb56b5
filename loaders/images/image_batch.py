"""The batches of `ImageLoader`: images, labels, and what else a sample has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import numpy as np
import numpy.typing as npt

from datasvc.keyed_random import Integers
from datasvc.loaders.augment.mosaic import Mosaics
from datasvc.loaders.core.batch import Batch
from datasvc.loaders.core.sample_keys import BatchPlaces
from datasvc.loaders.decode.pixels import Layout, PixelFormat, corner_of
from datasvc.shards.format.schema import BOX_LABELS
from datasvc.shown import Shown

A = TypeVar("A")


@dataclass(frozen=True)
class BatchDisplay:
    """Properties of batches that their arrays do not show.

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
            not decode and for masked ones. The loader does not reuse the memory while a reference to it exists. With
            `size=Fit(...)`, see `sizes`.
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
        views: with several columns in `images=`, the images of each column by its name, shaped as `images`, which
            are those of the first column.
        masks: masks by column: `int32[n, size, size]`, class numbers; zeros where images are zeros.
        objects: objects of all samples together, a row each, in the order of the samples: `samples`, `int64[m]`,
            index of the sample in the batch; `numbers`, `int64[m]`, number of the object in the stored lists; and, as
            the loader's arguments request, `boxes`, `float32[m, 4]`, left, top, right and bottom in pixels of the
            output; `keypoints`, `float32[m, k, 3]`; `masks`, `uint8[m, size, size]`, 1 inside of the object's
            polygons or run lengths; and the columns of `ObjectConfig.columns`, such as `box_labels`.
        windows: `float64[n, 4]`, left, top, right and bottom of what the output shows, in pixels of the first image;
            always a NumPy array, as `flips`; zeros for masked samples.
        flips: `bool[n]`, whether the output is mirrored.
        num_bad_boxes: boxes that were dropped because they lie outside of their image or have no area.
        sizes: with `size=Fit(...)`, height and width of each image, `int32[n, 2]`, always a NumPy array. The image is
            at the top left; the rest, up to height and width of `images` and `masks`, is zeros. Masked samples, see
            `Masked`, have the size 0, 0. None: all images have the size of `images`.
        mosaics: with `AugmentConfig(mosaic=)`, which samples of the batch each output shows. `objects` then has
            `origins`, `int64[m]`: index of the sample in the batch whose list has the object. Labels, windows and
            flips are those of the samples themselves.
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
    views: Mapping[str, A] = field(default_factory=dict)
    masks: Mapping[str, A] = field(default_factory=dict)
    objects: Mapping[str, A] = field(default_factory=dict)
    windows: npt.NDArray[np.float64] | None = None
    flips: npt.NDArray[np.bool_] | None = None
    num_bad_boxes: int = 0
    sizes: npt.NDArray[np.int32] | None = None
    mosaics: Mosaics | None = None

    @property
    def _pair(self) -> tuple[A, A | None]:
        return self.images, self.labels

    @property
    def targets(self) -> list[dict[str, A]]:
        """The objects of each sample, in the form of torchvision's detection models: `boxes`, `labels` and so on.

        `labels` are those of `box_labels`; the other names are those of `objects`. Values are views of `objects`.
        With `sizes`, masks have the size of their image, as those of `unpadded`.
        """
        samples = cast("Any", self.objects["samples"]).tolist() if self.objects else []
        counts = np.bincount(np.array(samples, np.int64), minlength=len(self.positions))
        stops = np.cumsum(counts).tolist()
        targets = [
            {
                "labels" if name == BOX_LABELS else name: cast("Any", values)[stop - count : stop]
                for name, values in self.objects.items()
                if name != "samples"
            }
            for stop, count in zip(stops, counts.tolist(), strict=True)
        ]
        if self.sizes is not None and "masks" in self.objects:
            for target, (height, width) in zip(targets, self.sizes.tolist(), strict=True):
                target["masks"] = target["masks"][:, :height, :width]
        return targets

    @property
    def padding(self) -> A:
        """Where `images` are padding: `bool[n, height, width]`, on their device, as models with attention take it."""
        images = cast("Any", self.images)
        height, width = images.shape[2:] if self._layout == "NCHW" else images.shape[1:3]
        sizes = np.array([[height, width]]) if self.sizes is None else self.sizes
        below = np.arange(height) >= sizes[:, :1]
        beside = np.arange(width) >= sizes[:, 1:]
        found: Any = np.zeros((len(images), height, width), np.bool_) | below[:, :, None] | beside[:, None, :]
        if isinstance(images, np.ndarray):
            return cast("A", found)
        import torch

        return cast("A", torch.from_numpy(found).to(images.device))

    @property
    def unpadded(self) -> list[A]:
        """The images one by one, without the padding of `Fit`; they are views of `images`."""
        images = cast("Any", self.images)
        if self.sizes is None:
            return list(images)
        sizes = self.sizes.tolist()
        return [corner_of(image, size, self._layout) for image, size in zip(images, sizes, strict=True)]

    @property
    def _layout(self) -> Layout:
        return "NCHW" if self.display is None else self.display.pixels.layout
