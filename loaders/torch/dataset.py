"""Map-style torch data set of a split: any process, such as a `DataLoader` worker, can read its samples by number.

The randomness of a user's transform is a function of (seed, epoch, position).
"""

from __future__ import annotations

import inspect
import logging
import operator
import os
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import torch
import torch.utils.data
from numpy.random import mtrand
from PIL import Image

from datasvc.cache import Cache
from datasvc.errors import BadSampleError, ConfigError
from datasvc.keyed_random import Keys, derive_keys
from datasvc.loaders.augment.augment import generators
from datasvc.loaders.core.mixture import check_samples
from datasvc.loaders.torch.reading import CacheAddress, SampleReader, check_columns, reopen
from datasvc.loaders.torch.states import ServedIndex
from datasvc.shards import Split
from datasvc.shards.format.schema import HEIGHT, IMAGE, KEY, WIDTH
from datasvc.shards.images.exif import read_orientation, turn_upright
from datasvc.shards.images.header import open_image, to_rgb

MASK = "mask"
_logger = logging.getLogger(__name__)


Decode = Literal["pil", "numpy"] | None


_GLOBAL_GENERATORS = 48  # number of this use of keys. Each use has another number, so that draws are independent
_BOUND: Final = 1 << 63  # all seeds are below this number, so that they fit into int64


class Dataset(torch.utils.data.Dataset[Any]):
    """A split as `torch.utils.data.Dataset`: `dataset[5]` is a sample, a dict of columns, or `transform(sample)`.

    A pickled data set has the locations of split and cache, but no open file. Every process opens shards and cache
    itself at its first read, so workers may be forked or spawned. But a cache that was open before a fork cannot be
    used in the child: give its folder instead of the `Cache`, or `multiprocessing_context="spawn"` to the
    `DataLoader`.

    With an `OrderBatchSampler`, the randomness of a sample is a function of (seed, epoch, position). If `transform`
    has a parameter `generator`, it gets a `numpy.random.Generator`. The global generators of torch (CPU), numpy and
    Python are seeded before the call, and restored afterwards. With plain numbers, as from torch's own samplers, the
    global generators are not seeded, and `generator` is seeded from that of torch.

    Args:
        split: a split of a data-set version.
        columns: names of the columns of a sample; None: all columns of the split.
        decode: type of the column `image`: "pil" or "numpy" (`uint8[height, width, 3]`), both upright and RGB; None:
            the encoded bytes.
        transform: function that gets a sample's dict and returns the value to serve. Spawned workers unpickle it.
        cache: cache of the node, or its folder; None: read a local repository in place, and a remote one into memory.
        on_bad: treatment of images that do not decode: "raise" an error, or "mask": serve a black image and log a
            warning. With "mask", all samples have a field `mask`, which is False for these images. If samples of the
            split were purged, all have it too: it is False for these, and their images are one black pixel.

    Raises:
        ConfigError: an argument is out of range; a column is missing; the split has a column `mask` of its own.
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
        check_samples(split, or_mixture=False)
        if decode not in ("pil", "numpy", None):
            raise ConfigError(f"decode is {decode!r}; expected 'pil', 'numpy' or None")
        if on_bad not in ("raise", "mask"):
            raise ConfigError(f"on_bad is {on_bad!r}; expected 'raise' or 'mask'")
        if transform is not None and not callable(transform):
            raise ConfigError(f"transform is {transform!r}; expected a callable with one argument, the sample")
        self.split = split
        self.columns = check_columns(split, columns)
        self._decode = decode
        self._transform = None if transform is None else SeededTransform(transform)
        self._address = None if cache is None else CacheAddress.of(cache)
        self._on_bad = on_bad
        self._pid = os.getpid()  # of the process that created or unpickled this object
        self._reader: SampleReader | None = None
        if on_bad == "mask":
            self._check_mask()

    def __len__(self) -> int:
        return len(self.split)

    def __repr__(self) -> str:
        return f"Dataset({self.split!r})"

    @property
    def classes(self) -> tuple[str, ...]:
        """Class names in the order of label values; empty without labels."""
        return self.split.classes

    def __getitem__(self, index: int) -> Any:
        """Return a sample. Negative numbers count from the end.

        Raises:
            IndexError: `index` is out of range.
            TypeError: `index` is not an integer.
            BadSampleError: the image does not decode; the message names the sample.
            CacheFullError, CorruptDataError, NotFoundError, UnavailableError: the cache or the repository fails.
        """
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return several samples in the order of `indices`, read shard by shard. For errors see `__getitem__`."""
        # A forked process opens clients, shards and cache again, because those of its parent do not work there.
        if self._reader is None or self._reader.pid != os.getpid():
            split = self.split if self._pid == os.getpid() else reopen(self.split)
            self._reader = SampleReader(split, self._address)
        if self.split.table.weights and not all(isinstance(index, ServedIndex) for index in indices):
            warnings.warn(
                f"{self.split!r} has weights, but each sample is read as often as the sampler gives its index: give "
                "OrderBatchSampler(view, ...) to the DataLoader, as its batch_sampler",
                RuntimeWarning,
                stacklevel=2,
            )
        numbers = [self._number(index) for index in indices]
        samples = self._reader.read(numbers, self._read_columns)
        return [
            self._finish(sample, number, index)
            for sample, number, index in zip(samples, numbers, indices, strict=True)
        ]

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_reader": None}  # the reader's open files and its lock cannot be pickled

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._pid = os.getpid()

    @property
    def _read_columns(self) -> tuple[str, ...]:
        if IMAGE not in self.columns or self._decode is None:
            return self.columns
        # If an image does not decode, the message needs its key, and the black image its width and height.
        return tuple(dict.fromkeys((*self.columns, KEY, WIDTH, HEIGHT)))

    def _number(self, index: int) -> int:
        """Return the number of a sample, at least 0. A negative `index` counts from the end."""
        try:
            signed = operator.index(index)
        except TypeError as error:
            raise TypeError(
                f"the index of a sample is {index!r}; expected an integer, which reads one sample: use a sampler to "
                "read several"
            ) from error
        number = signed + len(self.split) if signed < 0 else signed
        if not 0 <= number < len(self.split):
            raise IndexError(f"sample {signed} is outside 0..{len(self.split) - 1} of {self.split!r}")
        return number

    def _finish(self, raw: dict[str, Any], number: int, index: int) -> Any:
        """Decode and transform one sample."""
        sample = {name: raw[name] for name in self.columns}
        served = index if isinstance(index, ServedIndex) else None
        is_decoded = not self.split.is_purged(number)
        if self._decode is not None and sample.get(IMAGE) is not None:
            if is_decoded:
                sample[IMAGE], is_decoded = self._decoded(raw, number)
            else:
                sample[IMAGE] = black_image(1, 1, self._decode)
        is_real = None if served is None else served.counts  # False for padding and masked samples; None: neither
        if self._on_bad == "mask" or is_real is not None or self.split.table.redacted:
            # The constructor cannot check this for padding: only an index shows that the order of the sampler pads.
            self._check_mask()
            sample[MASK] = is_decoded and is_real is not False
        return sample if self._transform is None else self._transform(sample, served)

    def _decoded(self, raw: dict[str, Any], number: int) -> tuple[Any, bool]:
        """Return the image of a sample, and whether it decodes. With `on_bad="mask"`, a bad image is black."""
        try:
            return decode_image(raw[IMAGE], self._decode), True
        except BadSampleError as error:
            message = f"{self.split.dataset}/{self.split.name}: sample {number}, {raw[KEY]!r}: {error}"
            if self._on_bad == "raise":
                raise BadSampleError(f"{message}; delete it, or give on_bad='mask'") from error
            _logger.warning("masked: %s", message)
            return black_image(raw[WIDTH], raw[HEIGHT], self._decode), False

    def _check_mask(self) -> None:
        """Raise ConfigError if the added field `mask` would replace a column of the split."""
        if MASK in self.columns:
            raise ConfigError(
                f"{self.split!r} has a column {MASK!r} of its own, but on_bad='mask' or tail='pad' adds one; leave "
                "it out of columns=, or use neither option"
            )


# `Dataset` uses it for its argument `decode`. `ImageLoader` has other decoders, which decode only windows.


def decode_image(content: bytes, decode: Decode) -> Any:
    """Return an encoded image as `PIL.Image`, or as `uint8[height, width, 3]` for "numpy".

    Raises:
        BadSampleError: the image does not decode.
    """
    with open_image(content) as opened:
        kind = opened.format or ""
        upright = to_rgb(turn_upright(opened, read_orientation(content, kind)), kind)
        # Pillow decodes when pixels are needed. Decode now, because `open_image` converts errors inside this block.
        upright.load()
    return upright if decode == "pil" else np.array(upright)


def black_image(width: int, height: int, decode: Decode) -> Any:
    """Return a black image in place of one that does not decode. The size is in the sample's columns."""
    return Image.new("RGB", (width, height)) if decode == "pil" else np.zeros((height, width, 3), np.uint8)


# A transform draws from its parameter `generator`, or from the global generators of torch, numpy and Python, as most
# transform libraries do. In both cases a sample gets the same numbers in every process and after every restart.


class SeededTransform:
    """Calls a user's transform with random numbers that depend on the sample's position.

    The transform gets a `numpy.random.Generator` if it has a parameter `generator`.
    """

    def __init__(self, transform: Callable[..., Any]) -> None:
        self._transform = transform
        self._takes_generator = _has_generator(transform)

    def __call__(self, sample: dict[str, Any], served: ServedIndex | None) -> Any:
        """Return the transformed sample. Without an order, `served` is None and global generators are not seeded."""
        if served is None:
            return self._call(sample, generator_without_order)
        with global_generators_at(served):
            return self._call(sample, lambda: generator_at(served))

    def _call(self, sample: dict[str, Any], make_generator: Callable[[], np.random.Generator]) -> Any:
        if self._takes_generator:
            return self._transform(sample, generator=make_generator())
        return self._transform(sample)


def generator_at(index: ServedIndex) -> np.random.Generator:
    """Return a new generator for one served sample, equal to the one of `ImageLoader` at the same position."""
    return generators(index.seed, index.epoch, np.array([index.position]))[0]


def generator_without_order() -> np.random.Generator:
    """Return a new generator for a sample without an order, seeded from torch's global generator."""
    # The limit of `randint` must itself fit into int64.
    return np.random.default_rng(int(torch.randint(_BOUND - 1, (), dtype=torch.int64, device="cpu").item()))


@contextmanager
def global_generators_at(index: ServedIndex) -> Iterator[None]:
    """Seed the global generators of torch (CPU), numpy and Python for one served sample. Restore them afterwards."""
    counter = np.array([0, 0, index.position, 0], np.uint64)  # so far apart that positions share no random numbers
    bits = np.random.Generator(np.random.Philox(key=_keys(index.seed, index.epoch), counter=counter))
    torch_seed, numpy_seed, python_seed = bits.integers(0, _BOUND, 3).tolist()
    # Replace numpy's generator during the block, because saving its state takes ten times as long.
    torch_state, numpy_generator, python_state = torch.get_rng_state(), mtrand.get_bit_generator(), random.getstate()
    mtrand.set_bit_generator(_substitute_generator())
    # numpy takes a seed as words of 32 bits.
    np.random.seed([numpy_seed >> 32, numpy_seed & 0xFFFFFFFF])  # noqa: NPY002 - transforms draw from the global one
    torch.default_generator.manual_seed(torch_seed)
    random.seed(python_seed)
    try:
        yield
    finally:
        torch.set_rng_state(torch_state)
        mtrand.set_bit_generator(numpy_generator)
        random.setstate(python_state)


@lru_cache(maxsize=1)
def _substitute_generator() -> np.random.MT19937:
    """Return the generator that replaces numpy's global one. It is seeded for each sample, so one is enough."""
    return np.random.MT19937(0)


@lru_cache(maxsize=16)
def _keys(seed: int, epoch: int) -> Keys:
    """Return the keys of an epoch, cached because every sample of the epoch needs them."""
    return derive_keys(seed, epoch, _GLOBAL_GENERATORS, 2)


def _has_generator(transform: Callable[..., Any]) -> bool:
    try:
        return "generator" in inspect.signature(transform).parameters
    except (ValueError, TypeError):  # a C function without a signature
        return False
