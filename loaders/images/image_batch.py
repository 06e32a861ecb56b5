"""What `ImageLoader` hands over."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from datasvc.keyed_random import Integers

A = TypeVar("A")


@dataclass(frozen=True)
class ImageBatch(Generic[A]):
    """One rank's part of a global batch; unpacks to `images, labels`. `A` is a torch tensor or a NumPy array.

    Attributes:
        images: `[n, 3, size, size]` or `[n, size, size, 3]` of the loader's output type, on its device; zeros where a
            sample does not decode. Yours: memory is used again only once nothing refers to it any more.
        labels: `int64[n]` on that device, as are all tensors; None where the data set has none.
        mask: `bool[n]`, False for samples that only pad the last batch, or do not decode.
        epoch: of the batch.
        positions: `int64[n]`, of the samples in that epoch; a NumPy array.
        columns: the others that were asked for, by name: `[n]` for numbers and booleans, else a list of Python
            values, None for null.
        bad: samples that do not decode: index in the batch -> its name and the reason.
        sources: `int64[n]`, of a mixture: the number of each sample's split in `mixture.splits`, whose
            name is `mixture.names[number]`; None where the loader reads a split alone.
    """

    images: A
    labels: A | None
    mask: A
    epoch: int
    positions: Integers
    columns: Mapping[str, A | list[Any]] = field(default_factory=dict)
    bad: Mapping[int, str] = field(default_factory=dict)
    sources: A | None = None

    def __iter__(self) -> Iterator[A | None]:
        return iter((self.images, self.labels))
