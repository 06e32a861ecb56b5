"""The batch type of `ImageLoader`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from datasvc.keyed_random import Integers
from datasvc.loaders.core.batch import Batch
from datasvc.shown import Shown

if TYPE_CHECKING:
    from datasvc.loaders.decode.pixels import PixelFormat

A = TypeVar("A")


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
            not decode. The loader does not reuse the memory while a reference to it exists.
        labels: `int64[n]`; None if the data set has no labels.
        mask: `bool[n]`, False for padding of the last batch and for samples that do not decode.
        epoch: epoch of the batch, counted from 0.
        positions: `int64[n]`, positions of the samples in the epoch; always a NumPy array.
        columns: the columns of the loader's argument `columns`, by name: `[n]` for numbers and booleans, otherwise a
            list of Python values with None for null.
        bad: samples that do not decode: index in the batch -> name of the sample and reason.
        sources: `int64[n]`, for a mixture: index of each sample's split in `mixture.splits` and `mixture.names`; None
            for a single split.
        display: how a notebook shows the batch; set by the loader.
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

    @property
    def _pair(self) -> tuple[A, A | None]:
        return self.images, self.labels
