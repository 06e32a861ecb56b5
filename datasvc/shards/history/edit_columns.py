"""Changes of columns of a split by overlays: new values of samples, other names, and the sample digests of both."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Final

import numpy as np
import pyarrow as pa

from datasvc.keyed_random import Integers
from datasvc.repository import Digest, Objects
from datasvc.shards.format.digests import digest_batch
from datasvc.shards.format.ipc_reader import encode_table
from datasvc.shards.format.overlaid_shard import blob_digests, open_table_shard, read_index, read_values
from datasvc.shards.format.overlays import (
    DIGEST_FIELD,
    ColumnOverlay,
    DenseWriter,
    OverlayGroup,
    Overlays,
    Patch,
    merge_sparse,
    patch_array,
    sparse_table,
)
from datasvc.shards.format.schema import KEY, LABEL, is_blob
from datasvc.shards.format.shard_table import MAX_CLASSES, ShardTable, read_stored_index

# A sparse value takes 16 bytes more than a dense one: with more samples than this share, all values are dense.
_MAX_SPARSE: Final = 0.25


def set_values(objects: Objects, table: ShardTable, column: pa.Field, patches: Mapping[int, Patch]) -> ShardTable:
    """Return the split with new values in one column, which is added if the split lacks it.

    Args:
        objects: objects of the repository.
        table: the split.
        column: the column.
        patches: live rows, ascending, with their values, by shard.

    Raises:
        CorruptDataError, NotFoundError, UnavailableError: a shard, an index or an overlay cannot be read.
    """
    is_new = column.name not in table.sample_schema.names
    schema = table.sample_schema
    number = schema.get_field_index(column.name)
    changed = replace(table, sample_schema=schema.append(column) if is_new else schema.set(number, column))
    labels = None if column.name != LABEL else count_labels(objects, table, patches.items(), is_new=is_new)
    edited = _with_groups(changed, patches)
    written = _ColumnEdit(objects, table, edited, patches, column).run()
    return written if labels is None else replace(written, label_counts=labels)


def rename_values(objects: Objects, table: ShardTable, name: str, new: str | None) -> ShardTable:
    """Return the split with another name of a column, or without it (None); for errors, see `set_values`.

    The class names stay, so that labels that are added later have the same numbers.
    """
    fields = [each.with_name(new) if each.name == name and new else each for each in table.sample_schema]
    kept = [each for each in fields if new is not None or each.name != name]
    edited = _with_groups(table, range(table.num_shards))
    groups = tuple(group.renamed({name: new}) for group in edited.overlays.groups)
    edited = replace(edited, overlays=Overlays(groups), sample_schema=pa.schema(kept, table.sample_schema.metadata))
    written = _ColumnEdit(objects, table, edited, {}, None).run()
    return replace(written, label_counts={}) if name == LABEL else written


def _with_groups(table: ShardTable, shards: Mapping[int, Patch] | range) -> ShardTable:
    """Return the table with a group for those of `shards` that have no overlay yet."""
    numbers = table.overlay_numbers
    new = [shard for shard in sorted(shards) if numbers[shard] < 0]
    if not new:
        return table
    numbers[new] = table.overlays.num_shards + np.arange(len(new))
    return table.with_overlays(numbers, Overlays((*table.overlays.groups, OverlayGroup(len(new)))))


class _ColumnEdit:
    """Writes the overlays of one change.

    Args:
        objects: objects of the repository.
        before: the split before the change.
        after: the split with its columns after the change; its overlays have no new values yet.
        patches: new values by shard.
        column: their column; None: names change, and with them the digests of all samples.
    """

    def __init__(
        self,
        objects: Objects,
        before: ShardTable,
        after: ShardTable,
        patches: Mapping[int, Patch],
        column: pa.Field | None,
    ) -> None:
        self._objects, self._before, self._after = objects, before, after
        self._patches, self._column = patches, column
        self._stored = before.stored_per_shard
        # Without blobs: their digests are in the sample index, unless there are several columns of them.
        self._names = [each.name for each in after.sample_schema if each.name != KEY and not is_blob(each.type)]
        self._blobs = [each.name for each in after.sample_schema if is_blob(each.type)]

    def run(self) -> ShardTable:
        numbers = self._after.overlay_numbers
        groups, first = [], 0
        for group in self._after.overlays.groups:
            # By number in the group.
            shards = {
                int(numbers[shard]) - first: shard
                for shard in range(len(numbers))
                if first <= numbers[shard] < first + group.num_shards
            }
            first += group.num_shards
            groups.append(self._write(group, dict(sorted(shards.items()))))
        return self._after.with_overlays(numbers, Overlays(tuple(groups)))

    def _write(self, group: OverlayGroup, shards: Mapping[int, int]) -> OverlayGroup:
        touched = {
            number: shard for number, shard in shards.items() if self._column is None or shard in self._patches
        }
        if not touched:
            return group
        changed = sum(len(self._patches[shard][1]) for shard in touched.values()) if self._column else 0
        total = int(self._stored[list(shards.values())].sum())
        is_dense = self._column is None or changed > _MAX_SPARSE * total
        digests = self._writer(group.samples, DIGEST_FIELD.type, is_dense=is_dense)
        old = ColumnOverlay() if self._column is None else group.columns.get(self._column.name, ColumnOverlay())
        values = None if self._column is None else self._writer(old, self._column.type, is_dense=is_dense)
        nothing = pa.nulls(0, pa.null() if self._column is None else self._column.type)
        for number, shard in (shards if is_dense else touched).items():
            num_samples, digest = int(self._stored[shard]), self._before.shard(shard).digest
            patch = self._patches.get(shard, (np.empty(0, np.int64), nothing))
            if values is not None:
                values.add(number, digest, patch, num_samples, partial(self._present, shard))
            # Without an index, nothing has the digests of the other samples.
            is_all = values is None or self._before.index(shard) is None
            rows = np.arange(num_samples) if is_all or patch[0] is None else patch[0]
            computed = pa.array(self._digests(shard, rows, patch), DIGEST_FIELD.type)
            digests.add(number, digest, (rows, computed), num_samples, partial(self._present_digests, shard))
        group = replace(group, samples=digests.close(group.num_shards))
        if values is None or self._column is None:
            return group
        columns = {**group.columns, self._column.name: values.close(group.num_shards)}
        return replace(group, columns=columns)

    def _writer(self, old: ColumnOverlay, data_type: pa.DataType, *, is_dense: bool) -> _Writer:
        return _Writer(self._objects, self._before.overlays, old, data_type, is_dense=is_dense)

    def _present(self, shard: int) -> pa.Array:
        """Return the values of the column before the change."""
        assert self._column is not None, "only new values replace others"
        if self._column.name not in self._before.sample_schema.names:
            return pa.nulls(int(self._stored[shard]), self._column.type)
        return read_values(self._objects, self._before, shard, [self._column.name]).column(0).combine_chunks()

    def _present_digests(self, shard: int) -> pa.Array:
        index = read_index(self._objects, self._before, shard)
        assert index is not None, "all digests of a shard without an index are new"
        return index.table.column("sample").combine_chunks()

    def _digests(self, shard: int, rows: Integers, patch: Patch) -> list[bytes]:
        """Return the sample digests of rows after the change."""
        if not len(rows):
            return []
        index = read_stored_index(self._objects, self._before, shard)
        if index is not None and len(self._blobs) < 2:
            # No blob is read: its digest is the payload digest.
            known = blob_digests(index, self._blobs[0], rows) if self._blobs else {}
            table = read_values(self._objects, self._shown, shard, self._readable)
        else:
            known = {}
            shown = open_table_shard(self._objects, self._shown, shard)
            names = [name for name in [*self._readable, *self._blobs] if name in shown.schema.names]
            table = pa.table([shown.column(name) for name in names], names=names)
        columns = {name: _at(table.column(name), rows) for name in table.column_names}
        if self._column is not None:
            data_type = self._column.type
            base = columns.get(self._column.name, pa.nulls(len(rows), data_type))
            columns[self._column.name] = patch_array(base, rows, patch)
        batch = pa.RecordBatch.from_arrays([*columns.values(), pa.nulls(len(rows))], [*columns, KEY])
        return digest_batch(batch, known=known)[0]

    @property
    def _shown(self) -> ShardTable:
        """The split to read values from: with the new names, and without the new values."""
        return self._after if self._column is None else self._before

    @property
    def _readable(self) -> list[str]:
        return [name for name in self._names if name in self._shown.sample_schema.names]


class _Writer:
    """Writes new values of one column of a group over those of its present overlay, in the order of the shards."""

    def __init__(
        self,
        objects: Objects,
        overlays: Overlays,
        old: ColumnOverlay,
        data_type: pa.DataType,
        *,
        is_dense: bool,
    ) -> None:
        self._objects, self._overlays, self._old, self._type = objects, overlays, old, data_type
        self._dense = DenseWriter(objects) if is_dense else None
        self._sparse: dict[int, Patch] = {}
        self._shards: dict[int, Digest] = {}

    def add(
        self, number: int, shard: Digest, patch: Patch, num_samples: int, present: Callable[[], pa.Array]
    ) -> None:
        """Add new values of a shard of `num_samples`; `present` returns all values before the change."""
        if self._dense is None:
            self._sparse[number], self._shards[number] = patch, shard
            return
        base = pa.nulls(num_samples, self._type) if len(patch[1]) == num_samples else present()
        self._dense.add(number, patch_array(base, np.arange(num_samples), patch), shard)

    def close(self, num_shards: int) -> ColumnOverlay:
        """Store what was added; return the overlay of a group of `num_shards`."""
        if self._dense is not None:
            return self._dense.close(num_shards)
        new = sparse_table(self._sparse, self._type, self._shards)
        if self._old.sparse is not None:
            new = merge_sparse(self._overlays.sparse(self._objects, self._old.sparse.digest, self._type), new)
        return replace(self._old, sparse=self._objects.put(encode_table(new)))


def _at(column: pa.ChunkedArray, rows: Integers) -> pa.Array:
    values = column.take(pa.array(rows))
    return pa.concat_arrays([pa.nulls(0, column.type), *values.chunks])


def count_labels(
    objects: Objects, table: ShardTable, patches: Iterable[tuple[int, Patch]], *, is_new: bool
) -> dict[int, int] | None:
    """Return the numbers of samples by label after new labels; None if the split does not count them."""
    if not is_new and not table.label_counts:
        return None
    counts = Counter(table.label_counts)
    for shard, (rows, values) in patches:
        assert rows is not None, "new values have rows"
        if not is_new:
            counts.subtract(_present_labels(read_values(objects, table, shard, [LABEL]).column(0), rows))
        counts.update(_present_labels(pa.chunked_array([values]), np.arange(len(values))))
    counted = {label: count for label, count in sorted(counts.items()) if count}
    return counted if len(counted) <= MAX_CLASSES else {}


def _present_labels(labels: pa.ChunkedArray, rows: Integers) -> list[int]:
    return [label for label in labels.take(pa.array(rows)).to_pylist() if isinstance(label, int)]
