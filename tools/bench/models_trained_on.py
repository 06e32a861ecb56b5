"""Which of 1,000 versions consumed which of 10,000 samples: seconds and memory, from generated entries.

A repository with a data set of 1.28 million samples in 2,000 shards (their indexes are there, the images are not) and
versions of ten runs over it, each of 90 epochs with its own seed, resumed at another size at every version; each but
the first is fine-tuned from a version of the run before. Each repeat asks for every time that each sample was
consumed, in a fresh process; imports are given apart. Memory is its peak resident set.

    python tools/bench/models_trained_on.py [--repeats 5] [--keys 10000] [--runs 10] [--versions 100] [--json]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from report import ROOT, Report, make_parser

from datasvc.models import DataUse, ReadSpan
from datasvc.order import OrderConfig, OrderState, count_steps
from datasvc.repository import ObjectInfo, Repository
from datasvc.repository.objects.objects import digest_of
from datasvc.shards import ShardTable, image_schema
from datasvc.shards.format.sample_index import SampleIndex
from datasvc.shards.format.shard_table import TableRow
from datasvc.shards.format.writer import ShardStatistics
from datasvc.shards.versions.version_entry import describe_tables

SAMPLES_PER_SHARD, EPOCHS = 640, 90
GLOBAL_BATCHES = (256, 1024, 768, 512)

ASK = r"""
import json, re, sys, time
started = time.perf_counter()
from datasvc.models import find_consumers
from datasvc.repository import Repository
imported = time.perf_counter()
keys = open(sys.argv[2]).read().split()
found = find_consumers(Repository.open(sys.argv[1]), keys=keys)
answered = time.perf_counter()
sightings = sum(len(chunk.served.keys) for chunk in found.chunks)
assert not found.gaps and found.versions[-1].num_samples == len(keys)
peak = int(re.search(r"VmHWM:\s+(\d+)", open("/proc/self/status").read())[1]) / 1e6
print(json.dumps({"import": imported - started, "answer": answered - imported, "peak_gb": peak,
                  "sightings": sightings, "versions": len(found.versions)}))
"""


def key_of(number: int) -> str:
    """Return the key of a sample, as long as those of image folders are."""
    return f"n{number % 1000:08d}/n{number % 1000:08d}_{number}.JPEG"


def write_data(repository: Repository, num_shards: int) -> ShardTable:
    """Commit a data set whose sample indexes are there and whose shards are not: nothing here reads them."""
    generator = np.random.default_rng(0)
    numbers = generator.permutation(num_shards * SAMPLES_PER_SHARD).reshape(num_shards, SAMPLES_PER_SHARD)
    rows = []
    for shard in numbers.tolist():
        digests = [generator.bytes(16) for _ in shard]
        index = SampleIndex.build([key_of(number) for number in shard], digests, digests)
        info = ObjectInfo(digest_of(generator.bytes(8)), 64 << 20)
        rows.append(
            TableRow(info, ShardStatistics(num_samples=len(shard)), repository.objects.put(index.encode()).digest)
        )
    table = ShardTable.build(rows, image_schema(labelled=True), ["cat", "dog"])
    entry = {
        "message": "generated",
        "splits": describe_tables(repository.objects, {"train": table}, before=[table]),  # no shard is there
        "source": {"kind": "generated", "url": "", "options": {}},
        "skipped": 0,
    }
    repository.versions("datasets", "photos").append(lambda _head: entry)
    return table


def write_run(repository: Repository, table: str, run: int, num_versions: int, num_samples: int) -> None:
    """Commit the versions of one run, each resumed at another global batch."""
    log, parent = repository.versions("models", f"run{run}"), None
    if run:
        parent = f"run{run - 1}@{num_versions // 2}"
    config, start, step = OrderConfig(seed=run), (0, 0), 0
    stops = np.linspace(0, EPOCHS * num_samples, num_versions + 1).astype(np.int64)[1:].tolist()
    for number, stop_at in enumerate(stops):
        batch = GLOBAL_BATCHES[number % len(GLOBAL_BATCHES)]
        epoch, position = divmod(stop_at, num_samples)
        first = start[1] if epoch == start[0] else 0
        stop = (epoch, first + (position - first) // batch * batch if position > first else first)
        ended = step
        for each in range(start[0], epoch):
            ended += count_steps(start[1] if each == start[0] else 0, num_samples, batch, "drop")
        ended += (stop[1] - first) // batch
        state = OrderState(table, *stop, config).to_dict()
        span = ReadSpan(start, stop, step, batch, "drop")
        use = DataUse("photos@1", "train", state, run=f"{run}-{number}", spans=[span])
        entry = {"step": ended, "data": [use.to_dict()], "parent": parent, "message": "", "config": {}, "metrics": {}}
        entry |= {"code": {"revision": None, "dirty": False}}
        parent = f"run{run}@{log.append(lambda _head, entry=entry: entry).number}"
        start, step = stop, ended


def write_repository(folder: Path, arguments: argparse.Namespace) -> tuple[str, str]:
    """Make the repository and the file of keys; returns where they are."""
    repository = Repository.create(str(folder / "repo"))
    write_data(repository, arguments.shards)
    num_samples = arguments.shards * SAMPLES_PER_SHARD
    table = repository.versions("datasets", "photos").read(1).content["splits"]["train"]["table"]
    for run in range(arguments.runs):
        write_run(repository, table, run, arguments.versions, num_samples)
    keys = np.random.default_rng(1).choice(num_samples, arguments.keys, replace=False).tolist()
    (folder / "keys").write_text("\n".join(map(key_of, keys)))
    return repository.url, str(folder / "keys")


def main() -> None:
    """Run the benchmark."""
    parser = make_parser(__doc__, repeats=5)
    parser.add_argument("--keys", type=int, default=10_000)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument(
        "--shards", type=int, default=2000, help=f"of {SAMPLES_PER_SHARD} samples; default: %(default)s"
    )
    parser.add_argument("--versions", type=int, default=100, help="of each run; default: %(default)s")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="datasvc-bench-") as folder:
        url, keys = write_repository(Path(folder), arguments)
        runs = []
        for _ in range(arguments.repeats):
            done = subprocess.run(
                [sys.executable, "-c", ASK, url, keys], cwd=ROOT, check=True, capture_output=True, text=True
            )
            runs.append(json.loads(done.stdout))
    report = Report(
        f"Which of {runs[0]['versions']:,} versions consumed which of {arguments.keys:,} samples",
        f"{runs[0]['sightings']:,} times in all, each with its epoch and step; "
        f"{arguments.shards * SAMPLES_PER_SHARD:,} samples, {EPOCHS} epochs.",
    )
    for name, unit in (("import", "s"), ("answer", "s"), ("peak_gb", "GB")):
        report.add_row(name, unit, [run[name] for run in runs])
    report.show(as_json=arguments.as_json)


if __name__ == "__main__":
    main()
