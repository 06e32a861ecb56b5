"""Images per second of `ImageLoader`, and what a process with one costs.

All arms decode the same images with the same windows in the same order. Decoders are made afresh in each run and
timed once they run: the first batches are left out, and all end with the same number of batches under way.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Final, Protocol

from datasvc.cache import Cache
from datasvc.loaders import AugmentConfig, DecodeConfig, ImageLoader, PixelFormat
from datasvc.loaders.augment.augment import Windows, plan_random_windows
from datasvc.loaders.core.batches import Cursor, SampleBatches
from datasvc.loaders.decode.backend import BackendConfig
from datasvc.loaders.decode.cpu import CpuBackend
from datasvc.loaders.decode.gpu.dali import DaliPipeline
from datasvc.loaders.profiling.step_profiler import StepProfiler
from datasvc.order import OrderConfig
from datasvc.shards import Split
from datasvc.shards.format.schema import HEIGHT, IMAGE, LABEL, WIDTH
from tools.bench import fresh
from tools.bench.loader_peers import PEERS, installed_peers, rate_peer
from tools.bench.photos import ingest_photos, staged_photos
from tools.bench.runner import ROOT, Options, Report, bench, call_apart, call_command, column, environment, run_rounds

LOADER, NUMPY, MEMORY, DALI, VIEWS = "ImageLoader", "ImageLoader.numpy()", "own_in_memory", "dali_in_memory", "views"
PREFETCH = 2
WARM_UP_STEPS = 4
LARGE_BATCH = 1024
EPOCHS_OF_VIEWS = 10
STEPS_FOR_MEMORY = 40
SAMPLE_PAUSE_S = 0.02
# Peaks, each by itself: of all, of the process's own memory, and of files that it maps: libraries and shards.
PEAKS: Final = {"peak_mb": "Pss:", "peak_anonymous_mb": "Pss_Anon:", "peak_files_mb": "Pss_File:"}
COSTS: Final = {
    "first batch of a cold process": ("s", "first_batch_s"),
    "from a new loader to its first batch": ("ms", "start_ms"),
    "from a state to its first batch": ("ms", "resume_ms"),
    "peak memory (PSS)": ("MB", "peak_mb"),
    "peak of anonymous memory": ("MB", "peak_anonymous_mb"),
    "peak of mapped files, page cache": ("MB", "peak_files_mb"),
}

Fed = tuple[list, Windows]


@bench(
    repeats=5,
    images=6000,
    batch=64,
    threads=2,
    size=224,
    peers=("all", "all that are installed, none, or names of some"),
)
def loader(options: Options) -> Report:
    """Images/s of `ImageLoader`, beside the same decode and DALI's own graph, both fed from memory, and peers.

    Training at 224 pixels with 2 decoding threads and batches of 64, from photos staged in a node's cache:

    - `ImageLoader`: order, cache, windows and decode, as a training loop uses it; and without torch;
    - `own_in_memory`: the loader's decode alone, fed the same images with the same windows in the same order, from
      arrays held in memory, all planned beforehand. It is what would be left if storage, order and planning cost
      nothing;
    - `dali_in_memory`: DALI's own graph on the CPU, also fed from memory: it decodes the same windows, scales and
      normalises;
    - `views`: the loader's stream of zero-copy views without decode, at the same batch size and at 1,024;
    - peers that are installed, each on the photos as it wants them, in a process of its own; and most of them without
      decode, as "NAME, raw";
    - what a fresh process costs: first batch, resume, peak memory.

    A ratio NAME is the speed of `ImageLoader` by that of NAME; a ratio "NAME, raw" is that of the views.

    MosaicML Streaming is left out where transformers or torchvision, which it imports, are not installed.
    """
    known = installed_peers()
    peers = {"all": known, "none": []}.get(options.peers, options.peers.split(","))
    if not set(peers) <= set(known):
        sys.exit(f"--peers: installed are {', '.join(known)} of {', '.join(PEERS)}")
    least = (WARM_UP_STEPS + 2) * options.batch
    if options.images < least:
        sys.exit(f"--images must be at least {least}, that is {WARM_UP_STEPS + 2} batches")
    sizes = {"batch": options.batch, "size": options.size, "threads": options.threads}
    raw_peers = [name for name in peers if PEERS[name].is_raw]
    with staged_photos(options.folder, num_images=options.images) as (split, cache, size_bytes):
        arms = LoaderArms(split, cache, **sizes).all()
        for raw, names in ((False, peers), (True, raw_peers)):
            for name in names:
                arms[f"{name}, raw" if raw else name] = partial(
                    call_apart, rate_peer, name, options.folder / "photos", sizes, raw
                )
        rates = run_rounds(arms, options.repeats)
    measure = partial(measure_process, options.folder / "repository", options.folder / "cache", sizes)
    costs = run_rounds({"process": measure}, options.repeats)["process"]
    report = Report(
        f"Training batches of {options.batch} x {options.size} pixels from {options.images:,} photos, "
        f"{size_bytes / options.images / 1e3:.0f} kB each, {options.threads} decoding threads"
    )
    for arm, values in rates.items():
        is_encoded = arm.startswith(VIEWS) or arm.endswith(", raw")
        report.add_row(arm, "samples/s" if is_encoded else "images/s", values)
    for title, (unit, key) in COSTS.items():
        report.add_row(title, unit, column(costs, key))
    for arm in (DALI, MEMORY, NUMPY, *peers):
        report.add_ratio(arm, rates[LOADER], rates[arm])
    for name in raw_peers:
        report.add_ratio(f"{name}, raw", rates[f"{VIEWS}, batches of {options.batch}"], rates[f"{name}, raw"])
    return report


@bench(repeats=5, images=(1000, "photos"), batch=64, threads=(2, "that decode"))
def evaluation(options: Options) -> Report:
    """Evaluation that equals torchvision's resize and crop beside the faster window, and beside training: images/s.

    Each round reads all photos once, with a loader that is made afresh, from a local repository.
    """
    repository, _ = ingest_photos(options.folder, num_images=options.images)
    split = next(iter(repository.dataset("photos@1").values()))
    read = partial(read_epoch, split, options.batch, options.threads)
    rates = run_rounds(
        {
            "torchvision": partial(read, augment=AugmentConfig(evaluation="torchvision"), training=False),
            "window": partial(read, augment=AugmentConfig(evaluation="window"), training=False),
            "training": partial(read, augment=None, training=True),
        },
        options.repeats,
    )
    report = Report(f"Evaluation of {options.images} photos of 500x375 at 224, {options.threads} threads")
    report.add_rows("images/s", rates)
    for arm in ("window", "training"):
        report.add_ratio(f"{arm} / torchvision", rates[arm], rates["torchvision"])
    return report


def read_epoch(
    split: Split, batch_size: int, threads: int, *, augment: AugmentConfig | None, training: bool
) -> float:
    """Return the images per second of one epoch, without the making of the loader."""
    with ImageLoader(
        split,
        batch_size=batch_size,
        training=training,
        augment=augment,
        decode=DecodeConfig("cpu", num_threads=threads),
        seed=0,
    ) as loader:
        batches = iter(loader.numpy())
        next(batches)  # starts the threads
        started = time.perf_counter()
        num_images = sum(int(batch.mask.sum()) for batch in batches)
        return num_images / (time.perf_counter() - started)


def measure_process(repository: Path, cache: Path, sizes: dict[str, int]) -> dict[str, float]:
    """Return what one fresh process costs: seconds to its first batch, milliseconds to resume and start, peak MB."""
    words = call_command(fresh.train_with_loader, repository, cache, sizes, STEPS_FOR_MEMORY)
    started = time.perf_counter()
    with subprocess.Popen(words, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        first_batch_s = time.perf_counter() - started
        peak = dict.fromkeys(PEAKS, 0.0)
        while process.poll() is None:
            now = _proportional_mb(process.pid)
            peak = {name: max(peak[name], now.get(field, 0.0)) for name, field in PEAKS.items()}
            time.sleep(SAMPLE_PAUSE_S)
        found: dict[str, float] = json.loads(process.stdout.readline())
    return found | peak | {"first_batch_s": first_batch_s}


def _proportional_mb(pid: int) -> dict[str, float]:
    """Return the proportional set of a process that starts no others, in all and by kind; {} when it is gone."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return {}
    fields = [line.split() for line in lines if line.startswith("Pss")]
    return {name: int(kilobytes) * 1024 / 1e6 for name, kilobytes, _ in fields}


class Decoding(Protocol):
    """What decodes batches that are fed to it."""

    def feed(self, images: list, windows: Windows) -> None:
        """Start on a batch."""

    def take(self) -> object:
        """Return the oldest batch."""


class LoaderArms:
    """A staged data set, and what is timed on it.

    Args:
        split: the photos.
        cache: where they are staged.
        batch: images of a batch.
        size: side of the output in pixels.
        threads: that decode.
    """

    def __init__(self, split: Split, cache: Cache, *, batch: int, size: int, threads: int) -> None:
        self._split = split
        self._cache = cache
        self._batch, self._size, self._threads = batch, size, threads
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
