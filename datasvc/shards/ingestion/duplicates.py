"""What keeps samples of a source out of a version: damage, a repeated key, or the content of an earlier sample.

An ingest searches the tables of a new version before it commits them. Only sample indexes are read. Memory holds an
8-byte hash of each sample of a split, and the arrays needed to sort the hashes: about 26 bytes per sample at the
peak. Only samples with equal hashes are compared by value.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

from datasvc.errors import BadSampleError, NotFoundError
from datasvc.keyed_random import Integers
from datasvc.printable import count_text
from datasvc.repository import Digest, Objects
from datasvc.repository.store.redaction import redact_url
from datasvc.shards.format.overlaid_shard import read_index
from datasvc.shards.format.sample_index import SampleIndex
from datasvc.shards.format.shard_table import ShardTable
from datasvc.shards.sources.common.source import BadSample, Source
from datasvc.shards.versions.deletions import delete_samples
from datasvc.shards.versions.keys import SampleRows, hash_values, take_keys
from datasvc.threads import iterate_in_threads

DuplicateKind = Literal["key", "payload"]
_MAX_PARALLEL_READS: Final = 8


_MAX_LISTED: Final = 10  # number of bad samples that a message names


@dataclass(frozen=True)
class DuplicateSample:
    """A sample that repeats an earlier one of its split.

    Attributes:
        key: key of the sample.
        first_key: key of the first equal sample, in table order.
        shard: number of its shard in the table.
        row: row in the shard's file.
    """

    key: str
    first_key: str
    shard: int
    row: int


@dataclass(frozen=True)
class SplitDuplicates:
    """The duplicates in the splits of a new version.

    Attributes:
        by_key: by split, samples with the key of an earlier one.
        by_payload: by split, samples with the content of an earlier one, except those in `by_key`.
    """

    by_key: Mapping[str, Sequence[DuplicateSample]]
    by_payload: Mapping[str, Sequence[DuplicateSample]]

    @classmethod
    def find(cls, objects: Objects, tables: Mapping[str, ShardTable], *, by_key: bool) -> SplitDuplicates:
        """Find duplicates by payload, and also by key if `by_key` is True. Raise what `find_duplicates` raises."""
        same_key: dict[str, list[DuplicateSample]] = {}
        same_payload: dict[str, list[DuplicateSample]] = {}
        for split, table in tables.items():
            key_duplicates = find_duplicates(objects, table, "key") if by_key else []
            # A sample that repeats a key is reported once, as bad.
            reported = {(sample.shard, sample.row) for sample in key_duplicates}
            payload_duplicates = find_duplicates(objects, table, "payload", without=reported)
            if key_duplicates:
                same_key[split] = key_duplicates
            if payload_duplicates:
                same_payload[split] = payload_duplicates
        return cls(same_key, same_payload)

    @property
    def bad(self) -> list[BadSample]:
        """Samples that cannot be committed, because keys must be unique within a split."""
        return [
            BadSample(split, sample.key, "another sample of its split has this key: rename it")
            for split, samples in self.by_key.items()
            for sample in samples
        ]


def drop_duplicates(
    objects: Objects, tables: Mapping[str, ShardTable], dropped: Sequence[Mapping[str, Sequence[DuplicateSample]]]
) -> dict[str, ShardTable]:
    """Return the tables without the samples in `dropped`. Each mapping in `dropped` has samples by split."""
    result = {}
    for split, table in tables.items():
        samples = [sample for duplicates in dropped for sample in duplicates.get(split, ())]
        places = SampleRows(
            np.array([sample.shard for sample in samples], np.int64),
            np.array([sample.row for sample in samples], np.int64),
        )
        result[split] = delete_samples(objects, table, places.by_shard()) if samples else table
    return result


def find_duplicates(
    objects: Objects, table: ShardTable, by: DuplicateKind, *, without: Collection[tuple[int, int]] = ()
) -> list[DuplicateSample]:
    """Return every sample of a split that repeats an earlier one, in table order.

    `table` must have no deletions, and a sample index for each shard. Samples in `without`, pairs of shard number and
    row, are ignored. With `by` "payload", samples are compared by the payload digest (see `format/digests.py`).

    Raises:
        CorruptDataError, NotFoundError, UnavailableError: a sample index cannot be read.
    """
    hashes = np.empty(int(table.stored_per_shard.sum()), np.int64)
    start = 0
    for index in _read_indexes(objects, table, range(table.num_shards)):
        values = take_keys(index.table.column(by), np.arange(index.num_samples))
        hashes[start : start + index.num_samples] = hash_values(values)
        start += index.num_samples
    positions = _repeated_positions(hashes)
    del hashes  # frees 8 bytes per sample before the candidates are compared
    stops = np.cumsum(table.stored_per_shard)
    shards = np.searchsorted(stops, positions, side="right")
    rows = positions - np.concatenate([[0], stops])[shards]
    is_candidate = [location not in without for location in zip(shards.tolist(), rows.tolist(), strict=True)]
    return _compare(objects, table, by, shards[is_candidate], rows[is_candidate])


def _compare(
    objects: Objects, table: ShardTable, by: DuplicateKind, shards: Integers, rows: Integers
) -> list[DuplicateSample]:
    """Return the duplicates among the samples at `shards` and `rows`, which are in table order; compare by value."""
    first: dict[str | bytes, str] = {}
    duplicates: list[DuplicateSample] = []
    shards_to_read = np.unique(shards).tolist()
    for shard, index in zip(shards_to_read, _read_indexes(objects, table, shards_to_read), strict=True):
        keys = index.keys
        for row in rows[shards == shard].tolist():
            value = keys[row] if by == "key" else index.digests("payload")[row].tobytes()
            # Samples come in table order, so the first sample with a value is no duplicate.
            if value in first:
                duplicates.append(DuplicateSample(keys[row], first[value], shard, row))
            else:
                first[value] = keys[row]
    return duplicates


def _read_indexes(objects: Objects, table: ShardTable, shards: range | list[int]) -> Iterator[SampleIndex]:
    """Iterate over the sample indexes of `shards`, in the same order."""

    def read(shard: int) -> SampleIndex:
        index = read_index(objects, table, shard)
        assert index is not None, shard
        return index

    return iterate_in_threads(read, shards, _MAX_PARALLEL_READS)


def _repeated_positions(hashes: Integers) -> Integers:
    """Return the positions of the hashes that occur more than once, ascending: `int64[n]`."""
    order = np.argsort(hashes, kind="stable")
    ordered = hashes[order]
    equals_next = ordered[1:] == ordered[:-1]
    is_repeated = np.concatenate([[False], equals_next]) | np.concatenate([equals_next, [False]])
    # Without hashes, `is_repeated` has one value, so cut it to the number of hashes.
    return np.sort(order[is_repeated[: len(order)]])


def check_bad(
    bad: Sequence[BadSample],
    repeated: Sequence[BadSample],
    tables: Mapping[str, ShardTable],
    source: Source,
    *,
    fails: bool,
) -> None:
    """Raise if bad samples prevent the commit: any of them if `fails`, and otherwise a split without any good sample.

    `bad` could not be stored. `repeated` are stored, in `tables`, but have the key of another sample.

    Raises:
        NotFoundError: the source has no samples, not even bad ones.
        BadSampleError: bad samples prevent the commit; the message has their number and lists up to ten of them.
    """
    if not bad and not tables:
        raise NotFoundError(f"cannot ingest {redact_url(source.url)}: it contains no samples")
    # A split without any good sample would silently disappear from the version.
    without_good = {sample.split for sample in bad} - set(tables)
    all_bad = [*bad, *repeated]
    if not all_bad or not (fails or without_good):
        return
    are = "is" if len(all_bad) == 1 else "are"
    total = len(bad) + sum(table.num_samples for table in tables.values())  # the tables count `repeated` too
    listed = [f"{sample.split}/{sample.key}: {sample.reason}" for sample in _ordered(all_bad)]
    raise BadSampleError(
        f"{len(all_bad)} of {count_text(total, 'sample')} of {redact_url(source.url)} {are} bad, nothing was "
        "committed: "
        f"{_join_first(listed)}. Repair or remove them, or leave them out with --on-bad skip, which needs a good "
        "sample in each split"
    )


def check_duplicates(duplicates: Mapping[str, Sequence[DuplicateSample]], source: Source) -> None:
    """Raise BadSampleError if `duplicates`, the lists of samples with equal content by split, are not all empty."""
    listed = [
        f"{split}/{sample.key} has the same content as {sample.first_key}"
        for split, samples in duplicates.items()
        for sample in samples
    ]
    if listed:
        are = "is a duplicate" if len(listed) == 1 else "are duplicates"
        raise BadSampleError(
            f"{count_text(len(listed), 'sample')} of {redact_url(source.url)} {are}, nothing was committed: "
            f"{_join_first(listed)}. Remove them, or use --duplicates drop or keep"
        )


def store_quarantine(objects: Objects, bad: Sequence[BadSample]) -> Digest | None:
    """Store the list of the bad samples, one JSON object per line. Return its digest; None without bad samples."""
    if not bad:
        return None
    # Sort, so that the object does not depend on the order in which workers finish.
    lines = [json.dumps(dataclasses.asdict(sample), ensure_ascii=False, sort_keys=True) for sample in _ordered(bad)]
    return objects.put("".join(f"{line}\n" for line in lines).encode()).digest


def _ordered(bad: Sequence[BadSample]) -> list[BadSample]:
    return sorted(bad, key=lambda sample: (sample.split, sample.key, sample.reason))


def _join_first(texts: Sequence[str]) -> str:
    more = f"; and {len(texts) - _MAX_LISTED} more" if len(texts) > _MAX_LISTED else ""
    return "; ".join(texts[:_MAX_LISTED]) + more
