"""Shards and sample indexes of a table with its overlays; what reads samples of a table opens its shards here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from datasvc.keyed_random import Integers
from datasvc.repository import Objects
from datasvc.shards.format.ipc_reader import IpcReader, ObjectFiles
from datasvc.shards.format.mapped_file import Bytes
from datasvc.shards.format.overlays import ShardOverlay
from datasvc.shards.format.parts import ReadPlan
from datasvc.shards.format.reader import Shard, open_shard, python_value, text_errors
from datasvc.shards.format.sample_index import SampleIndex
from datasvc.shards.format.schema import KEY
from datasvc.shards.format.shard_table import ShardTable, read_stored_index


class OverlaidShard(Shard):
    """A shard with the columns of its overlay. Blobs, which have no overlay, are those of the shard.

    Args:
        shard: the shard, which may be a partial one.
        overlay: its overlay.
        split: columns of the split.
    """

    def __init__(self, shard: Shard, overlay: ShardOverlay, split: pa.Schema) -> None:
        # Not the initializer of `Shard`, which copies the list of record batches: a partial shard replaces them.
        self.stored = shard
        self.is_partial = shard.is_partial
        self.name = shard.name
        self.num_samples = shard.num_samples
        self.schema = pa.schema(overlay.fields(shard.schema, split), metadata=shard.schema.metadata)
        self._overlay = overlay
        self._names = overlay.stored_names(shard.schema)
        self._file = None
        self._arrays: dict[str, npt.NDArray[Any]] = {}
        self._valid: dict[str, npt.NDArray[np.bool_] | None] = {}

    def read(self, view: Bytes, buffer: Bytes) -> Bytes:
        """Return the same as `Shard.read`."""
        return self.stored.read(view, buffer)

    def reader(self, column: str, row: int, plan: ReadPlan) -> Callable[[Bytes, Bytes], Bytes]:
        """Return the same as `Shard.reader`."""
        return self.stored.reader(column, row, plan)

    @property
    def batches(self) -> Sequence[pa.RecordBatch]:
        """The record batches in order; columns without overlay are views of the file."""
        starts = np.cumsum([0, *(batch.num_rows for batch in self.stored.batches)]).tolist()
        return [
            self._overlay.apply(batch, np.arange(start, start + batch.num_rows), list(self.schema))
            for start, batch in zip(starts, self.stored.batches, strict=False)
        ]

    def column(self, name: str) -> pa.ChunkedArray:
        """Return a column of the shard, as a view of the file if it has no overlay."""
        own = self._names.get(name)
        if name not in self._overlay.group.columns:
            return self.stored.column(own if own is not None else name)
        base = None if own is None else pa.concat_arrays(self.stored.column(own).chunks)
        rows = np.arange(self.num_samples)
        return pa.chunked_array([self._overlay.patched(name, base, rows, self.schema.field(name).type)])

    def items(self, column: str, rows: npt.NDArray[np.int64]) -> list[Any]:
        """Return the same as `Shard.items`."""
        if column not in self.schema.names:
            return [None] * len(rows)
        if column not in self._overlay.group.columns:
            return self.stored.items(self._names[column], rows)
        with text_errors(self.name):
            return [python_value(self._patched[column][row]) for row in rows.tolist()]

    def blobs(self, column: str, rows: npt.NDArray[np.int64]) -> list[Bytes]:
        """Return the same as `Shard.blobs`."""
        return self.stored.blobs(column, rows)

    def values(self, column: str) -> npt.NDArray[Any]:
        """Return the same as `Shard.values`."""
        is_stored = column not in self._overlay.group.columns
        return self.stored.values(self._names[column]) if is_stored else super().values(column)

    def is_valid(self, column: str, rows: npt.NDArray[np.int64]) -> bool:
        """Return the same as `Shard.is_valid`."""
        if column in self._overlay.group.columns:
            return super().is_valid(column, rows)
        return column in self._names and self.stored.is_valid(self._names[column], rows)

    def check_texts(self) -> None:
        """Check the texts of the file; those of an overlay are checked when it is read. See `Shard.check_texts`."""
        self.stored.check_texts()

    def sample(self, row: int) -> dict[str, Any]:
        """Return the same as `Shard.sample`."""
        stored = self.stored.sample(row)
        with text_errors(self.name):
            return {
                each.name: python_value(self._patched[each.name][row])
                if each.name in self._overlay.group.columns
                else stored[self._names[each.name]]
                for each in self.schema
            }

    @cached_property
    def _patched(self) -> Mapping[str, pa.ChunkedArray]:
        return {name: self.column(name) for name in self._overlay.group.columns if name in self.schema.names}


def overlaid(objects: Objects, table: ShardTable, number: int, shard: Shard) -> Shard:
    """Return an opened shard of a table with its overlay, if it has one, after `ShardTable.check_shard`."""
    overlay = table.overlay(objects, number)
    if overlay is not None:
        shard = OverlaidShard(shard, overlay, table.sample_schema)
    return table.check_shard(number, shard)


def open_table_shard(objects: Objects, table: ShardTable, number: int) -> Shard:
    """Return a verified shard of a table with its overlay; for errors, see `open_shard` and `check_shard`."""
    return overlaid(objects, table, number, open_shard(objects, table.shard(number)))


def read_index(objects: Objects, table: ShardTable, number: int) -> SampleIndex | None:
    """Return the sample index of a shard with the digests of its overlay; for errors, see `read_stored_index`."""
    index, overlay = read_stored_index(objects, table, number), table.overlay(objects, number)
    if index is None or overlay is None:
        return index
    stored, payloads = (index.table.column(name).combine_chunks() for name in ("sample", "payload"))
    samples = overlay.digests(stored, index.num_samples)
    # A sample without blobs has its sample digest as payload digest.
    is_own = pa.array(index.digests("sample") == index.digests("payload"))
    chosen = np.arange(len(payloads)) + len(payloads) * is_own.to_numpy(zero_copy_only=False)
    columns = [index.table.column("key"), samples, pa.concat_arrays([payloads, samples]).take(pa.array(chosen))]
    return replace(index, table=pa.table(columns, schema=index.table.schema))


def blob_digests(index: SampleIndex, column: str, rows: Integers) -> dict[str, list[bytes | None]]:
    """Return the digest of the only blob column of samples at `rows`, from the stored index; None for null."""
    samples, payloads = (index.table.column(name).to_pylist() for name in ("sample", "payload"))
    return {column: [payloads[row] if payloads[row] != samples[row] else None for row in rows.tolist()]}


def read_values(objects: Objects, table: ShardTable, number: int, names: Sequence[str]) -> pa.Table:
    """Return columns of all stored samples of a shard, in the order of `names`; null in a column that it lacks.

    Raises:
        CorruptDataError, NotFoundError, UnavailableError: the shard or its overlay cannot be read.
    """
    info, overlay = table.shard(number), table.overlay(objects, number)
    needed = names if overlay is None else overlay.needed_names(names)
    with ObjectFiles(objects.storage, {info.digest: info.size_bytes}).open(info.digest) as file:
        batches = list(IpcReader(file, f"shard {info.digest}", needed, otherwise=KEY, compressed=True).batches())
        stored = pa.Table.from_batches(batches) if batches else pa.table({KEY: pa.array([], pa.string())})
    columns: list[pa.Array] = []
    own = {name: name for name in stored.column_names} if overlay is None else overlay.stored_names(stored.schema)
    for name in names:
        base = stored.column(own[name]).combine_chunks() if name in own else None
        data_type = table.sample_schema.field(name).type
        if overlay is not None:
            base = overlay.patched(name, base, np.arange(stored.num_rows), data_type)
        columns.append(pa.nulls(stored.num_rows, data_type) if base is None else base)
    return pa.table(columns, names=list(names))
