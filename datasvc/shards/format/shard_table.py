"""The shard table of a split: one row per shard. It is stored as an object, so its digest identifies the samples.

The table stores nothing per sample, and a row takes a few hundred bytes. So a split of a billion samples opens in
seconds. An entry of a data set names the table of each split.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa

from datasvc.errors import ConfigError, CorruptDataError
from datasvc.keyed_random import Integers
from datasvc.order import OrderConfig
from datasvc.printable import count_text
from datasvc.repository import Digest, ObjectInfo, Objects
from datasvc.repository.logs.redactions import Redaction, Redactions, redaction_log
from datasvc.repository.objects.objects import parse_digest
from datasvc.shards.format.ipc_reader import (
    PARSE_ERRORS,
    check_columns,
    check_schema,
    column_to_numpy,
    encode_table,
    read_table,
)
from datasvc.shards.format.overlays import OverlayGroup, Overlays, ShardOverlay
from datasvc.shards.format.reader import Shard
from datasvc.shards.format.sample_index import SampleIndex
from datasvc.shards.format.schema import HEIGHT, WIDTH, has_compression, measured_columns
from datasvc.shards.format.view_table import EpochGrid, Grouping, Packing, ViewOrigin, WeightPack, checked
from datasvc.shards.format.writer import ShardStatistics

TABLE_FORMAT = 6  # of a table with groups
_COMPRESSED_FORMAT = 5  # of a table of shards with compressed columns, without groups
_PACKED_FORMAT = 4  # of a table with packs
_VALUES_FORMAT = 3  # of a table with weights or overlays, without packs
_PLAIN_FORMAT = 2  # of a table without all of them, which earlier releases read
_COLUMNS = pa.schema(
    [
        pa.field("digest", pa.binary(32), nullable=False),
        pa.field("samples", pa.int64(), nullable=False),
        pa.field("bytes", pa.int64(), nullable=False),
        pa.field("max_width", pa.int32(), nullable=False),
        pa.field("max_height", pa.int32(), nullable=False),
        pa.field("max_sample_bytes", pa.int64(), nullable=False),
        pa.field("index", pa.binary(32)),
        pa.field("deleted", pa.int64(), nullable=False),
    ]
)
_OVERLAY = pa.field("overlay", pa.int64())  # a further column of tables with overlays
_WEIGHT = pa.field("weight", pa.int64(), nullable=False)  # a further column of tables with weights
_PACKS = pa.field("packs", pa.int64(), nullable=False)  # a further column of tables with packs
_METADATA_KEY = b"datasvc.table"
# A table with more different labels has no label counts. Such labels are arbitrary integers, and their counts would
# take much space.
MAX_CLASSES = 1 << 16
# Counts and sizes with a sum up to this limit are added exactly in int64.
_MAX_TOTAL = 1 << 60


@dataclass(frozen=True)
class TableRow:
    """The row of one shard.

    Attributes:
        shard: digest and size of the shard.
        statistics: statistics of the samples stored in it.
        index: digest of its sample index; None for shards written before sample indexes existed.
    """

    shard: ObjectInfo
    statistics: ShardStatistics
    index: Digest | None = None


@dataclass(frozen=True)
class ShardTable:
    """The shards of one split, in table order.

    Attributes:
        rows: Arrow table with the columns of docs/reference/formats.md.
        sample_schema: columns of the samples. Samples of a shard that lacks a column have null in it.
        classes: class names: label i means `classes[i]`; empty if there are none.
        label_counts: number of live (not deleted) samples by label; empty if they were not counted, for instance
            because there are more than `MAX_CLASSES` labels.
        image_kinds: number of images by format, deleted ones included.
        deletions: digest of the deletions object; None if no sample is deleted.
        view: origin of the table of a view; None for the table of a version.
        weights: packs of the weights of the live samples; () for a table without weights.
        redacted: redaction of each shard with purged samples, by its digest: from the log (`with_redactions`), or of
            a shard that was written again.
        overlays: values that replace those of the shards. If there are any, `rows` has the column `overlay`.
        packing: packs of the documents of the split, which the access order then counts in place of samples; None
            for a table without packs.
        grouping: groups of images of a similar aspect; None for a table without groups.
    """

    rows: pa.Table
    sample_schema: pa.Schema
    classes: tuple[str, ...] = ()
    label_counts: Mapping[int, int] = field(default_factory=dict)
    image_kinds: Mapping[str, int] = field(default_factory=dict)
    deletions: Digest | None = None
    view: ViewOrigin | None = None
    weights: tuple[WeightPack, ...] = ()
    redacted: Mapping[Digest, Redaction] = field(default_factory=dict)

    @classmethod
    def read(cls, objects: Objects, digest: Digest) -> ShardTable:
        """Return a stored table with the redactions of its repository: all readers of samples open tables by this.

        Raises:
            CorruptDataError, ConfigError: see `decode`, and `RedactionLog.read`.
            NotFoundError, UnavailableError: see `Objects.read`.
        """
        table = cls.decode(objects.read(digest), objects.location(digest))
        return table.with_redactions(redaction_log(objects).read())

    overlays: Overlays = field(default_factory=Overlays)
    packing: Packing | None = None
    grouping: Grouping | None = None

    @classmethod
    def build(cls, rows: Sequence[TableRow], sample_schema: pa.Schema, classes: Sequence[str] = ()) -> ShardTable:
        """Return the table of these shards, in the given order and without deletions."""
        statistics = [row.statistics for row in rows]
        columns = [
            [bytes.fromhex(row.shard.digest) for row in rows],
            [shard.num_samples for shard in statistics],
            [row.shard.size_bytes for row in rows],
            [shard.max_width for shard in statistics],
            [shard.max_height for shard in statistics],
            [shard.max_sample_bytes for shard in statistics],
            [bytes.fromhex(row.index) if row.index else None for row in rows],
            [0] * len(rows),
        ]
        label_counts = _total(shard.label_counts for shard in statistics)
        return cls(
            pa.table(columns, schema=_COLUMNS),
            sample_schema,
            tuple(classes),
            label_counts if len(label_counts) <= MAX_CLASSES else {},
            _total(shard.image_kinds for shard in statistics),
        )

    def encode(self) -> bytes:
        """Return the table as an Arrow IPC file; equal tables give equal bytes."""
        described: dict[str, Any] = {
            "format": self._format,
            "classes": list(self.classes),
            "columns": {column.name: str(column.type) for column in self.sample_schema},
            "label_counts": {str(label): count for label, count in self.label_counts.items()},
            "image_kinds": dict(self.image_kinds),
            "deletions": self.deletions,
        }
        if self.view is not None:
            described["view"] = {**asdict(self.view), "steps": list(self.view.steps)}
        if self.weights:
            described["weights"] = [[pack.first_shard, pack.digest] for pack in self.weights]
        if self.packing is not None:
            described["packing"] = self.packing.to_json()
        if self.grouping is not None:
            described["grouping"] = self.grouping.to_json()
        if in_table := [each.to_json() for each in self.redacted.values() if each.in_table]:
            described["redacted"] = in_table
        if self.overlays.groups:
            described["overlays"] = [group.to_json() for group in self.overlays.groups]
        metadata = {
            _METADATA_KEY: json.dumps(described, sort_keys=True, ensure_ascii=False).encode(),
            b"datasvc.sample_schema": self.sample_schema.serialize().to_pybytes(),
        }
        return encode_table(self.rows.replace_schema_metadata(metadata))

    @classmethod
    def decode(cls, content: bytes, name: str) -> ShardTable:
        """Return the table that `encode` wrote, in this or an earlier format.

        Raises:
            CorruptDataError: the content is not a shard table.
            ConfigError: the table has a newer format than this datasvc reads.
        """
        try:
            rows = read_table(content, name)
            metadata = rows.schema.metadata or {}
            described = json.loads(metadata[_METADATA_KEY])
            schema = pa.ipc.read_schema(pa.py_buffer(metadata[b"datasvc.sample_schema"]))
            check_schema(schema)
            format_number = int(described["format"])
        except (CorruptDataError, RecursionError, *PARSE_ERRORS) as error:
            raise CorruptDataError(f"{name} is not a shard table: {error!r}") from error
        if format_number > TABLE_FORMAT:
            raise ConfigError(
                f"{name} has shard table format {format_number}; this datasvc reads up to {TABLE_FORMAT}: "
                "upgrade datasvc"
            )
        try:
            # Tables of format 1 lack two columns, which `_upgraded` adds, and fields of the metadata, which are
            # therefore read with `get`.
            rows = rows if format_number > 1 else _upgraded(rows)
            overlays = Overlays(tuple(map(OverlayGroup.of_json, described.get("overlays", ()))))
            is_weighted = "weights" in described or (format_number == _VALUES_FORMAT and not overlays.groups)
            is_grouped = "grouping" in described or format_number == TABLE_FORMAT
            is_packed = "packing" in described or format_number == _PACKED_FORMAT
            wanted = {_OVERLAY: overlays.groups, _WEIGHT: is_weighted, _PACKS: is_packed}
            further = [column for column, has_column in wanted.items() if has_column]
            check_columns(rows, pa.schema([*_COLUMNS, *further]), f"{name} is not a shard table")
            _check_rows(rows)
            weights = tuple(
                WeightPack(checked(first, int), parse_digest(digest))
                for first, digest in described.get("weights", [])
            )
            if is_weighted and (not weights or weights[0].first_shard != 0):
                raise ValueError("the weights of the first shard are missing")  # noqa: TRY301
            deletions, view = described.get("deletions"), described.get("view")
            redacted = [replace(Redaction.from_json(each), in_table=True) for each in described.get("redacted", ())]
            return cls(
                rows,
                schema,
                tuple(checked(class_name, str) for class_name in described["classes"]),
                {int(label): checked(count, int) for label, count in described.get("label_counts", {}).items()},
                {kind: checked(count, int) for kind, count in described.get("image_kinds", {}).items()},
                parse_digest(deletions) if deletions is not None else None,
                ViewOrigin.from_dict(view) if view is not None else None,
                weights,
                {each.shard.digest: each for each in redacted},
                overlays=overlays,
                packing=Packing.of_json(described["packing"]) if is_packed else None,
                grouping=Grouping.of_json(described["grouping"]) if is_grouped else None,
            )
        except (pa.ArrowException, AttributeError, KeyError, TypeError, ValueError) as error:
            raise CorruptDataError(f"{name} is not a shard table: {error!r}") from error

    @property
    def _format(self) -> int:
        # Earlier releases read a plain view, and refuse one whose weights, packs or groups they would ignore, and
        # shards that they cannot decode.
        if self.grouping is not None:
            return TABLE_FORMAT
        if has_compression(self.sample_schema):
            return _COMPRESSED_FORMAT
        if self.packing is not None:
            return _PACKED_FORMAT
        return _VALUES_FORMAT if self.weights or self.overlays.groups else _PLAIN_FORMAT

    @property
    def num_shards(self) -> int:
        """Number of shards."""
        return int(self.rows.num_rows)

    @property
    def samples_per_shard(self) -> Integers:
        """Number of live samples of each shard; only these are in the access order: `int64[num_shards]`."""
        return self.stored_per_shard - self.deleted_per_shard

    @property
    def positions_per_shard(self) -> Integers:
        """Number of positions of each shard in the order: its packs, or its live samples: `int64[num_shards]`."""
        return self.samples_per_shard if self.packing is None else self._integers(_PACKS.name)

    @property
    def num_positions(self) -> int:
        """Number of positions of an epoch: packs, or live samples."""
        return int(self.positions_per_shard.sum())

    @property
    def stored_per_shard(self) -> Integers:
        """Number of samples in each shard's file: `int64[num_shards]`."""
        return self._integers("samples")

    @property
    def deleted_per_shard(self) -> Integers:
        """Number of deleted samples of each shard: `int64[num_shards]`."""
        return self._integers("deleted")

    @property
    def weight_per_shard(self) -> Integers:
        """Sum of the weights of the live samples of each shard: `int64[num_shards]`; only with weights."""
        return self._integers("weight")

    def epoch_grid(self, config: OrderConfig, epoch: int) -> EpochGrid:
        """Return the grid that says how often an epoch serves each sample; only with weights."""
        return EpochGrid.of_epoch(self.num_samples, int(self.weight_per_shard.sum()), config, epoch)

    def epoch_counts(self, config: OrderConfig, epoch: int) -> Integers:
        """Return how many samples or packs an epoch serves of each shard: `int64[num_shards]`, for `AccessOrder`."""
        if not self.weights:
            return self.positions_per_shard
        return self.epoch_grid(config, epoch).counts(0, self.weight_per_shard)

    @property
    def least_per_epoch(self) -> Integers:
        """The smallest number of samples that an epoch serves of each shard, and at least 1: `int64[num_shards]`."""
        if not self.weights:
            return self.positions_per_shard
        sums = self.weight_per_shard
        # As floats: a rounding error of one sample is less than what the shards of a window vary by.
        expected: Integers = (self.num_samples * (sums / sums.sum())).astype(np.int64)
        return np.maximum(1, expected)

    @property
    def bytes_per_shard(self) -> Integers:
        """Size of each shard's file in bytes: `int64[num_shards]`."""
        return self._integers("bytes")

    @property
    def num_samples(self) -> int:
        """Number of live samples of the split."""
        return int(self.samples_per_shard.sum())

    @property
    def size_bytes(self) -> int:
        """Total size of the shards' files in bytes."""
        return int(self.bytes_per_shard.sum())

    def largest(self, statistic: str) -> int:
        """Return the largest value of a column of statistics, such as "max_width"; 0 without shards."""
        return int(column_to_numpy(self.rows.column(statistic)).max(initial=0))

    def shard(self, number: int) -> ObjectInfo:
        """Return the digest and size of one shard."""
        digest = Digest(self.rows.column("digest")[number].as_py().hex())
        return ObjectInfo(digest, int(self.rows.column("bytes")[number].as_py()))

    def shards(self) -> list[ObjectInfo]:
        """Return all shards in table order."""
        digests, sizes = self.rows.column("digest").to_pylist(), self.rows.column("bytes").to_pylist()
        return [ObjectInfo(Digest(digest.hex()), size) for digest, size in zip(digests, sizes, strict=True)]

    def cached_objects(self) -> list[ObjectInfo]:
        """Return what the cache of a node holds of the split: its shards, and the objects of their overlays."""
        return [*self.shards(), *self.overlays.value_objects().values()]

    def check_shard(self, number: int, shard: Shard) -> Shard:
        """Return an opened shard if its columns, image sizes and number of samples are those that this table lists.

        Raises:
            CorruptDataError: one of them differs, so the access order or a loader would use wrong numbers.
        """
        listed = int(self.rows.column("samples")[number].as_py())
        if shard.num_samples != listed:
            raise CorruptDataError(
                f"{shard.name} holds {count_text(shard.num_samples, 'sample')}, the shard table lists "
                f"{listed}: restore both from "
                "another copy"
            )
        listed_types = {column.name: column.type for column in self.sample_schema}
        for column in shard.schema:
            if listed_types.get(column.name) != column.type:
                raise CorruptDataError(
                    f"{shard.name} has a column {column.name!r} of type {column.type}, the shard table lists "
                    f"{listed_types.get(column.name, 'no such column')}: restore both from another copy"
                )
        for name, statistic in ((WIDTH, "max_width"), (HEIGHT, "max_height")):
            # Sizes that the ingest measured are int32. A column of this name with another type is the source's own.
            if name not in measured_columns(shard.schema) or listed_types.get(name) != pa.int32():
                continue
            sizes, largest = shard.values(name), int(self.rows.column(statistic)[number].as_py())
            # Checked, because loaders allocate memory for these sizes. An image that is null has size 0.
            if sizes.min(initial=0) < 0 or sizes.max(initial=0) > largest:
                raise CorruptDataError(
                    f"{shard.name} has images with a {name} of {sizes.min(initial=0)} to {sizes.max(initial=0)} "
                    f"pixels, the shard table lists at most {largest}: restore both from another copy"
                )
        return shard

    def index(self, number: int) -> Digest | None:
        """Return the digest of a shard's sample index; None if it has none."""
        index = self.rows.column("index")[number].as_py()
        return Digest(index.hex()) if index is not None else None

    @property
    def overlay_numbers(self) -> Integers:
        """Number of each shard in the overlays: `int64[num_shards]`, -1 for a shard without overlay; a copy."""
        if _OVERLAY.name not in self.rows.schema.names:
            return np.full(self.num_shards, -1, np.int64)
        return np.array(column_to_numpy(self.rows.column(_OVERLAY.name).fill_null(-1)), np.int64)

    def with_overlays(self, numbers: Integers, overlays: Overlays) -> ShardTable:
        """Return the table with other overlays; `numbers` as in `overlay_numbers`."""
        rows = self.rows.select([name for name in self.rows.schema.names if name != _OVERLAY.name])
        if overlays.groups:
            array = pa.array(numbers, pa.int64(), mask=numbers < 0)
            rows = rows.add_column(len(_COLUMNS), _OVERLAY, array)  # before the weights
        return replace(self, rows=rows, overlays=overlays)

    def overlay(self, objects: Objects, number: int) -> ShardOverlay | None:
        """Return the overlay of a shard; None if it has none."""
        place = self.rows.column(_OVERLAY.name)[number].as_py() if self.overlays.groups else None
        return None if place is None else self.overlays.shard(objects, place)

    def objects(self) -> set[Digest]:
        """Return the digests of all objects: shards, indexes, deletions, weights, packs, aspects, overlays."""
        values = [*self.rows.column("digest").to_pylist(), *self.rows.column("index").to_pylist()]
        digests = {Digest(value.hex()) for value in values if value is not None}
        others = {each.digest for each in self.packs} | {each.digest for each in self.overlays.objects()}
        return digests | others | ({self.deletions} if self.deletions is not None else set())

    @property
    def packs(self) -> tuple[WeightPack, ...]:
        """The objects with the weights and the aspects of the samples, or with the packs of the documents."""
        aspects = self.grouping.objects if self.grouping is not None else ()
        return (self.weights if self.packing is None else self.packing.objects) + aspects

    def with_redactions(self, redactions: Redactions) -> ShardTable:
        """Return the table with the new objects in place of those that were replaced; rows stay."""
        table = replace(self, overlays=self.overlays.replaced(redactions.by_overlay))
        if not (known := [bytes.fromhex(each) for each in {*redactions.by_shard, *redactions.redacted}]):
            return table
        import pyarrow.compute as pc

        digests = self.rows.column("digest")
        is_known = pc.is_in(digests, value_set=pa.array(known, digests.type)).to_numpy()
        columns = {name: self.rows.column(name).to_pylist() for name in ("digest", "bytes", "index")}
        redacted = dict(self.redacted)
        for number in np.flatnonzero(is_known).tolist():
            shard = self.shard(number).digest
            each = redactions.by_shard.get(shard) or redactions.redacted[shard]
            redacted.pop(shard, None)
            if (own := self.redacted.get(shard)) is not None:
                each = replace(each, payloads={**each.payloads, **own.payloads}, in_table=True)
            redacted[each.shard.digest] = each
            columns["digest"][number] = bytes.fromhex(each.shard.digest)
            columns["bytes"][number], columns["index"][number] = each.shard.size_bytes, bytes.fromhex(each.index)
        table = replace(table, redacted=redacted)
        for name, values in columns.items() if is_known.any() else ():
            table = table.with_column(name, values)
        return table

    def redacted_rows(self, number: int) -> Integers:
        """Return the rows of a shard that were purged: `int64[n]`, ascending."""
        redaction = self.redacted.get(self.shard(number).digest) if self.redacted else None
        return np.array(sorted(redaction.payloads) if redaction else (), np.int64)

    def with_column(self, name: str, values: Sequence[Any] | Integers) -> ShardTable:
        """Return the table with one column of its rows replaced or added; `values` has one value per shard."""
        further = {_WEIGHT.name: _WEIGHT, _PACKS.name: _PACKS}
        column = further.get(name) or _COLUMNS.field(name)
        number = self.rows.schema.get_field_index(name)
        array = pa.array(values, column.type)
        rows = self.rows.append_column(column, array) if number < 0 else self.rows.set_column(number, column, array)
        return replace(self, rows=rows)

    def _integers(self, column: str) -> Integers:
        return np.asarray(column_to_numpy(self.rows.column(column)), np.int64)


def read_stored_index(objects: Objects, table: ShardTable, number: int) -> SampleIndex | None:
    """Return the sample index of a shard as it is stored, without overlay; None if it has none.

    Raises:
        CorruptDataError: the index is corrupt, or lists another number of samples than the table.
        NotFoundError, UnavailableError: see `Objects.read`.
    """
    digest = table.index(number)
    if digest is None:
        return None
    index = SampleIndex.decode(objects.read(digest), objects.location(digest))
    listed = int(table.rows.column("samples")[number].as_py())
    if index.num_samples != listed:
        raise CorruptDataError(
            f"{objects.location(digest)} lists {count_text(index.num_samples, 'sample')}, the shard table "
            f"{listed}: restore both from another copy"
        )
    return index


def _upgraded(rows: pa.Table) -> pa.Table:
    """Return the rows of a format 1 table in the current format: no sample indexes, no deletions."""
    rows = rows.append_column(_COLUMNS.field("index"), pa.nulls(rows.num_rows, pa.binary(32)))
    return rows.append_column(_COLUMNS.field("deleted"), pa.array(np.zeros(rows.num_rows, np.int64)))


def _check_rows(rows: pa.Table) -> None:
    """Raise ValueError if a count or a size is out of range."""
    names = ("samples", "bytes", "deleted", *({"weight", "packs"} & set(rows.schema.names)))
    columns = {name: column_to_numpy(rows.column(name)) for name in names}
    for name, values in columns.items():
        # Sum them as floats, because the int64 sum of hostile values may overflow.
        if values.min(initial=0) < 0 or values.sum(dtype=np.float64) > _MAX_TOTAL:
            raise ValueError(f"column {name!r} has values that are negative or too large")
    if (columns["deleted"] > columns["samples"]).any():
        raise ValueError("a shard has more deleted samples than samples")


def _total(counts: Iterable[Mapping[Any, int]]) -> dict[Any, int]:
    """Return the sums of the shards' counts by label or image kind, in ascending order of the labels or kinds."""
    total: Counter[Any] = Counter()
    for counter in counts:
        total.update(counter)
    return dict(sorted(total.items()))
