"""Versions of data sets that tests write sample by sample, shard by shard, without an ingest."""

import dataclasses
from collections import Counter

import numpy as np
import pyarrow as pa

from datasvc.repository import Repository, Resolved
from datasvc.shards import open_dataset
from datasvc.shards.format.digests import digest_batch
from datasvc.shards.format.reader import open_shard
from datasvc.shards.format.sample_index import SampleIndex
from datasvc.shards.format.schema import LABEL, shard_schema
from datasvc.shards.format.shard_table import ShardTable, TableRow
from datasvc.shards.format.writer import ShardWriter
from datasvc.shards.ingestion.duplicates import store_quarantine
from datasvc.shards.versions.delete import delete
from datasvc.shards.versions.deletions import load_deletions

TEXT_SCHEMA = shard_schema([pa.field("key", pa.string(), nullable=False), pa.field("text", pa.string())])
LABELLED_SCHEMA = shard_schema(
    [
        pa.field("key", pa.string(), nullable=False),
        pa.field("blob", pa.large_binary(), nullable=False),
        pa.field("label", pa.int32(), nullable=False),
    ]
)


def write_shard(objects, samples, schema, *, indexed=True):
    """Store one shard of `samples` (dicts with every column of `schema`) and its index; returns its table row."""
    with objects.writing() as sink, ShardWriter(sink, schema) as writer:
        for sample in samples:
            writer.append(sample)
    statistics = writer.statistics
    if LABEL in schema.names and not statistics.label_counts:
        counts = Counter(sample[LABEL] for sample in samples)
        statistics = dataclasses.replace(statistics, label_counts=dict(sorted(counts.items())))
    index = None
    if indexed:
        digests = digest_batch(pa.RecordBatch.from_pylist(list(samples), schema=schema))
        keys = [sample["key"] for sample in samples]
        index = objects.put(SampleIndex.build(keys, *digests, writer.layout).encode()).digest
    return TableRow(sink.info, statistics, index)


def write_table(objects, shards, schema, classes=(), *, indexed=True):
    """Store the shards of one split, each a list of samples; returns their table, which is not stored."""
    rows = [write_shard(objects, samples, schema, indexed=indexed) for samples in shards]
    return ShardTable.build(rows, schema, classes)


def read_samples(objects, table):
    """Return the samples of a split that are not deleted, in table order, with every column that the split has."""
    deletions = load_deletions(objects, table)
    samples = []
    for number in range(table.num_shards):
        shard = open_shard(objects, table.shard(number))
        deleted = deletions.flags(number) if table.deleted_per_shard[number] else np.zeros(shard.num_samples, bool)
        rows = np.flatnonzero(~deleted).tolist()
        found = [shard.sample(row) for row in rows]
        samples += [{name: sample.get(name) for name in table.sample_schema.names} for sample in found]
    return samples


def describe_table(objects, table):
    """Store a table; returns what a version's entry says of its split."""
    return {
        "table": objects.put(table.encode()).digest,
        "samples": table.num_samples,
        "bytes": table.size_bytes,
        "shards": table.num_shards,
    }


def texts(keys, text="text of {}"):
    """Return a sample of `TEXT_SCHEMA` for each key."""
    return [{"key": key, "text": text.format(key)} for key in keys]


def labelled(**labels):
    """Return a sample of `LABELLED_SCHEMA` for each key and its label."""
    return [{"key": key, "blob": b"blob of " + key.encode(), "label": label} for key, label in labels.items()]


def keys_of(repository, ref):
    """Return the keys of a version by split, in the order of the table."""
    return {name: [sample["key"] for sample in split] for name, split in open_dataset(repository, ref).items()}


def commit_between(monkeypatch, repository, other):
    """Call `other`, which commits, after the first entry for data sets is built and before it is appended."""
    log = type(repository.versions("datasets", "any"))
    append, others = log.append, [other]

    def append_late(self, build, **options):
        def build_late(head):
            content = build(head)
            while others:
                others.pop()()
            return content

        return append(self, build_late, **options)

    monkeypatch.setattr(log, "append", append_late)


def create_pets(folder, sample):
    """Create a repository in which pets@1 has the samples a to f in three shards, and pets@2 is without f."""
    repository = Repository.create(str(folder))
    write_version(repository, "pets", {"train": [[sample(key) for key in pair] for pair in ("ab", "cd", "ef")]})
    delete(repository, "pets", keys=["f"])
    return repository


def write_version(repository, name, splits, schema=TEXT_SCHEMA, classes=(), *, indexed=True, message="", bad=()):
    """Commit the next version of data set `name`.

    Args:
        repository: where to.
        name: of the data set.
        splits: by split, the samples of each shard: `{"train": [[sample, ...], [sample, ...]]}`.
        schema: of every shard, from `shard_schema`.
        classes: names of the labels.
        indexed: write sample indexes; shards of old versions have none.
        message: kept with the version.
        bad: instances of `BadSample`, the list of what an ingest has rejected.

    Returns:
        The version.
    """
    objects = repository.objects
    entry = {
        "message": message,
        "splits": {
            split: describe_table(objects, write_table(objects, shards, schema, classes, indexed=indexed))
            for split, shards in splits.items()
        },
        "source": {"kind": "test", "url": "memory", "options": {}},
        "skipped": len(bad),
        "quarantine": store_quarantine(objects, bad),
    }
    committed = repository.versions("datasets", name).append(lambda _head: entry)
    return Resolved("datasets", name, committed.number)
