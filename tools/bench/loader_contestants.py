"""What `loader.py` compares: the loader, the same decode fed from memory, DALI's own graph fed from memory, views.

All decode the same images with the same windows in the same order. Decoders are made afresh in each run and timed
once they run: the first batches are left out, and all end with the same number of batches under way.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable, Iterator
from typing import Protocol

from datasvc.cache import Cache
from datasvc.loaders import DecodeConfig, ImageLoader, PixelFormat
from datasvc.loaders.augment.augment import AugmentConfig, Windows, plan_random_windows
from datasvc.loaders.core.batches import Cursor, SampleBatches
from datasvc.loaders.decode.backend import BackendConfig
from datasvc.loaders.decode.cpu import CpuBackend
from datasvc.loaders.decode.gpu.dali import DaliPipeline
from datasvc.loaders.profiling.step_profiler import StepProfiler
from datasvc.order import OrderConfig
from datasvc.shards import Split
from datasvc.shards.format.schema import HEIGHT, IMAGE, LABEL, WIDTH

LOADER, NUMPY, MEMORY, DALI, VIEWS = "ImageLoader", "ImageLoader.numpy()", "own_in_memory", "dali_in_memory", "views"
PREFETCH = 2
WARM_UP_STEPS = 4
LARGE_BATCH = 1024
EPOCHS_OF_VIEWS = 10

Fed = tuple[list, Windows]


class Decoding(Protocol):
    """What decodes batches that are fed to it."""

    def feed(self, images: list, windows: Windows) -> None:
        """Start on a batch."""

    def take(self) -> object:
        """Return the oldest batch."""


class Contestants:
    """A staged data set, and what is timed on it.

    Args:
        split: the photos.
        cache: where they are staged.
        settings: `batch`, `size` and `threads`.
    """

    def __init__(self, split: Split, cache: Cache, settings: argparse.Namespace) -> None:
        self._split = split
        self._cache = cache
        self._batch, self._size, self._threads = settings.batch, settings.size, settings.threads
        self._num_steps = len(split) // self._batch
        self._in_memory = self._hold_in_memory()
        self._config = BackendConfig(
            batch_size=self._batch,
            size=self._size,
            pixels=PixelFormat(),
            num_threads=self._threads,
            prefetch=PREFETCH,
        )

    def all(self) -> dict[str, Callable[[], float]]:
        """Return what to time, in samples per second."""
        large = min(LARGE_BATCH, len(self._split))
        return {
            LOADER: self.run_loader,
            NUMPY: self.run_numpy,
            MEMORY: self.run_own,
            DALI: self.run_dali,
            f"{VIEWS}, batches of {self._batch}": lambda: self.run_views(self._batch),
            f"{VIEWS}, batches of {large}": lambda: self.run_views(large),
        }

    def run_loader(self) -> float:
        """Time the rest of the loader's first epoch."""
        with self._loader() as loader:
            return self._rate(batch.images.shape for batch in loader)

    def run_numpy(self) -> float:
        """Time the same without torch."""
        with self._loader() as loader:
            return self._rate(batch.images.shape for batch in loader.numpy())

    def run_own(self) -> float:
        """Time the loader's decode of the same batches, fed from memory."""
        backend = CpuBackend(self._config, backend="cpu", framework="torch", profiler=StepProfiler())
        try:
            return self._rate(self._decode(backend))
        finally:
            backend.close()

    def run_dali(self) -> float:
        """Time DALI's graph of the same batches, fed from memory."""
        return self._rate(self._decode(DaliPipeline(self._config)))

    def run_views(self, batch_size: int) -> float:
        """Time some epochs of views, shards opened and released as in training."""
        batches = self._sample_batches(batch_size)
        num_steps = EPOCHS_OF_VIEWS * (len(self._split) // batch_size)
        stream = batches.stream(Cursor(0, 0))
        batches.retire(next(stream))
        started = time.perf_counter()
        for batch in itertools.islice(stream, num_steps):
            batches.retire(batch)
        seconds = time.perf_counter() - started
        batches.close()
        return num_steps * batch_size / seconds

    def _loader(self) -> ImageLoader:
        decode = DecodeConfig("cpu", num_threads=self._threads, prefetch=PREFETCH)
        return ImageLoader(
            self._split, batch_size=self._batch, training=True, cache=self._cache, size=self._size, decode=decode
        )

    def _decode(self, decoding: Decoding) -> Iterator[object]:
        # The loader, too, begins the next epoch's batches before the last ones of this are taken.
        fed = itertools.cycle(self._in_memory)
        for images, windows in itertools.islice(fed, PREFETCH):
            decoding.feed(images, windows)
        for _ in range(self._num_steps):
            decoded = decoding.take()
            decoding.feed(*next(fed))
            yield decoded

    def _hold_in_memory(self) -> list[Fed]:
        """Copy the batches of epoch 0, and plan their windows as the loader does."""
        batches = self._sample_batches(self._batch)
        fed = []
        for batch in itertools.islice(batches.stream(Cursor(0, 0)), self._num_steps):
            windows = plan_random_windows(
                batch.columns[WIDTH], batch.columns[HEIGHT], batch.positions, seed=0, epoch=0, config=AugmentConfig()
            )
            fed.append(([blob.copy() for blob in batch.blobs], windows))
        batches.close()
        return fed

    def _sample_batches(self, batch_size: int) -> SampleBatches:
        store = self._cache.shards(self._split.repository)
        # fmt: off
        return SampleBatches(
            self._split, [store], OrderConfig(), batch_size=batch_size, rank=0, world_size=1, tail="drop", blob=IMAGE,
            columns=(WIDTH, HEIGHT, LABEL),
        )
        # fmt: on

    def _rate(self, decoded: Iterator[object]) -> float:
        """Return images per second once the decoder runs."""
        for _ in itertools.islice(decoded, WARM_UP_STEPS):
            pass
        started = time.perf_counter()
        num_steps = sum(1 for _ in decoded)
        assert num_steps == self._num_steps - WARM_UP_STEPS
        return num_steps * self._batch / (time.perf_counter() - started)
