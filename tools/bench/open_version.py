"""Opening a version of 1.2 billion samples: seconds and memory, from a generated shard table.

A version is a shard table in a local repository: 2 million shards of 600 samples. Opening means what every rank of
a job does before its first batch: resolve the reference, read and check the table, number the samples; then it makes
the order of an epoch and locates a batch of 8,192 samples in it. Each repeat is a fresh process; memory is its peak
resident set.

    python tools/bench/open_version.py [--repeats 5] [--shards 2000000] [--json]
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
from report import ROOT, Report, make_parser

from datasvc.repository import Repository
from datasvc.shards import ShardTable, image_schema
from datasvc.shards.versions.version_entry import describe_tables

SAMPLES_PER_SHARD = 600
SHARD_BYTES = 64 << 20

OPEN = r"""
import json, re, sys, time
started = time.perf_counter()
import numpy as np
from datasvc.order import AccessOrder, OrderConfig
from datasvc.repository import Repository
from datasvc.shards import open_dataset
imported = time.perf_counter()
split = open_dataset(Repository.open(sys.argv[1]), "huge@1")["train"]
number = len(split)
opened = time.perf_counter()
order = AccessOrder(split.table.samples_per_shard, OrderConfig(seed=1), 0)
order.locate(np.arange(8192) + number // 2)
located = time.perf_counter()
peak = int(re.search(r"VmHWM:\s+(\d+)", open("/proc/self/status").read())[1]) / 1e6
print(json.dumps({"samples": number, "import": imported - started, "open": opened - imported,
                  "locate": located - opened, "peak_gb": peak}))
"""


def write_version(url: str, num_shards: int) -> None:
    """Commit a version whose shards do not exist: nothing of opening reads them."""
    repository = Repository.create(url)
    one = ShardTable.build([], image_schema(labelled=True), ["cat", "dog"])
    generator = np.random.default_rng(0)
    digests = pa.array([generator.bytes(32) for _ in range(num_shards)], pa.binary(32))
    counts = np.full(num_shards, SAMPLES_PER_SHARD)
    columns = {
        "digest": digests,
        "samples": counts,
        "bytes": np.full(num_shards, SHARD_BYTES),
        "max_width": np.full(num_shards, 500, np.int32),
        "max_height": np.full(num_shards, 500, np.int32),
        "max_sample_bytes": np.full(num_shards, 1 << 20),
        "index": digests,
        "deleted": np.zeros(num_shards, np.int64),
    }
    rows = pa.table(columns, schema=one.rows.schema)
    table = ShardTable(rows, one.sample_schema, one.classes)
    entry = {
        "message": "generated",
        "splits": describe_tables(repository.objects, {"train": table}, before=[table]),  # no shard is there
        "source": {"kind": "generated", "url": "", "options": {}},
        "skipped": 0,
    }
    repository.versions("datasets", "huge").append(lambda _head: entry)


def main() -> None:
    """Run the benchmark."""
    parser = make_parser(__doc__, repeats=5)
    parser.add_argument("--shards", type=int, default=2_000_000)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="datasvc-bench-") as folder:
        url = str(Path(folder) / "repo")
        write_version(url, arguments.shards)
        runs = []
        for _ in range(arguments.repeats):
            done = subprocess.run(
                [sys.executable, "-c", OPEN, url], cwd=ROOT, check=True, capture_output=True, text=True
            )
            runs.append(json.loads(done.stdout))
    report = Report(
        f"Opening a version of {runs[0]['samples']:,} samples in {arguments.shards:,} shards",
        "Each in a fresh process; imports are given apart.",
    )
    for name, unit in (("import", "s"), ("open", "s"), ("locate", "s"), ("peak_gb", "GB")):
        report.add_row(name, unit, [run[name] for run in runs])
    report.show(as_json=arguments.as_json)


if __name__ == "__main__":
    main()
