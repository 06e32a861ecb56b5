"""The samples of a split as a map-style data set of torch: any sample by its number, from any process."""

from __future__ import annotations

import logging
import operator
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch.utils.data

from datasvc.cache import Cache
from datasvc.errors import BadSampleError, ConfigError
from datasvc.loaders.torch.images import Decode, black_image, check_decode, decode_image
from datasvc.loaders.torch.randomness import PlacedTransform
from datasvc.loaders.torch.reading import CacheAddress, SampleReader, check_columns, reopen
from datasvc.loaders.torch.served import ServedIndex
from datasvc.shards import Split
from datasvc.shards.format.schema import HEIGHT, IMAGE, KEY, WIDTH

MASK = "mask"
_logger = logging.getLogger(__name__)


class Dataset(torch.utils.data.Dataset[Any]):
    """A split as `torch.utils.data.Dataset`: `dataset[5]` is a dict of columns, or what `transform` makes of it.

    It pickles as the address of its split. Every process that reads opens shards and cache for itself, when it reads
    first, so workers may be forked or spawned. Only a cache that was open before a fork is refused in the child: give
    its folder instead of the object, or `multiprocessing_context="spawn"` to the loader.

    Where an `OrderBatchSampler` asks, the randomness of a sample is a function of (seed, epoch, position):
    `transform` gets a `numpy.random.Generator` if it has a parameter `generator`, and the global generators of torch
    (CPU), numpy and Python are seeded around it, and restored. Where a number alone asks, as of torch's own samplers,
    it draws as any transform of torch does.

    Args:
        split: of a data-set version.
        columns: what a sample has; None: all columns of the split.
        decode: of the column `image`: "pil" or "numpy" (`uint8[height, width, 3]`), upright and RGB; None: the bytes.
        transform: called with the dict of a sample; what it returns is served. It must pickle to be spawned.
        cache: the node's, or its folder; None reads a local repository in place, and a remote one into memory.
        on_bad: an image that does not decode: "raise", or "mask" it: it is black, logged, and `sample["mask"]`, which
            all samples then have, is False.

    Raises:
        ConfigError: an argument is out of range, or names no column; a column `mask` is in the way.
    """

    def __init__(
        self,
        split: Split,
        *,
        columns: Sequence[str] | None = None,
        decode: Decode = "pil",
        transform: Callable[..., Any] | None = None,
        cache: Cache | str | Path | None = None,
        on_bad: Literal["raise", "mask"] = "raise",
    ) -> None:
        check_decode(decode)
        if on_bad not in ("raise", "mask"):
            raise ConfigError(f"on_bad is {on_bad!r}; expected 'raise' or 'mask'")
        if transform is not None and not callable(transform):
            raise ConfigError(f"transform is {transform!r}; expected a callable that takes a sample")
        self.split = split
        self.columns = check_columns(split, columns)
        self._decode = decode
        self._transform = None if transform is None else PlacedTransform(transform)
        self._address = None if cache is None else CacheAddress.of(cache)
        self._on_bad = on_bad
        self._process = os.getpid()
        self._reader: SampleReader | None = None
        if on_bad == "mask":
            self._check_mask()

    def __len__(self) -> int:
        return len(self.split)

    def __repr__(self) -> str:
        return f"Dataset({self.split!r})"

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the labels, index by index; empty without labels."""
        return self.split.classes

    def __getitem__(self, index: int) -> Any:
        """Return a sample; negative numbers count from the end.

        Raises:
            IndexError: out of range.
            TypeError: no integer.
            BadSampleError: its image does not decode; names it.
            CacheFullError, CorruptDataError, NotFoundError, UnavailableError: from the cache or the repository.
        """
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return several samples, in the order of their numbers here; shard by shard within. Raises as one would."""
        if self._reader is None or self._reader.process != os.getpid():
            split = self.split if self._process == os.getpid() else reopen(self.split)
            self._reader = SampleReader(split, self._address)
        numbers = [self._number(index) for index in indices]
        samples = self._reader.read(numbers, self._read_columns)
        return [
            self._finish(sample, number, index)
            for sample, number, index in zip(samples, numbers, indices, strict=True)
        ]

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_reader": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._process = os.getpid()

    @property
    def _read_columns(self) -> tuple[str, ...]:
        if IMAGE not in self.columns or self._decode is None:
            return self.columns
        return tuple(dict.fromkeys((*self.columns, KEY, WIDTH, HEIGHT)))

    def _number(self, index: int) -> int:
        try:
            number = operator.index(index)
        except TypeError as error:
            raise TypeError(
                f"a sample is asked for by its number, not by {index!r}; a list goes to a sampler"
            ) from error
        wanted = number + len(self.split) if number < 0 else number
        if not 0 <= wanted < len(self.split):
            raise IndexError(f"sample {number} is outside 0..{len(self.split) - 1} of {self.split!r}")
        return wanted

    def _finish(self, raw: dict[str, Any], number: int, index: int) -> Any:
        """Decode and transform one sample."""
        sample = {name: raw[name] for name in self.columns}
        served = index if isinstance(index, ServedIndex) else None
        decoded = True
        if self._decode is not None and sample.get(IMAGE) is not None:
            sample[IMAGE], decoded = self._decoded(raw, number)
        counts = None if served is None else served.counts
        if self._on_bad == "mask" or counts is not None:
            self._check_mask()
            sample[MASK] = decoded and counts is not False
        return sample if self._transform is None else self._transform(sample, served)

    def _decoded(self, raw: dict[str, Any], number: int) -> tuple[Any, bool]:
        try:
            return decode_image(raw[IMAGE], self._decode), True
        except BadSampleError as error:
            said = f"{self.split.dataset}/{self.split.name}: sample {number}, {raw[KEY]!r}: {error}"
            if self._on_bad == "raise":
                raise BadSampleError(f"{said}; delete it, or give on_bad='mask'") from error
            _logger.warning("masked: %s", said)
            return black_image(raw[WIDTH], raw[HEIGHT], self._decode), False

    def _check_mask(self) -> None:
        if MASK in self.columns:
            raise ConfigError(
                f"{self.split!r} has a column {MASK!r} of its own, which says here what counts; name the other "
                "columns, or use neither on_bad='mask' nor tail='pad'"
            )
