"""Reads single samples of a split for display: by number, verified, and without the blobs unless they are asked for.

A sample has a number: its place among the live (not deleted) samples, in the order of the shard table, as in
`split[number]`. Values and the sizes of blobs come from sample indexes. Blobs are read one by one, by byte range. So
a page of samples costs about as much from a remote store as from a disk, and no shard is held in memory. Only shards
without such an index, which old versions may have, are read as a whole.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from datasvc.errors import NotFoundError
from datasvc.keyed_random import Integers
from datasvc.printable import count_text
from datasvc.repository import Digest
from datasvc.shards.format.overlaid_shard import OverlaidShard, overlaid, read_index
from datasvc.shards.format.overlays import ShardOverlay
from datasvc.shards.format.partial_reader import PartialShard
from datasvc.shards.format.reader import Shard, python_values, text_errors
from datasvc.shards.format.sample_index import BatchLayout, SampleIndex
from datasvc.shards.format.schema import IMAGE, KEY, LABEL, is_blob, is_image
from datasvc.shards.versions.dataset import Split

# An open shard takes the memory of its sample index and of the blobs that were read; then it is opened again.
_MAX_OPEN_SHARDS: Final = 8
_MAX_BLOB_BYTES: Final = 8 << 20


@dataclass(frozen=True)
class SampleSummary:
    """One sample without its blobs.

    Attributes:
        number: place among the live samples of the split.
        key: its key.
        class_name: class name of its label; None if the label has none.
        values: values by column, without `key` and blobs; a null blob is None here.
        blob_bytes: size of each blob by column.
    """

    number: int
    key: str
    class_name: str | None
    values: Mapping[str, Any]
    blob_bytes: Mapping[str, int]


@dataclass(frozen=True)
class SamplePlace:
    """Where a sample is stored, and its digests.

    Attributes:
        shard: number of the shard in the shard table.
        shard_digest: digest of the shard.
        row: row in the shard's file, deleted samples included.
        sample_digest: digest of all its values; "" if the shard has no sample index.
        payload_digest: digest of its blobs; "" if the shard has no sample index.
    """

    shard: int
    shard_digest: Digest
    row: int
    sample_digest: str
    payload_digest: str


class NumberedSamples:
    """Reads samples of one split. Several threads may use it at once.

    Args:
        split: the split.
        max_bytes: memory of the open shards, of one at least. What a call reads is counted from the next call on.
    """

    def __init__(self, split: Split, max_bytes: int = _MAX_OPEN_SHARDS * _MAX_BLOB_BYTES) -> None:
        self.split = split
        self._max_bytes = max_bytes
        self._schema = split.table.sample_schema
        self._starts = np.concatenate([[0], np.cumsum(split.table.samples_per_shard)]).astype(np.int64)
        self._open: OrderedDict[int, _OpenShard] = OrderedDict()
        self._lock = threading.Lock()

    @cached_property
    def image_columns(self) -> list[str]:
        """Columns of encoded images."""
        return [
            field.name for field in self._schema if is_blob(field.type) and (field.name == IMAGE or is_image(field))
        ]

    def summaries(self, numbers: Sequence[int]) -> list[SampleSummary]:
        """Return the samples of these numbers, in their order. No blob is read.

        Raises:
            NotFoundError: a number is out of range.
            CorruptDataError, UnavailableError: a shard or its sample index cannot be read.
        """
        shards, rows = self._locate(np.asarray(numbers, np.int64))
        found: dict[int, SampleSummary] = {}
        for shard in dict.fromkeys(shards.tolist()):
            chosen = np.flatnonzero(shards == shard)
            samples = self._shard(shard).values(rows[chosen])
            for index, sample in zip(chosen.tolist(), samples, strict=True):
                found[index] = self._summary(numbers[index], sample)
        return [found[index] for index in range(len(numbers))]

    def blob(self, number: int, column: str) -> bytes | None:
        """Return one blob, verified; None if it is null or the split has no such blob column.

        For errors, see `summaries`.
        """
        shards, rows = self._locate(np.array([number], np.int64))
        return self._shard(int(shards[0])).blob(column, rows)

    def blob_sizes(self, shard: int, column: str) -> pa.Array:
        """Return the sizes of the blobs of a shard's live samples: int64, null for a null blob; see `summaries`."""
        rows = self.split.stored_rows(shard, np.arange(self._starts[shard + 1] - self._starts[shard]))
        return self._shard(shard).blob_sizes(column, rows)

    def locate(self, number: int) -> tuple[int, int]:
        """Return the shard of a sample, and its row in the shard's file. Raise NotFoundError if there is none."""
        shards, rows = self._locate(np.array([number], np.int64))
        return int(shards[0]), int(rows[0])

    def place(self, number: int) -> SamplePlace:
        """Return where a sample is stored. For errors, see `summaries`."""
        shard, row = self.locate(number)
        sample, payload = self._shard(shard).digests(row)
        return SamplePlace(shard, self.split.table.shard(shard).digest, row, sample, payload)

    def live_numbers(self, shard: int, rows: Integers) -> dict[int, int]:
        """Return the number of each live sample among some rows of a shard's file, by row; leave out deleted ones."""
        live = self.split.stored_rows(shard, np.arange(self._starts[shard + 1] - self._starts[shard]))
        _, in_rows, in_live = np.intersect1d(rows, live, assume_unique=True, return_indices=True)
        return dict(zip(rows[in_rows].tolist(), (in_live + self._starts[shard]).tolist(), strict=True))

    def first_number(self, shard: int) -> int:
        """Return the number of the first live sample of a shard; for `num_shards`, the number of all samples."""
        return int(self._starts[shard])

    def shard_of(self, number: int) -> int:
        """Return the shard that has a sample; the number of shards for a number after the last sample."""
        return int(np.searchsorted(self._starts, number, side="right")) - 1

    def _locate(self, numbers: Integers) -> tuple[Integers, Integers]:
        """Return the shard, and the row in its file, of each sample: `int64[n]` each."""
        outside = numbers[(numbers < 0) | (numbers >= self._starts[-1])]
        if len(outside):
            raise NotFoundError(
                f"{self.split.dataset}/{self.split.name} has no sample {outside[0]}: it has "
                f"{count_text(int(self._starts[-1]), 'sample')}, numbered from 0"
            )
        shards = np.searchsorted(self._starts, numbers, side="right") - 1
        rows = numbers - self._starts[shards]
        for shard in np.unique(shards).tolist():
            chosen = shards == shard
            rows[chosen] = self.split.stored_rows(shard, rows[chosen])
        return shards, rows

    def _summary(self, number: int, sample: Mapping[str, Any]) -> SampleSummary:
        sizes = {field.name: sample[field.name] for field in self._schema if is_blob(field.type)}
        present = {name: size for name, size in sizes.items() if size is not None}
        label, classes = sample.get(LABEL), self.split.classes
        is_named = isinstance(label, int) and 0 <= label < len(classes)
        return SampleSummary(
            number,
            sample[KEY],
            classes[label] if is_named and label is not None else None,
            {name: value for name, value in sample.items() if name != KEY and name not in present},
            present,
        )

    def _shard(self, number: int) -> _OpenShard:
        with self._lock:
            if number in self._open and self._open[number].read_bytes <= _MAX_BLOB_BYTES:
                self._open.move_to_end(number)
                self._close_oldest()
                return self._open[number]
        # Opened without the lock: two threads may open the same shard, but no thread waits for another one's.
        opened = _OpenShard.open(self.split, number)
        with self._lock:
            self._open[number] = opened
            self._open.move_to_end(number)
            self._close_oldest()
        return opened

    def _close_oldest(self) -> None:
        """Close the shards that were not used for the longest time, until the others are within the limits."""
        while len(self._open) > 1 and (
            len(self._open) > _MAX_OPEN_SHARDS
            or sum(shard.num_bytes for shard in self._open.values()) > self._max_bytes
        ):
            self._open.popitem(last=False)


class _OpenShard:
    """One shard: a partial one, whose blobs are read when they are needed, or a complete one.

    Attributes:
        read_bytes: bytes of the blobs that were read; a partial shard keeps them.
    """

    def __init__(self, split: Split, shard: Shard, index: SampleIndex | None, overlay: ShardOverlay | None) -> None:
        self.read_bytes = 0
        self._split = split
        self._shard = shard
        self._index = index
        self._overlay = overlay
        self._lock = threading.Lock()

    @property
    def num_bytes(self) -> int:
        """Memory of this shard: its sample index, and the blobs that were read. A complete shard is mapped."""
        return self.read_bytes + (0 if self._index is None else self._index.table.nbytes)

    @classmethod
    def open(cls, split: Split, number: int) -> _OpenShard:
        objects, info = split.repository.objects, split.table.shard(number)
        index = read_index(objects, split.table, number)
        if index is not None and index.layout is not None:
            shard: Shard = PartialShard(info, index, objects.location(info.digest))
        else:
            shard = split.origin.open_shard(info)
        overlaid(objects, split.table, number, shard)  # checks it
        return cls(split, shard, index, split.table.overlay(objects, number))

    def values(self, rows: Integers) -> list[dict[str, Any]]:
        """Return samples by column, in the order of `rows`; a blob is represented by its size, None for null."""
        schema = self._split.table.sample_schema
        with self._lock:
            self._fetch_whole_batches(rows)
            columns = {field.name: self._column(field, pa.array(rows)) for field in schema}
        with text_errors(self._shard.name):
            lists = {name: python_values(column) for name, column in columns.items()}
        return [{name: values[index] for name, values in lists.items()} for index in range(len(rows))]

    def blob_sizes(self, column: str, rows: Integers) -> pa.Array:
        with self._lock:
            self._fetch_whole_batches(rows)
            sizes = self._column(self._split.table.sample_schema.field(column), pa.array(rows))
        return pa.concat_arrays([chunk.cast(pa.int64()) for chunk in getattr(sizes, "chunks", [sizes])])

    def blob(self, column: str, rows: Integers) -> bytes | None:
        with self._lock:
            if isinstance(self._shard, PartialShard):
                self.read_bytes += self._shard.fetch(self._split.repository.objects, rows)
            if not self._shard.is_valid(column, rows):
                return None
            view = self._shard.blobs(column, rows)[0]
            return bytes(self._shard.read(view, np.empty(len(view), np.uint8)))

    def digests(self, row: int) -> tuple[str, str]:
        """Return the digests of the sample and of its payload, in hexadecimal digits; "" if they are not stored."""
        if self._index is None:
            return "", ""
        sample, payload = (self._index.table.column(name)[row].as_py().hex() for name in ("sample", "payload"))
        return sample, payload

    def _column(self, field: pa.Field, rows: pa.Array) -> pa.Array | pa.ChunkedArray:
        # Made again at each use, because the values of a partial shard change when it is read.
        shard = self._shard
        if self._overlay is not None:
            shard = OverlaidShard(shard, self._overlay, self._split.table.sample_schema)
        if field.name not in shard.schema.names:
            return pa.nulls(len(rows), pa.int64() if is_blob(field.type) else field.type)
        column = shard.column(field.name)
        # The offsets of blobs give their sizes. Their bytes may not be there, see `PartialShard`.
        return (pc.binary_length(column) if is_blob(field.type) else column).take(rows)

    def _fetch_whole_batches(self, rows: Integers) -> None:
        """Read the record batches of `rows` that have no frame: nothing of them is in the sample index."""
        if not isinstance(self._shard, PartialShard):
            return
        assert self._index is not None, "a partial shard has an index"
        assert self._index.layout is not None, "and a layout"
        batches: Sequence[BatchLayout] = self._index.layout.batches
        stops = np.cumsum([batch.num_samples for batch in batches])
        is_whole = np.array([batch.frame is None for batch in batches])
        self._shard.fetch(self._split.repository.objects, rows[is_whole[np.searchsorted(stops, rows, side="right")]])
