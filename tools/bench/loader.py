"""Images per second of `ImageLoader`, beside the same DALI graph fed from memory: what storage and order cost.

Training at 224 pixels with 2 decoding threads and batches of 64, from photos staged in a node's cache. Three things:

- `ImageLoader`: order, cache, windows and decode, as a training loop uses it;
- `DALI from memory`: the same graph, fed the same images with the same windows in the same order, from arrays held in
  memory, all planned beforehand. It is what would be left if storage, order and planning cost nothing;
- `sample views`: the loader's stream of zero-copy views without decode, at the same batch size and at 1,024.

Both decoders are made afresh in each repeat and timed when they run: the first batches are left out, and both end
with the same number of batches under way. Ratios are of speeds.

    python tools/bench/loader.py [--repeats 5] [--images 6000] [--batch 64] [--threads 2] [--size 224] [--json]
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from photos import write_photos
from report import Report, alternate, make_parser

import datasvc
from datasvc.cache import Cache
from datasvc.order import OrderConfig
from datasvc.shards import Split
from datasvc.shards.schema import HEIGHT, IMAGE, LABEL, WIDTH
from loaders import ImageLoader
from loaders.augment import IMAGENET_MEAN, IMAGENET_STD, AugmentConfig, Windows, plan_random_windows
from loaders.batches import Cursor, SampleBatches
from loaders.pipeline import DecodePipeline, PipelineConfig

LOADER, MEMORY, VIEWS = "ImageLoader", "DALI from memory", "sample views"
PREFETCH = 2
WARM_UP_STEPS = 4
LARGE_BATCH = 1024
EPOCHS_OF_VIEWS = 10

Fed = tuple[list, Windows]


class Bench:
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

    def contestants(self) -> dict[str, Callable[[], float]]:
        """Return what to time, in samples per second."""
        return {
            LOADER: self.run_loader,
            MEMORY: self.run_from_memory,
            f"{VIEWS}, batches of {self._batch}": lambda: self.run_views(self._batch),
            f"{VIEWS}, batches of {self._large_batch}": lambda: self.run_views(self._large_batch),
        }

    @property
    def _large_batch(self) -> int:
        return min(LARGE_BATCH, len(self._split))

    def run_loader(self) -> float:
        """Time the rest of the loader's first epoch."""
        # fmt: off
        with ImageLoader(
            self._split, batch_size=self._batch, training=True, cache=self._cache, size=self._size,
            num_threads=self._threads, prefetch=PREFETCH,
        ) as loader:
            return self._rate(batch.images.shape for batch in loader)
        # fmt: on

    def run_from_memory(self) -> float:
        """Time the same batches, fed from memory."""
        # fmt: off
        pipeline = DecodePipeline(PipelineConfig(
            batch_size=self._batch, size=self._size, mean=IMAGENET_MEAN, std=IMAGENET_STD,
            num_threads=self._threads, prefetch=PREFETCH,
        ))
        # fmt: on
        # The loader, too, begins the next epoch's batches before the last ones of this are taken.
        fed = itertools.cycle(self._in_memory)

        def decode() -> Iterator[tuple[int, ...]]:
            for images, windows in itertools.islice(fed, PREFETCH):
                pipeline.feed(images, windows)
            for _ in range(self._num_steps):
                decoded = pipeline.take()
                pipeline.feed(*next(fed))
                yield tuple(decoded.shape)

        return self._rate(decode())

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
            self._split, store, OrderConfig(), batch_size=batch_size, rank=0, world_size=1, tail="drop", blob=IMAGE,
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


def main() -> None:
    """Run the benchmark."""
    parser = make_parser(__doc__, repeats=5)
    parser.add_argument("--images", type=int, default=6000)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--folder", type=Path, help="to work in; default the folder for temporary files")
    arguments = parser.parse_args()
    least = (WARM_UP_STEPS + 1) * arguments.batch
    if arguments.images < least:
        parser.error(f"--images must be at least {least}, that is {WARM_UP_STEPS + 1} batches")
    with tempfile.TemporaryDirectory(dir=arguments.folder, prefix="datasvc-bench-") as name:
        folder = Path(name)
        size_bytes = write_photos(folder / "photos", num_images=arguments.images)
        repository = datasvc.open(str(folder / "repository"), create=True)
        repository.ingest(str(folder / "photos"), "photos")
        split = next(iter(repository.dataset("photos@1").values()))
        with Cache(folder / "cache", budget=2 * size_bytes) as cache:
            cache.stage([split])
            rates = alternate(Bench(split, cache, arguments).contestants(), arguments.repeats)
    report = Report(
        f"Training batches of {arguments.batch} x {arguments.size} pixels from {arguments.images:,} photos, "
        f"{size_bytes / arguments.images / 1e3:.0f} kB each, {arguments.threads} decoding threads"
    )
    for contestant, values in rates.items():
        report.add_row(contestant, "images/s" if contestant in (LOADER, MEMORY) else "samples/s", values)
    report.add_ratio(f"{LOADER} / {MEMORY}", rates[LOADER], rates[MEMORY])
    for contestant in rates:
        if contestant.startswith(VIEWS):
            report.add_ratio(f"{contestant} / {LOADER}", rates[contestant], rates[LOADER])
    report.show(as_json=arguments.as_json)


if __name__ == "__main__":
    main()
