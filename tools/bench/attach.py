"""Attach beside ingest for the same tars: time until the version, until the first batch, and of a second epoch."""

from __future__ import annotations

import itertools
import shutil
import tempfile
from functools import partial
from pathlib import Path

import datasvc
from datasvc.cache import Cache
from datasvc.loaders import ImageLoader
from datasvc.shards import Split
from tools.bench.photos import write_photos, write_tars
from tools.bench.runner import Options, Report, bench, run_rounds, timed

PHOTOS_PER_TAR, BATCH = 600, 64


@bench(repeats=5, images=3000)
def attach(options: Options) -> Report:
    """Seconds of `datasvc attach` and `datasvc ingest` of the same tars, and of what is read of each by a loader.

    One process, a warm page cache, tars of 65 MB. The first batch is read through an empty cache, in windowed order;
    it includes the start of the loader. An epoch reads each sample through the cache without decoding; the second
    one finds every shard resident.
    """
    photos, tars = options.folder / "photos", options.folder / "tars"
    size_bytes = write_photos(photos, num_images=options.images)
    write_tars(sorted(photos.glob("*/*.jpg"), key=lambda path: path.name), tars, PHOTOS_PER_TAR)

    def run(how: str) -> dict[str, float]:
        folder = Path(tempfile.mkdtemp(dir=options.folder))  # a new one: a cache stays open in its folder
        repo = datasvc.open(str(folder / "repository"), create=True)
        make = repo.datasets.attach if how == "attach" else repo.datasets.ingest
        seconds = {"version": timed(lambda: make(str(tars), "photos"))}
        split = repo.datasets.open("photos")["train"]
        with Cache(folder / "first", budget=3 * size_bytes) as cache:
            seconds["first batch"] = timed(lambda: read_batch(split, cache))
        with Cache(folder / "cache", budget=3 * size_bytes) as cache:
            for epoch in ("first epoch", "second epoch"):
                seconds[epoch] = timed(lambda: read_epoch(split, cache))
        seconds["stored"] = sum(path.stat().st_size for path in (folder / "repository").rglob("*") if path.is_file())
        shutil.rmtree(folder)
        return seconds

    found = run_rounds({how: partial(run, how) for how in ("attach", "ingest")}, options.repeats, warm_up=True)
    report = Report(
        f"Attach and ingest of {options.images:,} photos in tars, {size_bytes / 1e6:.0f} MB, one process",
        "The first epoch of an attached version builds its shards. Ratios are attach / ingest, of seconds or bytes.",
    )
    for name in ("version", "first batch", "first epoch", "second epoch"):
        report.add_rows("s", {f"{name}, {how}": [each[name] for each in rounds] for how, rounds in found.items()})
    report.add_rows(
        "MB", {f"repository, {how}": [each["stored"] / 1e6 for each in rounds] for how, rounds in found.items()}
    )
    for name in ("version", "first batch", "first epoch", "second epoch"):
        report.add_ratio(name, *([each[name] for each in found[how]] for how in ("attach", "ingest")))
    return report


def read_batch(split: Split, cache: Cache) -> None:
    """Read the first batch of a loader that starts."""
    with ImageLoader(split, batch_size=BATCH, training=True, seed=0, cache=cache, shuffle="windowed") as loader:
        next(iter(loader))


def read_epoch(split: Split, cache: Cache) -> None:
    """Read the bytes of each image once, shard by shard."""
    shards = cache.shards(split.repository)
    for info in split.table.shards():
        images = shards.open_shard(info).column("image")
        for image in itertools.chain.from_iterable(images.chunks):
            image.as_buffer()[0]
        shards.release_shard(info)
