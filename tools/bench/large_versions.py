"""Versions too large for this machine: shard tables and sample indexes are generated, their shards are not there.

All that depends on the number of samples and shards is real. Each round is a fresh process.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa

import datasvc
from datasvc.keyed_random import Integers
from datasvc.models import DataUse, ReadSpan
from datasvc.order import OrderConfig, OrderState, count_steps
from datasvc.repository import ObjectInfo, Repository
from datasvc.repository.objects.objects import digest_of
from datasvc.shards import ShardTable, image_schema
from datasvc.shards.format.sample_index import SampleIndex
from datasvc.shards.format.shard_table import TableRow
from datasvc.shards.format.writer import ShardStatistics
from datasvc.shards.versions.version_entry import describe_tables
from tools.bench import fresh
from tools.bench.runner import Options, Report, bench, call_apart, column, run_rounds

SAMPLES_PER_SHARD = 600
SHARD_BYTES = 64 << 20
NUM_REAL, BLOCK_TOKENS = 8, 64
RESUMED_SHARE = 5 / 6  # sample 1,000,000,000 of 1,200,000,000
INDEXED_PER_SHARD, EPOCHS = 640, 90
GLOBAL_BATCHES = (256, 1024, 768, 512)


def commit_table(repository: Repository, name: str, table: ShardTable, *, before: Sequence[ShardTable] = ()) -> None:
    """Commit a version whose split `train` is a generated table; shards that are in `before` are not looked for."""
    entry = {
        "message": "generated",
        "splits": describe_tables(repository.objects, {"train": table}, before=before),
        "source": {"kind": "generated", "url": "", "options": {}},
        "skipped": 0,
    }
    repository.versions("datasets", name).append(lambda _head: entry)


@bench(repeats=5, shards=2_000_000)
def open_version(options: Options) -> Report:
    """Opening a version of 1.2 billion samples: seconds and memory, from a generated shard table.

    A version is a shard table in a local repository: 2 million shards of 600 samples. Opening means what every rank
    of a job does before its first batch: resolve the reference, read and check the table, number the samples; then it
    makes the order of an epoch and locates a batch of 8,192 samples in it. Each round is a fresh process; memory is
    its peak resident set.
    """
    url = str(options.folder / "repo")
    write_table(url, options.shards)
    found = run_rounds({"open": partial(call_apart, fresh.open_huge, url)}, options.repeats)["open"]
    report = Report(
        f"Opening a version of {found[0]['samples']:,} samples in {options.shards:,} shards",
        "Each in a fresh process; imports are given apart.",
    )
    for name, unit in (("import", "s"), ("open", "s"), ("locate", "s"), ("peak_gb", "GB")):
        report.add_row(name, unit, column(found, name))
    return report


def write_table(url: str, num_shards: int) -> None:
    """Commit a version whose shards do not exist: nothing of opening reads them."""
    table = make_table(num_shards, np.full(num_shards, SAMPLES_PER_SHARD))
    commit_table(Repository.create(url), "huge", table, before=[table])


def make_table(num_shards: int, counts: Integers) -> ShardTable:
    """Return the table of shards that do not exist, with `counts` samples, `int64[num_shards]`."""
    one = ShardTable.build([], image_schema(labelled=True), ["cat", "dog"])
    generator = np.random.default_rng(0)
    digests = pa.array([generator.bytes(32) for _ in range(num_shards)], pa.binary(32))
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
    return ShardTable(rows, one.sample_schema, one.classes)


@bench(repeats=5, shards=2_250_000)
def loader_resume(options: Options) -> Report:
    """Resuming a loader at sample 1,000,000,000 of 1,200,000,000: milliseconds to the first batch.

    The split is a generated shard table of 2.25 million shards of 533 blocks of tokens. So many shards cannot be
    stored here: the table names nine real ones again and again, of 64 tokens a block, 77 kB at most. All that depends
    on the number of samples and shards is real: reading the table, the order of the epoch, finding the position,
    opening the shards of the batches under way, as many as the order asks for. What does not is small: to open,
    verify and read a shard of 77 kB takes less than one of 64 MiB would.

    Each round is a fresh process, which opens the split, makes a `TokenLoader`, takes a first batch at position 0,
    and then one from a state at another position and epoch, whose order is made again. Batches of 64, read in place.
    """
    url = write_repeated(options.folder, options.shards)
    arms = {
        shuffle: partial(call_apart, fresh.resume_huge, url, shuffle, RESUMED_SHARE)
        for shuffle in ("global", "windowed")
    }
    runs = run_rounds(arms, options.repeats)
    report = Report(f"Resuming among {runs['global'][0]['samples']:,} samples in {options.shards:,} shards")
    for shuffle, found in runs.items():
        for name, key in (
            ("split and loader", "open"),
            ("first batch", "start"),
            ("from a state to its first batch", "resume"),
            ("the batch after that", "next"),
        ):
            report.add_row(f"{shuffle}: {name}", "ms", [1e3 * seconds for seconds in column(found, key)])
        report.add_row(f"{shuffle}: peak memory", "MB", column(found, "peak_mb"))
    return report


def write_repeated(folder: Path, num_shards: int) -> str:
    """Commit a version that names a few shards again and again; returns the repository's URL."""
    (folder / "blocks").mkdir()
    numbers = np.repeat(np.arange(NUM_REAL, dtype=np.uint16), SAMPLES_PER_SHARD * BLOCK_TOKENS)
    np.save(folder / "blocks" / "tokens.npy", numbers.reshape(-1, BLOCK_TOKENS))
    shard_bytes = len(numbers) // NUM_REAL * numbers.itemsize
    data = datasvc.open(str(folder / "repository"), create=True)
    data.datasets.ingest(str(folder / "blocks"), "few", shard_bytes=shard_bytes)
    few = next(iter(data.dataset("few@1").values())).table
    rows = few.rows.take(pa.array(np.arange(num_shards) % len(few.rows)))
    commit_table(data.repository, "huge", ShardTable(rows, few.sample_schema, few.classes))
    return str(folder / "repository")


@bench(
    repeats=5,
    keys=10_000,
    runs=10,
    shards=(2000, f"of {INDEXED_PER_SHARD} samples"),
    versions=(100, "of each run"),
)
def models_trained_on(options: Options) -> Report:
    """Which of 1,000 versions consumed which of 10,000 samples: seconds and memory, from generated entries.

    A repository with a data set of 1.28 million samples in 2,000 shards (their indexes are there, the images are not)
    and versions of ten runs over it, each of 90 epochs with its own seed, resumed at another size at every version;
    each but the first is fine-tuned from a version of the run before. Each round asks for every time that each sample
    was consumed, in a fresh process; imports are given apart. Memory is its peak resident set.
    """
    repository = Repository.create(str(options.folder / "repo"))
    write_indexed(repository, options.shards)
    num_samples = options.shards * INDEXED_PER_SHARD
    table = repository.versions("datasets", "photos").read(1).content["splits"]["train"]["table"]
    for run in range(options.runs):
        write_run(repository, table, run, options.versions, num_samples)
    keys = np.random.default_rng(1).choice(num_samples, options.keys, replace=False).tolist()
    (options.folder / "keys").write_text("\n".join(map(key_of, keys)))
    ask = partial(call_apart, fresh.find_all_consumers, repository.url, options.folder / "keys")
    found = run_rounds({"ask": ask}, options.repeats)["ask"]
    report = Report(
        f"Which of {found[0]['versions']:,} versions consumed which of {options.keys:,} samples",
        f"{found[0]['sightings']:,} times in all, each with its epoch and step; "
        f"{num_samples:,} samples, {EPOCHS} epochs.",
    )
    for name, unit in (("import", "s"), ("answer", "s"), ("peak_gb", "GB")):
        report.add_row(name, unit, column(found, name))
    return report


def key_of(number: int) -> str:
    """Return the key of a sample, as long as those of image folders are."""
    return f"n{number % 1000:08d}/n{number % 1000:08d}_{number}.JPEG"


def write_indexed(repository: Repository, num_shards: int) -> None:
    """Commit a data set whose sample indexes are there and whose shards are not: nothing here reads them."""
    generator = np.random.default_rng(0)
    numbers = generator.permutation(num_shards * INDEXED_PER_SHARD).reshape(num_shards, INDEXED_PER_SHARD)
    rows = []
    for shard in numbers.tolist():
        digests = [generator.bytes(16) for _ in shard]
        index = SampleIndex.build([key_of(number) for number in shard], digests, digests)
        info = ObjectInfo(digest_of(generator.bytes(8)), 64 << 20)
        rows.append(
            TableRow(info, ShardStatistics(num_samples=len(shard)), repository.objects.put(index.encode()).digest)
        )
    table = ShardTable.build(rows, image_schema(labelled=True), ["cat", "dog"])
    commit_table(repository, "photos", table, before=[table])


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
