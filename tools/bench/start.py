"""How long programs take to start: the command line, a rank of a job, a loader until its first batch."""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial

import datasvc
from datasvc.cache import Cache
from datasvc.loaders import DecodeConfig, ImageLoader
from datasvc.shards import Split
from tools.bench.photos import write_photos
from tools.bench.runner import ROOT, Options, Report, bench, environment, run_rounds

NUMPY, TORCH = "import numpy", "import torch"
FIRST = "first batch of a warm cache"
VERSION, LIST, RANK = "datasvc --version", "datasvc ls", "rank: import, hvd.init(), DistributedOptimizer"


@bench(repeats=7, images=512, batch=64, size=224)
def start(options: Options) -> Report:
    """Processor time of programs beside `import numpy` and `import torch`; time until the first batch of a loader.

    Every program is a fresh process whose files are in the page cache. The loader reads photos of 110 kB from a cache
    that has all shards; its time is by the clock, from the constructor until the first batch, in a process that has
    made a loader before.
    """
    photos, url = options.folder / "photos", str(options.folder / "repository")
    write_photos(photos, num_images=options.images)
    repository = datasvc.open(url, create=True)
    repository.datasets.ingest(str(photos), "photos")
    split = next(iter(repository.dataset("photos@1").values()))
    rank = "import datasvc.trainer as hvd; hvd.init(); hvd.DistributedOptimizer"
    commands = {
        NUMPY: ["-c", NUMPY],
        TORCH: ["-c", TORCH],
        VERSION: ["-m", "datasvc", "--version"],
        LIST: ["-m", "datasvc", "ls", "--repo", url],
        RANK: ["-c", rank],
    }
    programs: dict[str, Callable[[], float]] = {name: partial(run_program, words) for name, words in commands.items()}
    with Cache(options.folder / "cache", budget="10GB") as cache:
        cache.stage([split])
        first = "first batch of a warm cache"
        found = run_rounds(
            programs | {first: partial(time_first_batch, split, cache, options)}, options.repeats, warm_up=True
        )
    report = Report(f"{options.images} photos, batches of {options.batch} windows of {options.size} pixels")
    for name, values in found.items():
        report.add_row(name, "s" if name == FIRST else "s of processor", values)
    for name, base in ((VERSION, NUMPY), (LIST, NUMPY), (RANK, TORCH)):
        report.add_ratio(f"{name} / {base}", found[name], found[base])
    return report


def run_program(words: list[str]) -> float:
    """Return the seconds of processor time of a Python program, with its children."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *words], cwd=ROOT, env=environment(), stdout=subprocess.DEVNULL, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def time_first_batch(split: Split, cache: Cache, options: Options) -> float:
    """Return the seconds from the constructor of a loader until its first batch."""
    began = time.perf_counter()
    decode = DecodeConfig("cpu")
    arguments = {"batch_size": options.batch, "size": options.size, "decode": decode}
    with ImageLoader(split, training=True, cache=cache, seed=0, **arguments) as loader:
        next(iter(loader))
        return time.perf_counter() - began
