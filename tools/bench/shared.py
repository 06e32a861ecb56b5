"""Jobs of a node that share their decoding, beside as many that do not."""

from __future__ import annotations

import itertools
import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

import datasvc
from datasvc.cache import Cache
from datasvc.loaders import DecodeConfig, ImageBatch, ImageLoader
from tools.bench.photos import ingest_photos, staged_photos
from tools.bench.runner import ROOT, Options, Report, bench, call_command, column, environment, run_rounds, timed

SHARING, SEPARATE, LONE = "sharing", "separate", "one job alone"
# Within a dozen steps each buffer of a batch is touched for the first time; a training takes thousands of steps.
WARM_UP_STEPS = 24
DECODED_STEPS = 6  # more than are prefetched
PAGE_BYTES = 4096
SIDE = 8


@bench(repeats=5, jobs=4, images=3000, batch=64, steps=40, threads=2, size=224, output="float32")
def shared(options: Options) -> Report:
    """Images per second of jobs that share their decoding, beside as many that do not: all jobs of a node together.

    Training at 224 pixels in batches of 64, from photos staged in a node's cache. Each job is a process of its own
    that takes a batch, touches every page of it, and takes the next: as fast as a job can be that only waits for its
    loader. Jobs are started afresh in each round; when all of them have taken their first batches, they continue
    together. Each times its steps once what was decoded while it waited is used up, and their speeds are added. The
    ratio is of speeds.
    """
    with staged_photos(options.folder, num_images=options.images) as (_, _, size_bytes):
        several = f"{options.jobs} jobs"
        arms = {
            f"{several}, {SHARING}": partial(run_jobs, options, options.jobs, is_shared=True),
            f"{several}, {SEPARATE}": partial(run_jobs, options, options.jobs, is_shared=False),
            LONE: partial(run_jobs, options, 1, is_shared=False),
        }
        rates = run_rounds(arms, options.repeats)
    report = Report(
        f"Training batches of {options.batch} x {options.size} pixels, {options.output}, from "
        f"{options.images:,} photos, {size_bytes / options.images / 1e3:.0f} kB each, {options.threads} "
        "decoding threads in each process that decodes"
    )
    report.add_rows("images/s in all", rates)
    sharing, separate = (rates[f"{several}, {which}"] for which in (SHARING, SEPARATE))
    report.add_ratio(f"{several}, {SHARING} / {SEPARATE}", sharing, separate)
    report.add_ratio(f"{several}, {SHARING} / {LONE}", sharing, rates[LONE])
    return report


def run_jobs(settings: Options, num_jobs: int, *, is_shared: bool) -> float:
    """Return the images per second of all jobs together."""
    group = f"bench-{secrets.token_hex(4)}" if is_shared else None
    sizes = {"batch_size": settings.batch, "size": settings.size, "pixels": settings.output, "decode_group": group}
    command = call_command(be_job, settings.folder, sizes, settings.steps, settings.threads)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with ExitStack() as stack:
        jobs = [
            stack.enter_context(subprocess.Popen(command, cwd=ROOT, env=environment(), text=True, **pipes))
            for _ in range(num_jobs)
        ]
        _hear(jobs)
        for job in jobs:
            assert job.stdin is not None
            job.stdin.write("go\n")
            job.stdin.flush()
        found = _hear(jobs)
    num_steps = WARM_UP_STEPS + DECODED_STEPS + settings.steps
    if is_shared and sum(each["decoded"] for each in found) > num_steps:
        sys.stderr.write(f"some batches were decoded more than once: {found}\n")
    return sum(settings.steps * settings.batch / each["seconds"] for each in found)


def _hear(jobs: list[subprocess.Popen[str]]) -> list[dict[str, Any]]:
    """Wait until every job has said a line."""
    heard = []
    for job in jobs:
        assert job.stdout is not None
        line = job.stdout.readline()
        if not line:
            raise SystemExit("a job failed; see above")
        heard.append(json.loads(line))
    return heard


def be_job(folder: str, options: dict[str, Any], num_steps: int, num_threads: int) -> None:
    """Be one of the jobs."""
    with Cache(Path(folder) / "cache") as cache:
        split = next(iter(datasvc.open(f"{folder}/repository").dataset("photos@1").values()))
        decode = DecodeConfig(num_threads=num_threads)
        with ImageLoader(split, training=True, cache=cache, decode=decode, **options) as loader:
            batches = _without_end(loader)
            for batch in itertools.islice(batches, WARM_UP_STEPS):
                _touch(batch)
            print("{}", flush=True)
            sys.stdin.readline()
            for batch in itertools.islice(batches, DECODED_STEPS):
                _touch(batch)
            started = time.perf_counter()
            for batch in itertools.islice(batches, num_steps):
                _touch(batch)
            found = {"seconds": time.perf_counter() - started}
            print(json.dumps(found | (vars(loader.sharing.counts) if loader.sharing else {})), flush=True)
            sys.stdin.readline()  # what this job decoded, too, stays until all are timed


def _without_end(loader: ImageLoader) -> Iterator[ImageBatch[Any]]:
    while True:
        yield from loader


def _touch(batch: ImageBatch[Any]) -> int:
    """Read a byte of each page, so that lending out memory is not mistaken for delivering it."""
    content = batch.images.numpy().reshape(-1).view(np.uint8)
    return int(content[::PAGE_BYTES].sum(dtype=np.int64))


@bench(
    repeats=3,
    runs=4,
    images=3000,
    epochs=16,
    batch=64,
    size=64,
    threads=(1, "for decoding, in each run"),
    model="tools.bench.shared:linear",
)
def shared_training(options: Options) -> Report:
    """Training programs that share their decoding, beside as many that do not: whole commands, from start to exit.

    Each run is `python -m datasvc.trainer` with one rank and one compute thread, as in a search over learning rates.
    All runs of a round start together. Figures are the seconds until the last run has ended, imports of torch and the
    last checkpoint included, and the processor seconds of all runs. Ratios are separate / sharing. The default model
    is linear: it leaves the processors to decoding, as a model on an accelerator does. `--model small-cnn` uses them
    too.
    """
    _, size_bytes = ingest_photos(options.folder, num_images=options.images)
    arms = {way: partial(run_programs, options, is_shared=way == SHARING) for way in (SHARING, SEPARATE)}
    found = run_rounds(arms, options.repeats)
    report = Report(
        f"{options.runs} runs of {options.model}, {options.epochs} epochs of {options.images:,} photos, "
        f"{size_bytes / options.images / 1e3:.0f} kB each, batches of {options.batch} x {options.size} pixels, "
        f"{options.threads} decoding threads in each run"
    )
    for what in ("time", "processor time"):
        seconds = {way: column(values, what) for way, values in found.items()}
        report.add_rows("s", {f"{way}: {what} of all runs": values for way, values in seconds.items()})
        report.add_ratio(f"{what}: {SEPARATE} / {SHARING}", seconds[SEPARATE], seconds[SHARING])
    return report


def run_programs(settings: Options, *, is_shared: bool) -> dict[str, float]:
    """Return the seconds until all runs have ended, and the processor seconds that they used."""
    group = f"bench-{secrets.token_hex(4)}"
    options = {
        "--data": "photos@1",
        "--repo": settings.folder / "repository",
        "--model": settings.model,
        "--epochs": settings.epochs,
        "--batch-size": settings.batch,
        "--size": settings.size,
        "--decode-threads": settings.threads,
    }
    if is_shared:
        options["--decode-group"] = group
    words = [str(word) for pair in options.items() for word in pair]
    command = [sys.executable, "-m", "datasvc.trainer", *words]
    processor_s = 0.0

    def run_all() -> None:
        nonlocal processor_s
        runs = [
            subprocess.Popen(
                [*command, "--name", f"{group}-{number}", "--learning-rate", str(0.01 * (number + 1))],
                cwd=ROOT,
                env=environment(OMP_NUM_THREADS="1"),
                stdout=subprocess.DEVNULL,
            )
            for number in range(settings.runs)
        ]
        for run in runs:
            _, status, usage = os.wait4(run.pid, 0)
            run.returncode = os.waitstatus_to_exitcode(status)
            processor_s += usage.ru_utime + usage.ru_stime
        if any(run.returncode for run in runs):
            sys.exit("a run failed; see above")

    return {"time": timed(run_all), "processor time": processor_s}


def linear(num_classes: int) -> nn.Module:
    """Return a linear classifier of images that are averaged to 8x8 pixels: it takes next to no processor time."""
    return nn.Sequential(nn.AdaptiveAvgPool2d(SIDE), nn.Flatten(), nn.Linear(3 * SIDE * SIDE, num_classes))
