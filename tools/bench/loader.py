"""Images per second of `ImageLoader`, beside the same decode and DALI's own graph, both fed from memory, and peers.

Training at 224 pixels with 2 decoding threads and batches of 64, from photos staged in a node's cache:

- `ImageLoader`: order, cache, windows and decode, as a training loop uses it; and without torch;
- `own_in_memory`: the loader's decode alone, fed the same images with the same windows in the same order, from arrays
  held in memory, all planned beforehand. It is what would be left if storage, order and planning cost nothing;
- `dali_in_memory`: DALI's own graph on the CPU, fed likewise: it decodes the same windows, scales and normalises;
- `views`: the loader's stream of zero-copy views without decode, at the same batch size and at 1,024;
- peers that are installed, each on the photos as it wants them, in a process of its own; and most of them without
  decode, as "NAME, raw";
- what a fresh process costs: first batch, resume, peak memory.

A ratio NAME is the speed of `ImageLoader` by that of NAME; a ratio "NAME, raw" is that of the views.

MosaicML Streaming is left out where transformers or torchvision, which it imports, are not installed.

    python tools/bench/loader.py [--repeats 5] [--images 6000] [--batch 64] [--threads 2] [--size 224]
                                 [--peers all|none|NAME,...] [--json]
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from loader_contestants import DALI, LOADER, MEMORY, NUMPY, VIEWS, WARM_UP_STEPS, Contestants
from loader_peers import PEERS, installed_peers, run_peer
from loader_process import measure_process
from photos import write_photos
from report import Report, alternate, make_parser

import datasvc
from datasvc.cache import Cache

COSTS = {
    "first batch of a cold process": ("s", "first_batch_s"),
    "from a new loader to its first batch": ("ms", "start_ms"),
    "from a state to its first batch": ("ms", "resume_ms"),
    "peak memory (PSS)": ("MB", "peak_mb"),
    "peak of anonymous memory": ("MB", "peak_anonymous_mb"),
    "peak of mapped files, page cache": ("MB", "peak_files_mb"),
}


def main() -> None:
    """Run the benchmark."""
    arguments = _parse()
    with tempfile.TemporaryDirectory(dir=arguments.folder, prefix="datasvc-bench-") as name:
        folder = Path(name)
        photos = folder / "photos"
        size_bytes = write_photos(photos, num_images=arguments.images)
        repository = datasvc.open(str(folder / "repository"), create=True)
        repository.datasets.ingest(str(photos), "photos")
        split = next(iter(repository.dataset("photos@1").values()))
        peers: dict[str, Callable[[], float]] = {
            name: partial(run_peer, name, photos, arguments) for name in arguments.peers
        }
        raw_peers = {
            f"{name}, raw": partial(run_peer, name, photos, arguments, raw=True)
            for name in arguments.peers
            if PEERS[name].is_raw
        }
        with Cache(folder / "cache", budget=2 * size_bytes) as cache:
            cache.stage([split])
            rates = alternate(Contestants(split, cache, arguments).all() | peers | raw_peers, arguments.repeats)
        costs = [
            measure_process(folder / "repository", folder / "cache", arguments) for _ in range(arguments.repeats)
        ]
    report = Report(
        f"Training batches of {arguments.batch} x {arguments.size} pixels from {arguments.images:,} photos, "
        f"{size_bytes / arguments.images / 1e3:.0f} kB each, {arguments.threads} decoding threads"
    )
    for contestant, values in rates.items():
        is_encoded = contestant.startswith(VIEWS) or contestant in raw_peers
        report.add_row(contestant, "samples/s" if is_encoded else "images/s", values)
    for title, (unit, key) in COSTS.items():
        report.add_row(title, unit, [cost[key] for cost in costs])
    for contestant in (DALI, MEMORY, NUMPY, *peers):
        report.add_ratio(contestant, rates[LOADER], rates[contestant])
    views = rates[f"{VIEWS}, batches of {arguments.batch}"]
    for contestant in raw_peers:
        report.add_ratio(contestant, views, rates[contestant])
    report.show(as_json=arguments.as_json)


def _parse() -> argparse.Namespace:
    parser = make_parser(__doc__, repeats=5)
    parser.add_argument("--images", type=int, default=6000)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--peers", default="all", help="all that are installed, none, or names of some: %(default)s")
    parser.add_argument("--folder", type=Path, help="to work in; default the folder for temporary files")
    arguments = parser.parse_args()
    known = installed_peers()
    names = {"all": known, "none": []}.get(arguments.peers, arguments.peers.split(","))
    if not set(names) <= set(known):
        parser.error(f"--peers: installed are {', '.join(known)} of {', '.join(PEERS)}")
    arguments.peers = names
    least = (WARM_UP_STEPS + 2) * arguments.batch
    if arguments.images < least:
        parser.error(f"--images must be at least {least}, that is {WARM_UP_STEPS + 2} batches")
    return arguments


if __name__ == "__main__":
    main()
