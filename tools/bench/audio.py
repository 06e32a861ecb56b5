"""Clips per second of `AudioLoader`, beside a loop over soundfile and torch's DataLoader."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import soundfile
import torch.utils.data

import datasvc
from datasvc.cache import Cache
from datasvc.loaders import AudioLoader
from datasvc.shards import Split
from tools.bench.runner import Options, Report, bench, rate_of, run_rounds

WAVES, MELS, LOOP, TORCH = "AudioLoader, waves", "AudioLoader, mels", "soundfile loop", "torch DataLoader"
RATE = 16_000
EXTENSIONS = ("wav", "flac", "mp3", "ogg")


class ClipFiles(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Random clips of files, decoded by soundfile: what a plain loop and torch's DataLoader read."""

    def __init__(self, paths: Sequence[Path], seconds: float) -> None:
        self._paths, self._frames = paths, round(seconds * RATE)

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> np.ndarray:
        with soundfile.SoundFile(self._paths[index]) as file:
            file.seek(int(np.random.randint(file.frames - self._frames + 1)))  # noqa: NPY002 - what workers seed
            return file.read(self._frames, dtype="float32")


@bench(repeats=5, files=600, batch=32, workers=2)
def audio(options: Options) -> Report:
    """Clips per second of `AudioLoader`, beside a loop over soundfile and torch's DataLoader.

    Files of 5 seconds at 16 kHz, a quarter each of WAV, FLAC, MP3 and Ogg Vorbis; random clips of 1 second. Each
    round is an epoch, with the start of threads or workers: ours from a staged cache, theirs from files that are in
    the page cache. Ratios are of times: how many times as long as `AudioLoader` with waves the others take.
    """
    if options.files < 2 * options.batch:
        sys.exit(f"--files must be at least {2 * options.batch}, two batches")
    source = options.folder / "source"
    source.mkdir()
    random = np.random.default_rng(0)
    seconds = np.arange(5 * RATE) / RATE
    for number in range(options.files):
        wave = 0.3 * np.sin(6.28 * random.uniform(200, 2_000) * seconds) + 0.05 * random.standard_normal(5 * RATE)
        soundfile.write(source / f"{number:06}.{EXTENSIONS[number % len(EXTENSIONS)]}", wave, RATE)
    repository = datasvc.open(str(options.folder / "repository"), create=True)
    repository.datasets.ingest(str(source), "sounds")
    split = repository.dataset("sounds@1")["train"]
    files = ClipFiles(sorted(source.iterdir()), 1.0)
    with Cache(options.folder / "cache", budget=1 << 30) as cache:
        cache.stage([split])
        rates = run_rounds(_arms(split, cache, files, options), options.repeats)
    report = Report(f"Batches of {options.batch} clips from {options.files:,} files", note="Ratios are of times")
    report.add_rows("clips/s", rates)
    for arm in (MELS, LOOP, TORCH):
        report.add_ratio(f"{arm} / {WAVES}", rates[WAVES], rates[arm])
    return report


def _arms(split: Split, cache: Cache, files: ClipFiles, options: Options) -> dict[str, Callable[[], float]]:
    def own(features: str) -> float:
        with AudioLoader(
            split,
            batch_size=options.batch,
            training=True,
            cache=cache,
            seconds=1.0,
            rate=RATE,
            features=features,
            num_threads=options.workers,
        ) as loader:
            return rate_of(loader, options.batch)

    def peer(workers: int) -> float:
        sizes = {"batch_size": options.batch, "shuffle": True, "drop_last": True}
        return rate_of(torch.utils.data.DataLoader(files, num_workers=workers, **sizes), options.batch)

    return {
        WAVES: lambda: own("wave"),
        MELS: lambda: own("mel"),
        LOOP: lambda: peer(0),
        TORCH: lambda: peer(options.workers),
    }
