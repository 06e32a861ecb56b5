"""Clips per second of `VideoLoader`, beside a plain loop over PyAV; and what a clip of a long remote video costs."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import count
from pathlib import Path
from unittest import mock

import av
import numpy as np
import torch

import datasvc
from datasvc.cache import Cache
from datasvc.loaders import VideoLoader
from datasvc.shards import OriginShards, Split
from tools.bench.origin import Limits, OriginProcess
from tools.bench.runner import Options, Report, bench, column, rate_of, run_rounds

OWN, SEEKING, SEQUENTIAL = "VideoLoader", "PyAV loop with seeks", "PyAV loop from the start"
_NUM_DIFFERENT = 8  # videos; encoding more takes longer than the measurement
FRAMES, STRIDE, SIZE, LENGTH, FPS = 8, 2, 112, 250, 25
_LIMITS = Limits(None, 200e6, 0.02)
_RANGES, _WHOLE = "ranges of the clip", "whole shard, as before"
_REMOTE = {"mp4": "mp4", "mkv": "matroska"}  # by extension


@bench(repeats=5, files=48, batch=8, workers=2)
def video(options: Options) -> Report:
    """Clips per second of `VideoLoader`, beside a plain loop over PyAV.

    H.264 in MP4, 320 x 240, 10 seconds at 25 frames per second, a key frame each second; clips of 8 frames with
    stride 2 from a random frame, scaled to 112 pixels. Each round is an epoch, with the start of threads: ours from a
    staged cache in `--workers` threads, the loops from files in the page cache in one thread. Ratios are of times:
    how many times as long as `VideoLoader` the loops take.
    """
    if options.files < 2 * options.batch:
        sys.exit(f"--files must be at least {2 * options.batch}, two batches")
    source = options.folder / "source"
    source.mkdir()
    for number in range(options.files):
        path = source / f"{number:06}.mp4"
        if number < _NUM_DIFFERENT:
            _write(path, number)
        else:
            shutil.copyfile(source / f"{number % _NUM_DIFFERENT:06}.mp4", path)
    repository = datasvc.open(str(options.folder / "repository"), create=True)
    repository.datasets.ingest(str(source), "clips")
    split = repository.dataset("clips@1")["train"]
    paths = sorted(source.iterdir())
    with Cache(options.folder / "cache", budget=1 << 30) as cache:
        cache.stage([split])
        arms: dict[str, Callable[[], float]] = {
            OWN: lambda: _run_own(split, cache, options),
            SEEKING: lambda: rate_of(_loop(paths, options.batch, seeks=True), options.batch),
            SEQUENTIAL: lambda: rate_of(_loop(paths, options.batch, seeks=False), options.batch),
        }
        rates = run_rounds(arms, options.repeats)
    report = Report(f"Batches of {options.batch} clips from {options.files:,} files", note="Ratios are of times")
    report.add_rows("clips/s", rates)
    for arm in (SEEKING, SEQUENTIAL):
        report.add_ratio(f"{arm} / {OWN}", rates[OWN], rates[arm])
    return report


@bench(repeats=5, frames=2000)
def remote_video(options: Options) -> Report:
    """Time, bytes and requests of a clip of a long video in a remote repository, by ranges and as a whole.

    One video of `--frames` frames of noise, H.264, 640 x 360, 25 frames per second, a key frame every 2 seconds, in
    MP4 with its index at the end and in Matroska; a web server with 20 ms of latency and 200 MB/s in all. Each round
    is a clip of 8 frames with stride 2 from another random frame, by a new loader without a cache in a repository
    that is open: the sample index of the shard is read, and then the file.
    """
    figures: dict[str, list[dict[str, float]]] = {}
    for extension, container in _REMOTE.items():
        source, folder = options.folder / f"source-{extension}", options.folder / f"repository-{extension}"
        source.mkdir()
        _write_noise(source / f"noise.{extension}", container, options.frames)
        datasvc.open(str(folder), create=True).datasets.ingest(str(source), "clips")
        with OriginProcess(str(folder), _LIMITS) as origin:
            arms = {
                f"{extension}, {name}": partial(_time_clip, origin, count(), whole=name is _WHOLE)
                for name in (_RANGES, _WHOLE)
            }
            figures |= run_rounds(arms, options.repeats)
    mib = sum(path.stat().st_size for path in source.iterdir()) >> 20
    report = Report(f"A clip of a remote video of {mib} MiB", note="Ratios are of the whole shard to the ranges")
    for name, unit in (("s", "s"), ("MB", "MB"), ("requests", "requests")):
        report.add_rows(unit, {arm: column(values, name) for arm, values in figures.items()})
        for extension in _REMOTE:
            whole, ranges = (column(figures[f"{extension}, {arm}"], name) for arm in (_WHOLE, _RANGES))
            report.add_ratio(f"{name}, {extension}", whole, ranges)
    return report


def _time_clip(origin: OriginProcess, seeds: Iterator[int], *, whole: bool) -> dict[str, float]:
    split = datasvc.open(origin.url).dataset("clips@1")["train"]
    origin.forget()
    began = time.perf_counter()
    loader = VideoLoader(
        split,
        batch_size=1,
        training=True,
        frames=FRAMES,
        stride=STRIDE,
        size=SIZE,
        pixels="uint8",
        prefetch=0,
        seed=next(seeds),
    )
    # Releases without digests of parts open all shards of a repository as a whole.
    earlier = mock.patch.object(OriginShards, "open_early", return_value={}) if whole else nullcontext()
    with loader, earlier:
        next(iter(loader))
    seconds, counts = time.perf_counter() - began, origin.counts()
    return {"s": seconds, "MB": counts["bytes"] / 1e6, "requests": counts["requests"]}


def _write_noise(path: Path, container: str, frames: int) -> None:
    base = np.random.default_rng(0).integers(0, 256, (4, 360, 640, 3), np.uint8)
    with av.open(str(path), "w", format=container) as output:
        stream = output.add_stream("libx264", rate=FPS, options={"preset": "ultrafast"})
        stream.width, stream.height, stream.pix_fmt = 640, 360, "yuv420p"
        stream.codec_context.gop_size = 2 * FPS
        for number in range(frames):
            output.mux(
                stream.encode(av.VideoFrame.from_ndarray(np.roll(base[number % 4], number, 1), format="rgb24"))
            )
        output.mux(stream.encode())


def _write(path: Path, seed: int) -> None:
    base = np.random.default_rng(seed).integers(0, 256, (60, 80, 3), np.uint8).repeat(8, 0).repeat(8, 1)
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=FPS, options={"preset": "veryfast"})
        stream.width, stream.height, stream.pix_fmt = 320, 240, "yuv420p"
        stream.codec_context.gop_size = FPS
        for number in range(LENGTH):
            moved = np.ascontiguousarray(base[number % 240 :, number % 320 :][:240, :320])
            container.mux(stream.encode(av.VideoFrame.from_ndarray(moved, format="rgb24")))
        container.mux(stream.encode())


def _run_own(split: Split, cache: Cache, options: Options) -> float:
    with VideoLoader(
        split,
        batch_size=options.batch,
        training=True,
        cache=cache,
        frames=FRAMES,
        stride=STRIDE,
        size=SIZE,
        pixels="uint8",
        num_threads=options.workers,
    ) as loader:
        return rate_of(loader, options.batch)


def _loop(paths: Sequence[Path], batch: int, *, seeks: bool) -> Iterator[torch.Tensor]:
    random = np.random.default_rng(0)
    order = random.permutation(len(paths)).tolist()
    for start in range(0, len(paths) - batch + 1, batch):
        yield torch.stack([_clip(paths[number], random, seeks=seeks) for number in order[start : start + batch]])


def _clip(path: Path, random: np.random.Generator, *, seeks: bool) -> torch.Tensor:
    first = int(random.integers(LENGTH - (FRAMES - 1) * STRIDE))
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        step = int(1 / FPS / stream.time_base)
        wanted = {(first + number * STRIDE) * step for number in range(FRAMES)}
        if seeks:
            container.seek(first * step, stream=stream)
        found = []
        for frame in container.decode(stream):
            if frame.pts in wanted:
                found.append(torch.from_numpy(frame.to_ndarray(format="rgb24")))
                if len(found) == FRAMES:
                    break
    clip = torch.stack(found).permute(0, 3, 1, 2)[:, :, :240, :240]
    return torch.nn.functional.interpolate(clip, size=(SIZE, SIZE), mode="bilinear", antialias=True)
