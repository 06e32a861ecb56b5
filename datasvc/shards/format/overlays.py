"""Overlays: values of columns that a version changed, added, renamed or dropped, without writing its shards again.

Shards are immutable. The shard table of a version names overlays, which are applied where its shards are opened.
Values of few samples are *sparse*: one object with shard, row and value of each. Values of many are *dense*: packs of
about `PACK_BYTES` that each hold the values of several shards, and are read by range. The sample digests of changed
samples are overlaid in the same way, so that what compares samples needs no more than the sample indexes.

Objects with values name the shards that these belong to. So equal values of two data sets are two objects: a purge of
samples of one of them does not change the other, and finds its values in objects that no table names.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
import pyarrow as pa
from xxhash import xxh3_128_digest

from datasvc.errors import CorruptDataError
from datasvc.keyed_random import Integers
from datasvc.repository import Digest, ObjectInfo, Objects
from datasvc.repository.objects.objects import parse_digest
from datasvc.shards.format.digests import DIGEST_BYTES
from datasvc.shards.format.ipc_reader import PARSE_ERRORS, column_to_numpy, decode_table, encode_table, read_stream

OVERLAY_FORMAT: Final = 1
PACK_BYTES: Final = 64 << 20
DIGEST_FIELD: Final = pa.field("sample", pa.binary(DIGEST_BYTES))
SHARDS_KEY: Final = b"datasvc.overlay.shards"
_FORMAT_KEY: Final = b"datasvc.overlay.format"
_METADATA: Final = {_FORMAT_KEY: str(OVERLAY_FORMAT).encode()}
_DIRECTORY: Final = pa.schema(
    [
        pa.field("pack", pa.int64(), nullable=False),
        pa.field("offset", pa.int64(), nullable=False),
        pa.field("length", pa.int64(), nullable=False),
        pa.field("digest", pa.binary(DIGEST_BYTES), nullable=False),
    ],
    metadata=_METADATA,
)

Patch = tuple[Integers | None, pa.Array]
"""Rows of a shard, ascending, with their values; None: all rows."""


@dataclass(frozen=True)
class ColumnOverlay:
    """Values of one column. Those of `sparse` replace those of the packs.

    Attributes:
        sparse: object of sparse values; None: there are none.
        directory: object that says where the values of each shard are in `packs`; None without packs.
        packs: objects of dense values.
    """

    sparse: ObjectInfo | None = None
    directory: ObjectInfo | None = None
    packs: tuple[ObjectInfo, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return JSON values for the metadata of a shard table."""
        sparse, directory = (each and _place(each) for each in (self.sparse, self.directory))
        return {"sparse": sparse, "directory": directory, "packs": [_place(pack) for pack in self.packs]}

    @classmethod
    def of_json(cls, value: Any) -> ColumnOverlay:
        """Return what `to_json` wrote. Raise KeyError, TypeError, ValueError or CorruptDataError otherwise."""
        sparse, directory = (value[name] and _info(*value[name]) for name in ("sparse", "directory"))
        return cls(sparse, directory, tuple(_info(*pack) for pack in value["packs"]))

    def replaced(self, objects: Mapping[Digest, ObjectInfo]) -> ColumnOverlay:
        """Return the overlay with other objects in place of those that `objects` has."""
        sparse, directory = (each and objects.get(each.digest, each) for each in (self.sparse, self.directory))
        return ColumnOverlay(sparse, directory, tuple(objects.get(pack.digest, pack) for pack in self.packs))

    @property
    def small(self) -> list[ObjectInfo]:
        """Its objects without the packs."""
        return [info for info in (self.sparse, self.directory) if info is not None]


def _place(info: ObjectInfo) -> list[Any]:
    return [info.digest, info.size_bytes]


def _info(digest: str, size_bytes: int) -> ObjectInfo:
    return ObjectInfo(parse_digest(digest), int(size_bytes))


@dataclass(frozen=True)
class OverlayGroup:
    """The overlays of shards that were in a table together when they got their first overlay.

    Attributes:
        num_shards: number of these shards. They keep their numbers in the group while tables change.
        names: name in the split of a column by its name in the shards; None: the column was dropped.
        columns: values by name of the column in the split.
        samples: sample digests of the changed samples.
    """

    num_shards: int
    names: Mapping[str, str | None] = field(default_factory=dict)
    columns: Mapping[str, ColumnOverlay] = field(default_factory=dict)
    samples: ColumnOverlay = field(default_factory=ColumnOverlay)

    def to_json(self) -> dict[str, Any]:
        """Return JSON values for the metadata of a shard table."""
        columns = {name: column.to_json() for name, column in self.columns.items()}
        samples = self.samples.to_json()
        return {"shards": self.num_shards, "names": dict(self.names), "columns": columns, "samples": samples}

    @classmethod
    def of_json(cls, value: Any) -> OverlayGroup:
        """Return what `to_json` wrote; for errors, see `ColumnOverlay.of_json`."""
        names = {str(stored): None if name is None else str(name) for stored, name in value["names"].items()}
        columns = {str(name): ColumnOverlay.of_json(column) for name, column in value["columns"].items()}
        return cls(int(value["shards"]), names, columns, ColumnOverlay.of_json(value["samples"]))

    def renamed(self, names: Mapping[str, str | None]) -> OverlayGroup:
        """Return the group with other names of columns; the name None drops a column."""
        mapped = {stored: names.get(name, name) if name is not None else None for stored, name in self.names.items()}
        mapped |= {name: new for name, new in names.items() if name not in self.names}
        columns = {names.get(name, name): column for name, column in self.columns.items()}
        return replace(self, names=mapped, columns={name: each for name, each in columns.items() if name is not None})


@dataclass(frozen=True)
class Overlays:
    """The overlays of a split. The column `overlay` of its table has the number of each shard, counted over `groups`.

    Objects that were read are kept for the next shard, except packs.
    """

    groups: tuple[OverlayGroup, ...] = ()
    _read: dict[Digest, pa.Table] = field(default_factory=dict, init=False, compare=False, repr=False)

    @property
    def num_shards(self) -> int:
        """Number of shards of all groups; the next group starts with this number."""
        return sum(group.num_shards for group in self.groups)

    def parts(self) -> Iterator[ColumnOverlay]:
        """Yield the overlays of all columns and of the sample digests."""
        for group in self.groups:
            yield from (*group.columns.values(), group.samples)

    def objects(self) -> list[ObjectInfo]:
        """Return all objects, each once."""
        return [*dict.fromkeys(info for part in self.parts() for info in (*part.small, *part.packs))]

    def value_objects(self) -> dict[Digest, ObjectInfo]:
        """Return the objects that a reader of samples needs, by digest: all but the sample digests."""
        columns = (column for group in self.groups for column in group.columns.values())
        return {info.digest: info for column in columns for info in (*column.small, *column.packs)}

    def replaced(self, objects: Mapping[Digest, ObjectInfo]) -> Overlays:
        """Return the overlays with other objects in place of those that `objects` has, by digest."""
        if not objects:
            return self
        return Overlays(
            tuple(
                replace(
                    group,
                    columns={name: column.replaced(objects) for name, column in group.columns.items()},
                    samples=group.samples.replaced(objects),
                )
                for group in self.groups
            )
        )

    def find(self, number: int) -> tuple[int, int]:
        """Return the group of a number of the column `overlay`, and the shard's number in the group."""
        for index, group in enumerate(self.groups):
            if number < group.num_shards:
                return index, number
            number -= group.num_shards
        raise CorruptDataError(
            "a shard table has a number of an overlay that it does not have: restore it from a copy"
        )

    def shard(self, objects: Objects, number: int) -> ShardOverlay:
        """Return the overlay of one shard, which reads values when they are needed."""
        index, shard = self.find(number)
        group = self.groups[index]

        def read(part: ColumnOverlay, data_type: pa.DataType) -> list[Patch]:
            return self.patches(objects, part, shard, data_type)

        return ShardOverlay(group, read)

    def patches(self, objects: Objects, part: ColumnOverlay, shard: int, data_type: pa.DataType) -> list[Patch]:
        """Return the values of a part for a shard, by its number in the group; see `ShardOverlay.read`."""
        patches: list[Patch] = []
        if part.directory is not None:
            directory = self.directory(objects, part.directory.digest)
            if shard >= directory.num_rows:
                raise CorruptDataError(
                    f"{objects.location(part.directory.digest)} lacks a shard: restore it from a copy"
                )
            entry = directory.slice(shard, 1).to_pylist()[0]
            if entry["length"]:
                stream = read_dense(objects, part.packs, entry, data_type)
                patches.append((None, stream.column("value").combine_chunks()))
        if part.sparse is not None:
            sparse = self.sparse(objects, part.sparse.digest, data_type)
            start, stop = np.searchsorted(column_to_numpy(sparse.column("shard")), [shard, shard + 1]).tolist()
            if stop > start:
                rows = np.asarray(column_to_numpy(sparse.column("row"))[start:stop], np.int64)
                patches.append((rows, sparse.column("value").slice(start, stop - start).combine_chunks()))
        return patches

    def sparse(self, objects: Objects, digest: Digest, data_type: pa.DataType) -> pa.Table:
        """Return an object of sparse values, sorted by `shard` and `row`. Raise what `Objects.read` raises."""
        return self._table(objects, digest, _sparse_schema(data_type))

    def directory(self, objects: Objects, digest: Digest) -> pa.Table:
        """Return a directory of packs. Raise what `Objects.read` raises."""
        return self._table(objects, digest, _DIRECTORY)

    def _table(self, objects: Objects, digest: Digest, schema: pa.Schema) -> pa.Table:
        if digest not in self._read:
            location = objects.location(digest)
            self._read[digest] = decode_table(
                objects.read(digest), location, what="overlay", format_key=_FORMAT_KEY, latest=OVERLAY_FORMAT,
                columns=schema,
            )  # fmt: skip
        table = self._read[digest]
        if not table.schema.equals(schema):
            raise CorruptDataError(f"{objects.location(digest)} has values of another type than its column")
        return table


@dataclass(frozen=True)
class ShardOverlay:
    """The overlay of one shard.

    Attributes:
        group: the group of the shard.
        read: returns the values of a part with a type: first those of all rows, then those that replace them.
    """

    group: OverlayGroup
    read: Callable[[ColumnOverlay, pa.DataType], list[Patch]]

    def stored_names(self, stored: pa.Schema) -> dict[str, str]:
        """Return the name in the shard of each of its columns, by name in the split, without the dropped ones."""
        names = {self.group.names.get(name, name): name for name in stored.names}
        return {name: own for name, own in names.items() if name is not None}

    def needed_names(self, names: Collection[str]) -> list[str]:
        """Return the columns of the shard that hold values of the split's columns `names` without overlay."""
        own = [stored for stored, name in self.group.names.items() if name in names]
        return [*own, *(name for name in names if name not in self.group.names)]

    def fields(self, stored: pa.Schema, split: pa.Schema) -> list[pa.Field]:
        """Return the columns of the shard with its overlay, in the order of the split's columns."""
        own = self.stored_names(stored)
        extra = [pa.field(name, stored.field(own[name]).type) for name in own if name not in split.names]
        listed = [each for each in split if each.name in own or each.name in self.group.columns]
        # A column without new values has the type that the shard has, which readers compare with the table.
        return [
            each if each.name in self.group.columns else each.with_type(stored.field(own[each.name]).type)
            for each in [*listed, *extra]
        ]

    def patched(self, name: str, base: pa.Array | None, rows: Integers, data_type: pa.DataType) -> pa.Array:
        """Return the values of a column at `rows`, `int64[n]` ascending; `base` has those without overlay."""
        values = pa.nulls(len(rows), data_type) if base is None else base
        part = self.group.columns.get(name)
        for patch in self.read(part, data_type) if part is not None else ():
            values = patch_array(values, rows, patch)
        return values

    def apply(self, batch: pa.RecordBatch, rows: Integers, fields: Collection[pa.Field]) -> pa.RecordBatch:
        """Return columns of samples with the overlay.

        Args:
            batch: stored columns of the samples; a column that it lacks is null without overlay.
            rows: `int64[n]`, their rows in the shard's file, ascending.
            fields: the columns to return.
        """
        own = self.stored_names(batch.schema)
        columns = []
        for each in fields:
            base = batch.column(own[each.name]) if each.name in own else None
            columns.append(self.patched(each.name, base, rows, each.type))
        schema = pa.schema([each.with_nullable(True) for each in fields], metadata=batch.schema.metadata)
        return pa.RecordBatch.from_arrays(columns, schema=schema)

    def digests(self, stored: pa.Array | None, num_samples: int) -> pa.Array:
        """Return the sample digests of the shard, from those of its index; null where neither has one."""
        values = pa.nulls(num_samples, DIGEST_FIELD.type) if stored is None else stored
        for patch in self.read(self.group.samples, DIGEST_FIELD.type):
            values = patch_array(values, np.arange(num_samples), patch)
        return values


def patch_array(values: pa.Array, rows: Integers, patch: Patch) -> pa.Array:
    """Return the values of `rows` with those of a patch; both ascend."""
    patch_rows, new = patch
    if patch_rows is None:
        if len(rows) and (int(rows[-1]) >= len(new)):
            raise CorruptDataError("an overlay has values of fewer samples than its shard: restore both from a copy")
        return new if len(rows) == len(new) else new.take(pa.array(rows))
    _, at, positions = np.intersect1d(rows, patch_rows, assume_unique=True, return_indices=True)
    if not len(at):
        return values
    chosen = np.arange(len(values))
    chosen[at] = len(values) + positions
    # By position, since Arrow replaces values by a mask for some types only.
    return pa.concat_arrays([values, new]).take(pa.array(chosen))


def read_dense(
    objects: Objects, packs: Sequence[ObjectInfo], entry: Mapping[str, Any], data_type: pa.DataType
) -> pa.Table:
    """Return the values of a shard in the packs, verified. Raise CorruptDataError, or see `Objects.read_range`."""
    if not 0 <= entry["pack"] < len(packs):
        raise CorruptDataError("an overlay names a pack that its shard table does not list: restore it from a copy")
    digest = packs[entry["pack"]].digest
    content = objects.read_range(digest, entry["offset"], entry["length"])
    problem = f"{objects.location(digest)} is corrupt from byte {entry['offset']}; restore it from another copy"
    if xxh3_128_digest(content) != entry["digest"]:
        raise CorruptDataError(problem)
    try:
        table = read_stream(content)
        found = table.schema.field("value").type
    except PARSE_ERRORS as error:
        raise CorruptDataError(f"{problem}: {error!r}") from error
    if found != data_type:
        raise CorruptDataError(f"{problem}: it has values of type {found}, expected {data_type}")
    return table


def _sparse_schema(data_type: pa.DataType) -> pa.Schema:
    places = [pa.field(name, pa.int64(), nullable=False) for name in ("shard", "row")]
    return pa.schema([*places, pa.field("value", data_type)], metadata=_METADATA)


def sparse_table(
    patches: Mapping[int, Patch], data_type: pa.DataType, shards: Mapping[int, Digest] | None = None
) -> pa.Table:
    """Return sparse values by the number of the shard in its group, as `encode_table` stores them.

    `shards` has the digest of each shard with values; objects of earlier releases lack it.
    """
    parts = [(shard, rows, values) for shard, (rows, values) in sorted(patches.items()) if rows is not None]
    columns = [
        np.repeat([shard for shard, _, _ in parts], [len(rows) for _, rows, _ in parts]).astype(np.int64),
        np.concatenate([np.empty(0, np.int64), *(rows for _, rows, _ in parts)]),
        pa.chunked_array([values for _, _, values in parts], data_type),
    ]
    return pa.table(columns, schema=_sparse_schema(data_type)).replace_schema_metadata(
        {**_METADATA, **_names_of(shards or {})}
    )


def _names_of(shards: Mapping[int, Digest]) -> dict[bytes, bytes]:
    names = {str(number): digest for number, digest in sorted(shards.items())}
    return {SHARDS_KEY: json.dumps(names).encode()} if names else {}


def shards_of(schema: pa.Schema) -> dict[int, Digest]:
    """Return the digests of the shards that an object of sparse values or a stream of a pack names, by number."""
    try:
        stored = json.loads((schema.metadata or {}).get(SHARDS_KEY, b"{}"))
        return {int(number): parse_digest(digest) for number, digest in stored.items()}
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptDataError(f"an overlay names its shards in a wrong way: {error!r}") from error


def merge_sparse(old: pa.Table, new: pa.Table) -> pa.Table:
    """Return the sparse values of two tables; `new` replaces those of `old`."""
    places = [np.stack([column_to_numpy(table.column(name)) for name in ("shard", "row")]) for table in (old, new)]
    base = 1 + max((int(each[1].max(initial=0)) for each in places), default=0)
    numbers = [each[0] * base + each[1] for each in places]
    kept = old.filter(pa.array(~np.isin(numbers[0], numbers[1])))
    both = pa.concat_tables([each.replace_schema_metadata() for each in (kept, new)])
    shards = {**shards_of(old.schema), **shards_of(new.schema)}
    ordered = both.sort_by([("shard", "ascending"), ("row", "ascending")])
    return ordered.replace_schema_metadata({**_METADATA, **_names_of(shards)})


def encode_values(values: pa.Array, shards: Mapping[int, Digest]) -> bytes:
    """Return the values of all rows of a shard as a pack stores them; `shards` has its digest by its number."""
    sink = pa.BufferOutputStream()
    schema = pa.schema([pa.field("value", values.type)], metadata=_names_of(shards) or None)
    table = pa.table([values], schema=schema)
    with pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table, max_chunksize=max(len(values), 1))
    return bytes(sink.getvalue().to_pybytes())


def streams_of(pack: bytes, name: str) -> Iterator[pa.Table]:
    """Yield the values of each shard in a pack, without its directory. Raise CorruptDataError: it is no pack."""
    reader = pa.BufferReader(pack)
    try:
        while (start := reader.tell()) < len(pack):
            for _ in pa.ipc.MessageReader.open_stream(reader):
                pass
            yield read_stream(pack[start : reader.tell()])
    except (KeyError, *PARSE_ERRORS) as error:
        raise CorruptDataError(f"{name} is no pack of values: {error!r}") from error


class DenseWriter:
    """Writes the dense values of a group, in the order of its shards; `close` returns the overlay."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._packs: list[ObjectInfo] = []
        self._entries: list[dict[str, Any]] = []
        self._pack = bytearray()

    def add(self, shard: int, values: pa.Array, digest: Digest | None = None) -> None:
        """Add the values of all rows of a shard, by its number in the group. Numbers left out have no values."""
        self._skip(shard)
        content = encode_values(values, {shard: digest} if digest else {})
        if self._pack and len(self._pack) + len(content) > PACK_BYTES:
            self._flush()
        place = {"pack": len(self._packs), "offset": len(self._pack), "length": len(content)}
        self._entries.append({**place, "digest": xxh3_128_digest(content)})
        self._pack += content

    def close(self, num_shards: int) -> ColumnOverlay:
        """Store the rest; return the overlay of a group of `num_shards`."""
        self._skip(num_shards)
        self._flush()
        directory = self._objects.put(encode_table(pa.Table.from_pylist(self._entries, schema=_DIRECTORY)))
        return ColumnOverlay(directory=directory, packs=tuple(self._packs))

    def _skip(self, shard: int) -> None:
        empty = {"pack": 0, "offset": 0, "length": 0, "digest": bytes(DIGEST_BYTES)}
        self._entries += [empty] * (shard - len(self._entries))

    def _flush(self) -> None:
        if self._pack:
            self._packs.append(self._objects.put(bytes(self._pack)))
            self._pack.clear()
