"""Resuming a loader at sample 1,000,000,000 of 1,200,000,000: milliseconds to the first batch.

The split is a generated shard table of 2.25 million shards of 533 blocks of tokens. So many shards cannot be stored
here: the table names nine real ones again and again, of 64 tokens a block, 77 kB at most. All that depends on the
number of samples and shards is real: reading the table, the order of the epoch, finding the position, opening the
shards of the batches under way, as many as the order asks for. What does not is small: to open, verify and read a
shard of 77 kB takes less than one of 64 MiB would.

Each repeat is a fresh process, which opens the split, makes a `TokenLoader`, takes a first batch at position 0, and
then one from a state at another position and epoch, whose order is made anew. Batches of 64, read in place.

    python tools/bench/loader_resume.py [--repeats 5] [--shards 2250000] [--json]
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

import datasvc
from datasvc.repository import Repository
from datasvc.shards import ShardTable
from datasvc.shards.versions.version_entry import describe_tables

SAMPLES_PER_SHARD = 600
NUM_REAL = 8
BLOCK_TOKENS = 64
RESUMED_SHARE = 5 / 6  # sample 1,000,000,000 of 1,200,000,000

RUN = r"""
import json, re, sys, time
from datasvc.repository import Repository
from datasvc.shards import open_dataset
from datasvc.loaders import TokenLoader
url, shuffle, share = sys.argv[1], sys.argv[2], float(sys.argv[3])
options = {} if shuffle == "global" else {"lanes": 8, "block": 8192}
found, started = {}, time.perf_counter()

def lap(name):
    global started
    now = time.perf_counter()
    found[name], started = (now - started) * 1e3, time.perf_counter()

split = open_dataset(Repository.open(url), "huge@1")["train"]
loader = TokenLoader(split, batch_size=64, training=True, shuffle=shuffle, **options)
lap("open_ms")
next(loader.numpy())
lap("start_ms")
state = loader.state_dict() | {"epoch": 3, "position": int(len(split) * share)}
loader.load_state_dict(state)
batch = next(loader.numpy())
lap("resume_ms")
assert (batch.epoch, int(batch.positions[0])) == (3, int(len(split) * share))
next(loader.numpy())
lap("next_ms")
loader.close()
found["samples"] = len(split)
found["peak_mb"] = int(re.search(r"VmHWM:\s+(\d+)", open("/proc/self/status").read())[1]) * 1024 / 1e6
print(json.dumps(found))
"""


def write_version(folder: Path, num_shards: int) -> str:
    """Commit a version that names a few shards again and again; returns the repository's URL."""
    (folder / "blocks").mkdir()
    numbers = np.repeat(np.arange(NUM_REAL, dtype=np.uint16), SAMPLES_PER_SHARD * BLOCK_TOKENS)
    np.save(folder / "blocks" / "tokens.npy", numbers.reshape(-1, BLOCK_TOKENS))
    url = str(folder / "repository")
    shard_bytes = len(numbers) // NUM_REAL * numbers.itemsize
    datasvc.open(url, create=True).datasets.ingest(str(folder / "blocks"), "few", shard_bytes=shard_bytes)
    repository = Repository.open(url)
    few = next(iter(datasvc.open(url).dataset("few@1").values())).table
    rows = few.rows.take(pa.array(np.arange(num_shards) % len(few.rows)))
    table = ShardTable(rows, few.sample_schema, few.classes)
    entry = {
        "message": "generated",
        "splits": describe_tables(repository.objects, {"train": table}),
        "source": {"kind": "generated", "url": "", "options": {}},
        "skipped": 0,
    }
    repository.versions("datasets", "huge").append(lambda _head: entry)
    return url


def main() -> None:
    """Run the benchmark."""
    parser = make_parser(__doc__, repeats=5)
    parser.add_argument("--shards", type=int, default=2_250_000)
    arguments = parser.parse_args()
    orders = ("global", "windowed")
    runs: dict[str, list[dict[str, float]]] = {order: [] for order in orders}
    with tempfile.TemporaryDirectory(prefix="datasvc-bench-") as folder:
        url = write_version(Path(folder), arguments.shards)
        for _ in range(arguments.repeats):
            for order in orders:
                words = [sys.executable, "-c", RUN, url, order, str(RESUMED_SHARE)]
                done = subprocess.run(words, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
                runs[order].append(json.loads(done.stdout))
    report = Report(f"Resuming among {runs[orders[0]][0]['samples']:,} samples in {arguments.shards:,} shards")
    for order, found in runs.items():
        for name, key, unit in (
            ("split and loader", "open_ms", "ms"),
            ("first batch", "start_ms", "ms"),
            ("from a state to its first batch", "resume_ms", "ms"),
            ("the batch after that", "next_ms", "ms"),
            ("peak memory", "peak_mb", "MB"),
        ):
            report.add_row(f"{order}: {name}", unit, [run[key] for run in found])
    report.show(as_json=arguments.as_json)


if __name__ == "__main__":
    main()
