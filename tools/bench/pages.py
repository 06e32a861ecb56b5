"""Pages of data in the browser: a version of 100 million samples, 100 thumbnails, and the change of a model's layers.

The large version is one shard of 25,000 small images, listed 4,000 times by its shard table, so the pages read a file
that is in memory. The thumbnails are of 100 photos (500x375) on the local disk; "again" has them from the cache. Each
repeat starts a new server with an empty cache; six requests run at a time, as in a browser. The model has two
versions of one tensor, whose change another process measures. Memory is the peak resident set of the server.

    python tools/bench/pages.py [--repeats 5] [--shards 4000] [--samples 25000] [--model-mb 100] [--json]
"""

from __future__ import annotations

import re
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch
from photos import write_photos
from report import Report, make_parser
from ui_server import running_server

import datasvc
from datasvc.shards.versions.version_entry import describe_tables
from datasvc.testing import small_dataset

REQUESTS_AT_ONCE = 6
PAGES = {
    "data set": "/datasets/huge@1",
    "samples": "/datasets/huge@1/samples/train",
    "samples in the middle": "/datasets/huge@1/samples/train?start=50000",
    "samples where": "/datasets/huge@1/samples/train?where=label+%3D+3",
    "samples sorted": "/datasets/huge@1/samples/train?order=key",
    "look-up of a key that is missing": "/datasets/huge@1/samples/train?key=none",
    "one sample": "/datasets/huge@1/samples/train/777",
    "change of a model's layers": "/compare/net@1/net@2?norms=1",
}


def write_versions(folder: Path, num_shards: int, num_samples: int, model_mb: int) -> str:
    """Make a repository with `huge@1`, `photos@1`, `net@1` and `net@2`; return its URL."""
    repo = datasvc.open(str(folder / "repo"), create=True)
    one = small_dataset(repo, "one", samples=num_samples, image_size=32, shard_bytes=1 << 40)["train"].table
    counts = {label: count * num_shards for label, count in one.label_counts.items()}
    table = replace(one, rows=one.rows.take([0] * num_shards), label_counts=counts)
    entry = {
        "message": "generated",
        "splits": describe_tables(repo.repository.objects, {"train": table}),
        "source": {"kind": "generated", "url": "", "options": {}},
        "skipped": 0,
    }
    repo.repository.versions("datasets", "huge").append(lambda _head: entry)
    write_photos(folder / "photos" / "train", num_images=100)
    repo.datasets.ingest(str(folder / "photos"), "photos")
    for step in range(2):
        generator = torch.Generator().manual_seed(step)
        repo.models.save("net", {"weight": torch.rand(model_mb * 250_000, generator=generator)}, step=step)
    return str(folder / "repo")


def measure(url: str) -> dict[str, float]:
    """Return seconds of each page, from a new server, and the server's memory."""
    times: dict[str, float] = {}

    def timed(name: str, paths: list[str]) -> None:
        started = time.perf_counter()
        list(pool.map(server.fetch, paths))
        times[name] = time.perf_counter() - started

    with (
        tempfile.TemporaryDirectory(prefix="datasvc-bench-") as home,
        ThreadPoolExecutor(REQUESTS_AT_ONCE) as pool,
        running_server(url, Path(home)) as server,
    ):
        for name, path in PAGES.items():
            timed(f"{name}, first", [path])
            timed(f"{name}, again", [path])
        page = server.fetch("/datasets/photos@1/samples/train").decode()
        images = re.findall(r'<img src="([^"]*)"', page)
        assert len(images) == 100, len(images)
        timed("100 thumbnails, first", images)
        timed("100 thumbnails, again", images)
        times["memory"] = server.peak_mb()
    return times


def main() -> None:
    """Run the benchmark."""
    parser = make_parser(__doc__, repeats=5)
    parser.add_argument("--shards", type=int, default=4000)
    parser.add_argument("--samples", type=int, default=25_000, help="of each shard")
    parser.add_argument("--model-mb", type=int, default=100, help="of each version of the model")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="datasvc-bench-") as folder:
        url = write_versions(Path(folder), arguments.shards, arguments.samples, arguments.model_mb)
        runs = [measure(url) for _ in range(arguments.repeats)]
    report = Report(
        f"Pages of {arguments.shards * arguments.samples:,} samples in {arguments.shards:,} shards; thumbnails",
        "The first page of a process imports DuckDB too.",
    )
    for name in runs[0]:
        report.add_row(name, "MB" if name == "memory" else "s", [run[name] for run in runs])
    report.show(as_json=arguments.as_json)


if __name__ == "__main__":
    main()
