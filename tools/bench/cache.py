"""What the node's cache reaches: staging, cold starts, later epochs, peers, hits, the catalogue."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from datasvc.sizes import parse_size
from tools.bench import cache_costs, cache_nodes, cache_origin
from tools.bench.photos import read_photos, write_photos
from tools.bench.runner import Options, Report, bench

PARTS: dict[str, Callable[[Path, Path, Options], Report]] = {
    "staging": cache_origin.measure_staging,
    "cold": cache_origin.measure_cold,
    "reuse": cache_origin.measure_reuse,
    "nodes": cache_nodes.measure_nodes,
    "peer": cache_nodes.measure_peer,
    "hits": cache_costs.measure_hits,
    "catalogue": cache_costs.measure_catalogue,
}
WITHOUT_PHOTOS = {"staging", "catalogue"}


@bench(
    repeats=5,
    positional={"parts": {"nargs": "*", "metavar": "PART", "choices": [[], *PARTS], "help": "default: all"}},
    images=6000,
    requests={"type": int, "nargs": "+", "default": [1, 4, 8, 16], "help": "staging: how many at once"},
    seconds=(2.0, "staging: how long a run takes at the rate"),
    shard_mib={"type": int, "nargs": "+", "default": [64, 16], "help": "cold: sizes of shards"},
    total_rate={"type": parse_size, "default": 100_000_000, "help": "nodes: bytes/s of the origin"},
    objects=(100_000, "catalogue: objects in it"),
    reservations=(2000, "catalogue: of each process"),
)
def cache(options: Options) -> Iterator[Report]:
    """What the node's cache reaches: staging, cold starts, later epochs, peers, hits, the catalogue. One table each.

    - `staging`: from an origin of 35 MB/s per request and 20 ms, by the number of requests under way;
    - `cold`: first batch and first epoch from an origin of 200 MB/s in all and 20 ms, beside curl of the same bytes;
    - `reuse`: bytes of later epochs that need no origin, where a part of the data fits;
    - `nodes`: four `datasvc serve` that stage the same data at once, with peers and each from the origin;
    - `peer`: one peer to one node on loopback, verified and published, beside bare pread + sendall;
    - `hits`: what a resident shard costs;
    - `catalogue`: opening it with many objects, and reservations from four processes.

    The origin is a process that throttles a plain HTTP file server (`tools.bench.origin`), and shares the cores with
    what is measured. What earlier runs left unwritten is synced before each run.
    """
    parts = options.parts or list(PARTS)
    with tempfile.TemporaryDirectory(prefix="datasvc-bench-") as source:
        photos = Path(source) / "photos"
        if set(parts) - WITHOUT_PHOTOS:
            write_photos(photos, num_images=options.images)
            for _ in read_photos(photos):
                pass  # the page cache is warm now
        for part in parts:
            with tempfile.TemporaryDirectory(dir=options.folder, prefix=f"{part}-") as folder:
                yield PARTS[part](Path(folder), photos, options)
