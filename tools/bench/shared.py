"""Images per second of jobs that share their decoding, beside as many that do not: all jobs of a node together.

Training at 224 pixels in batches of 64, from photos staged in a node's cache. Each job is a process of its own that
takes a batch, touches every page of it, and takes the next: as fast as a job can be that only waits for its loader.
Jobs are started afresh in each repeat; when all of them have taken their first batches, they are let go together.
Each times its steps once what was decoded while it waited is used up, and their speeds are added. The ratio is of
speeds.

    python tools/bench/shared.py [--repeats 5] [--jobs 4] [--images 3000] [--batch 64] [--steps 40] [--threads 2]
                                 [--size 224] [--output float32] [--json]
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from photos import write_photos
from report import ROOT, Report, alternate, make_parser

import datasvc
from datasvc.cache import Cache
from datasvc.loaders import DecodeConfig, ImageBatch, ImageLoader

SHARING, SEPARATE, LONE = "sharing", "separate", "one job alone"
# Within a dozen steps each buffer of a batch is touched for the first time; a training takes thousands of steps.
WARM_UP_STEPS = 24
DECODED_STEPS = 6  # more than are prefetched
PAGE_BYTES = 4096


def run_jobs(folder: Path, settings: argparse.Namespace, num_jobs: int, *, is_shared: bool) -> float:
    """Return the images per second of all jobs together."""
    options = {"batch_size": settings.batch, "size": settings.size, "pixels": settings.output}
    group = f"bench-{secrets.token_hex(4)}" if is_shared else None
    options |= {"decode_group": group}
    command = [sys.executable, __file__, "--job", json.dumps(options), "--folder", str(folder)]
    command += ["--steps", str(settings.steps), "--threads", str(settings.threads)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with ExitStack() as stack:
        jobs = [
            stack.enter_context(
                subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
            )
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


def be_job(folder: Path, options: dict[str, Any], num_steps: int, num_threads: int) -> None:
    """Be one of the jobs."""
    with Cache(folder / "cache") as cache:
        split = next(iter(datasvc.open(str(folder / "repository")).dataset("photos@1").values()))
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


def main() -> None:
    """Run the benchmark, or one of its jobs."""
    parser = make_parser(__doc__, repeats=5)
    parser.add_argument("--jobs", type=int, default=4)
    parser.add_argument("--images", type=int, default=3000)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", default="float32", help="default: %(default)s")
    parser.add_argument("--folder", type=Path, help="to work in; default the folder for temporary files")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.job is not None:
        be_job(arguments.folder, json.loads(arguments.job), arguments.steps, arguments.threads)
        return
    with tempfile.TemporaryDirectory(dir=arguments.folder, prefix="datasvc-bench-") as name:
        folder = Path(name)
        size_bytes = write_photos(folder / "photos", num_images=arguments.images)
        repository = datasvc.open(str(folder / "repository"), create=True)
        repository.datasets.ingest(str(folder / "photos"), "photos")
        with Cache(folder / "cache", budget=2 * size_bytes) as cache:
            cache.stage([next(iter(repository.dataset("photos@1").values()))])
        several = f"{arguments.jobs} jobs"
        contestants = {
            f"{several}, {SHARING}": lambda: run_jobs(folder, arguments, arguments.jobs, is_shared=True),
            f"{several}, {SEPARATE}": lambda: run_jobs(folder, arguments, arguments.jobs, is_shared=False),
            LONE: lambda: run_jobs(folder, arguments, 1, is_shared=False),
        }
        rates = alternate(contestants, arguments.repeats)
    report = Report(
        f"Training batches of {arguments.batch} x {arguments.size} pixels, {arguments.output}, from "
        f"{arguments.images:,} photos, {size_bytes / arguments.images / 1e3:.0f} kB each, {arguments.threads} "
        "decoding threads in each process that decodes"
    )
    for contestant, values in rates.items():
        report.add_row(contestant, "images/s in all", values)
    sharing, separate = (rates[f"{several}, {which}"] for which in (SHARING, SEPARATE))
    report.add_ratio(f"{several}, {SHARING} / {SEPARATE}", sharing, separate)
    report.add_ratio(f"{several}, {SHARING} / {LONE}", sharing, rates[LONE])
    report.show(as_json=arguments.as_json)


if __name__ == "__main__":
    main()
