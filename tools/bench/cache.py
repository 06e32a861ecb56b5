"""What the node's cache reaches: staging, cold starts, later epochs, peers, hits, the catalogue. One table each.

- `staging`: from an origin of 35 MB/s per request and 20 ms, by the number of requests under way;
- `cold`: first batch and first epoch from an origin of 200 MB/s in all and 20 ms, beside curl of the same bytes;
- `reuse`: bytes of later epochs that need no origin, where a part of the data fits;
- `nodes`: four `datasvc serve` that stage the same data at once, with peers and each from the origin;
- `peer`: one peer to one node on loopback, verified and published, beside bare pread + sendall;
- `hits`: what a resident shard costs;
- `catalogue`: opening it with many objects, and reservations from four processes.

The origin is a process that throttles a plain HTTP file server (`serve_origin.py`, `serve_files.py`), and shares the
cores with what is measured. What earlier runs left unwritten is synced before each run.

    python tools/bench/cache.py [PART...] [--repeats 5] [--images 6000] [--folder WHERE_TO_WRITE] [--json]
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path

import cache_costs
import cache_epochs
import cache_nodes
import cache_peer
import cache_staging
from photos import read_photos, write_photos
from report import Report, make_parser

from datasvc.sizes import parse_size

Part = Callable[[Path, Path, argparse.Namespace], Report]

PARTS: dict[str, Part] = {
    "staging": lambda folder, _, arguments: cache_staging.measure(folder, arguments),
    "cold": cache_epochs.measure_cold,
    "reuse": cache_epochs.measure_reuse,
    "nodes": cache_nodes.measure,
    "peer": cache_peer.measure,
    "hits": cache_costs.measure_hits,
    "catalogue": lambda folder, _, arguments: cache_costs.measure_catalogue(folder, arguments),
}
WITHOUT_PHOTOS = {"staging", "catalogue"}


def main() -> None:
    """Run the benchmark."""
    arguments = _parse()
    parts = arguments.parts or list(PARTS)
    with (
        tempfile.TemporaryDirectory(prefix="datasvc-bench-") as source,
        tempfile.TemporaryDirectory(dir=arguments.folder, prefix="datasvc-bench-") as name,
    ):
        photos = Path(source) / "photos"
        if set(parts) - WITHOUT_PHOTOS:
            write_photos(photos, num_images=arguments.images)
            for _ in read_photos(photos):
                pass  # the page cache is warm now
        for part in parts:
            with tempfile.TemporaryDirectory(dir=name, prefix=f"{part}-") as folder:
                report = PARTS[part](Path(folder), photos, arguments)
            report.show(as_json=arguments.as_json)


def _parse() -> argparse.Namespace:
    parser = make_parser(__doc__, repeats=5)
    parser.add_argument("parts", nargs="*", metavar="PART", choices=[[], *PARTS], help="default: all")
    parser.add_argument("--images", type=int, default=6000)
    parser.add_argument("--folder", type=Path, help="on the disk to measure; default the folder for temporary files")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 4, 8, 16], help="staging: how many at once")
    parser.add_argument("--seconds", type=float, default=2.0, help="staging: how long a run takes at the rate")
    parser.add_argument("--shard-mib", type=int, nargs="+", default=[64, 16], help="cold: sizes of shards")
    parser.add_argument("--total-rate", type=parse_size, default=100_000_000, help="nodes: bytes/s of the origin")
    parser.add_argument("--objects", type=int, default=100_000, help="catalogue: objects in it")
    parser.add_argument("--reservations", type=int, default=2000, help="catalogue: of each process")
    return parser.parse_args()


if __name__ == "__main__":
    main()
