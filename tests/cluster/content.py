"""Samples that can be told right from wrong by anybody: the bytes of each follow from its number."""

from blake3 import blake3

from datasvc.repository import Repository
from datasvc.shards import ingest, open_dataset

BLOB_BYTES = 20_000


def blob_of(number):
    """Return the bytes of a sample."""
    return blake3(f"sample {number}".encode()).digest(length=BLOB_BYTES)


def is_right(number, blob):
    """Return whether a blob is that of the sample of that number."""
    return bytes(blob) == blob_of(number)


def make_dataset(repository, name, numbers, *, shard_bytes=200_000):
    """Ingest the samples of `numbers` as data set `name`, in their order; returns its only split."""
    samples = [{"key": f"{number:06d}", "blob": blob_of(number), "number": number} for number in numbers]
    ingest(repository, samples, name, shard_bytes=shard_bytes, keep_order=True)
    return open_dataset(Repository.open(repository.url), name)["train"]


def objects_of(*splits):
    """Return digest and size of the shards of splits."""
    return {info.digest: info.size_bytes for split in splits for info in split.table.shards()}


def bytes_of(*splits):
    """Return the bytes of the shards of splits, equal ones once."""
    return sum(objects_of(*splits).values())
