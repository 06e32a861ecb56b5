"""Empties the values of purged samples in overlays: a new object has the same rows, with 0 or empty values in these.

What is left to empty is read from the objects, not from what a purge did before. A null stays null. The sample
digests of these rows become those of the samples that the versions then have.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa
from xxhash import xxh3_128_digest

from datasvc.errors import ConfigError, NotFoundError
from datasvc.keyed_random import Integers
from datasvc.repository import Digest, ObjectInfo, Objects
from datasvc.shards.format.digests import DIGEST_BYTES, digest_batch, encode_array
from datasvc.shards.format.ipc_reader import IpcReader, ObjectFiles, column_to_numpy, encode_table, read_table
from datasvc.shards.format.overlays import (
    DIGEST_FIELD,
    ColumnOverlay,
    Overlays,
    Patch,
    ShardOverlay,
    encode_values,
    merge_sparse,
    patch_array,
    read_dense,
    shards_of,
    sparse_table,
    streams_of,
)
from datasvc.shards.format.schema import is_blob
from datasvc.shards.format.shard_table import ShardTable
from datasvc.shards.versions.redact import empty_value


@dataclass
class EmptiedOverlays:
    """Objects of overlays that have values of purged samples.

    Attributes:
        objects: new object by old one; in a dry run, the old ones by themselves.
        payloads: payload digests that the samples had by these values, as hexadecimal digits, by shard and row.
    """

    objects: dict[ObjectInfo, ObjectInfo] = field(default_factory=dict)
    payloads: dict[Digest, dict[int, set[str]]] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return fields of an entry of the log of redactions; {} without objects."""
        payloads = {
            shard: {str(row): sorted(found) for row, found in sorted(rows.items())}
            for shard, rows in self.payloads.items()
        }
        replaced = [[old.digest, new.digest, new.size_bytes] for old, new in self.objects.items()]
        return {"overlays": sorted(replaced), "overlaid": payloads} if replaced else {}


@dataclass
class _Half:
    """Sparse or dense values of a column, or of the sample digests, with the rows to empty by number in the group."""

    overlays: Overlays
    data_type: pa.DataType
    has_payloads: bool = False
    shards: dict[int, Digest] = field(default_factory=dict)
    rows: dict[int, tuple[Integers, pa.Array | None]] = field(default_factory=dict)  # with sample digests to store


def empty_overlays(
    objects: Objects,
    tables: Iterable[ShardTable],
    rows: Mapping[Digest, Integers],
    *,
    into: Objects | None = None,
    dry_run: bool = False,
) -> EmptiedOverlays:
    """Store the objects of overlays without the values of some rows.

    Args:
        objects: objects of the repository.
        tables: all tables that have the shards; those of removed versions may lack objects.
        rows: rows, `int64[n]`, by shard.
        into: objects to store them in; None: `objects`.
        dry_run: store nothing, and return the objects that have such values.

    Raises:
        ConfigError: an object with such values does not name its shards, because it is of an earlier release.
        CorruptDataError, UnavailableError: an overlay, or a shard, cannot be read.
    """
    halves: dict[ColumnOverlay, _Half] = {}
    for table in tables:
        numbers = table.overlay_numbers
        for number in np.flatnonzero(numbers >= 0).tolist():
            chosen = rows.get(table.shard(number).digest)
            if chosen is not None and len(chosen):
                _collect(objects, table, number, int(numbers[number]), np.unique(chosen), halves)
    result = EmptiedOverlays()
    for part, half in halves.items():
        changed = dict(_changed(objects, part, half, result.payloads))
        if not changed:
            continue
        if part.sparse is not None:
            new = part.sparse
            old = half.overlays.sparse(objects, part.sparse.digest, half.data_type)
            _check_named(old.schema, objects.location(part.sparse.digest))
            if not dry_run:
                values = merge_sparse(old, sparse_table(changed, half.data_type))
                new = (into or objects).put(encode_table(values))
            result.objects[part.sparse] = new
        else:
            result.objects |= _write_packs(objects, part, half, changed, into or objects, dry_run=dry_run)
    return result


def _collect(
    objects: Objects, table: ShardTable, number: int, place: int, rows: Integers, halves: dict[ColumnOverlay, _Half]
) -> None:
    """Note the rows of a shard of a table in what its overlay has values in."""
    _, in_group = table.overlays.find(place)
    overlay, shard = table.overlays.shard(objects, place), table.shard(number).digest

    def note(part: ColumnOverlay, data_type: pa.DataType, *, is_digest: bool = False) -> None:
        for each in (replace(part, directory=None, packs=()), replace(part, sparse=None)):
            if not each.small:
                continue
            half = halves.setdefault(each, _Half(table.overlays, data_type))
            half.shards[in_group] = shard
            if in_group not in half.rows:
                digests = _emptied_digests(objects, table, number, overlay, rows) if is_digest else None
                half.rows[in_group] = rows, digests
            # Of a sample without blobs, the sample digest is the payload digest.
            half.has_payloads = is_digest and not any(is_blob(column.type) for column in table.sample_schema)

    for name, part in overlay.group.columns.items():
        note(part, table.sample_schema.field(name).type)
    note(overlay.group.samples, DIGEST_FIELD.type, is_digest=True)


def _emptied(values: pa.Array) -> pa.Array:
    """Return as many empty values, with nulls in the same places."""
    both = pa.concat_arrays([empty_value(values.type), pa.nulls(1, values.type)])
    return both.take(pa.array(values.is_null().to_numpy(zero_copy_only=False).astype(np.int64)))


def _emptied_digests(
    objects: Objects, table: ShardTable, number: int, overlay: ShardOverlay, rows: Integers
) -> pa.Array:
    """Return the sample digests of purged rows of a shard; zeros if it is lost with its version."""

    def read(part: ColumnOverlay, data_type: pa.DataType) -> list[Patch]:
        return [(patched, _emptied(values)) for patched, values in overlay.read(part, data_type)]

    info = table.shard(number)
    try:
        with ObjectFiles(objects.storage, {info.digest: info.size_bytes}).open(info.digest) as file:
            stored = IpcReader(file, f"shard {info.digest}", compressed=True).schema
        columns = [empty_value(column.type).take(pa.array(np.zeros(len(rows), np.int64))) for column in stored]
        base = pa.RecordBatch.from_arrays(columns, schema=stored)
        emptied = ShardOverlay(overlay.group, read)
        digests = digest_batch(emptied.apply(base, rows, emptied.fields(stored, table.sample_schema)))[0]
    except NotFoundError:
        digests = [bytes(DIGEST_BYTES)] * len(rows)
    return pa.array(digests, DIGEST_FIELD.type)


def _changed(
    objects: Objects, part: ColumnOverlay, half: _Half, payloads: dict[Digest, dict[int, set[str]]]
) -> Iterator[tuple[int, Patch]]:
    """Yield the rows with values to replace, and the new values, by number in the group; note payload digests."""
    for number, (rows, digests) in half.rows.items():
        patches: list[Patch] = []
        with suppress(NotFoundError):  # gc has deleted it with its version
            patches = half.overlays.patches(objects, part, number, half.data_type)
        for patch_rows, values in patches:
            present = np.arange(len(values)) if patch_rows is None else patch_rows
            found, at, chosen = np.intersect1d(present, rows, assume_unique=True, return_indices=True)
            old = values.take(pa.array(at))
            new = _emptied(old) if digests is None else digests.take(pa.array(chosen))
            differs = [a != b for a, b in zip(encode_array(old), encode_array(new), strict=True)]
            if not any(differs):
                continue
            if half.has_payloads:
                noted = payloads.setdefault(half.shards[number], {})
                for row, digest in zip(
                    found[differs].tolist(), old.filter(pa.array(differs)).to_pylist(), strict=True
                ):
                    noted.setdefault(row, set()).update({digest.hex()} if digest is not None else ())
            yield number, (found[differs], new.filter(pa.array(differs)))


def _write_packs(
    objects: Objects,
    part: ColumnOverlay,
    half: _Half,
    changed: Mapping[int, Patch],
    into: Objects,
    *,
    dry_run: bool,
) -> dict[ObjectInfo, ObjectInfo]:
    """Return new packs and a new directory by the old ones; packs without changed values stay."""
    assert part.directory is not None, "packs have a directory"
    directory = half.overlays.directory(objects, part.directory.digest)
    entries = directory.to_pylist()
    packs = sorted({entries[number]["pack"] for number in changed})

    def read(number: int) -> pa.Table:
        table = read_dense(objects, part.packs, entries[number], half.data_type)
        _check_named(table.schema, objects.location(part.packs[entries[number]["pack"]].digest))
        return table

    if dry_run:
        for number in changed:
            read(number)
        return {info: info for info in (*(part.packs[pack] for pack in packs), part.directory)}
    written: dict[ObjectInfo, ObjectInfo] = {}
    for pack in packs:
        content = bytearray()
        members = [number for number, entry in enumerate(entries) if entry["pack"] == pack and entry["length"]]
        for number in sorted(members, key=lambda member: entries[member]["offset"]):
            entry = entries[number]
            if number not in changed:
                stream = objects.read_range(part.packs[pack].digest, entry["offset"], entry["length"])
            else:
                table = read(number)
                values = table.column("value").combine_chunks()
                emptied = patch_array(values, np.arange(len(values)), changed[number])
                stream = encode_values(emptied, shards_of(table.schema))
                entry["digest"] = xxh3_128_digest(stream)
            entry["offset"], entry["length"] = len(content), len(stream)
            content += stream
        written[part.packs[pack]] = into.put(bytes(content))
    encoded = encode_table(pa.Table.from_pylist(entries, schema=directory.schema))
    return {**written, part.directory: into.put(encoded)}


def _check_named(schema: pa.Schema, name: str) -> None:
    """Raise ConfigError if values do not name their shards: another data set may have the same object."""
    if not shards_of(schema):
        raise ConfigError(
            f"{name} has values beside shards in the form of an earlier release, which another data set may share. "
            "Run `datasvc compact`, remove the versions before it, run gc, and try again"
        )


def has_values(content: bytes, name: str, rows: Mapping[Digest, Integers]) -> bool:
    """Return whether an object of an overlay, which no table names, has values of some rows, by shard.

    Raises CorruptDataError: it is no such object. Sample digests are not compared.
    """
    if content.startswith(b"ARROW1"):
        table = read_table(content, name)
        names = shards_of(table.schema)
        if (
            not {"shard", "row", "value"} <= set(table.column_names)
            or table.schema.field("value").type == DIGEST_FIELD.type
        ):
            return False
        shards, stored = (column_to_numpy(table.column(column)) for column in ("shard", "row"))
        parts = [
            table.column("value").filter(pa.array((shards == number) & np.isin(stored, rows.get(shard, ()))))
            for number, shard in names.items()
        ]
        values = [pa.concat_arrays([pa.nulls(0, part.type), *part.chunks]) for part in parts]
    else:
        values = []
        for table in streams_of(content, name):
            if table.schema.field("value").type == DIGEST_FIELD.type:
                continue
            for shard in shards_of(table.schema).values():
                column = table.column("value").combine_chunks()
                chosen = np.asarray(rows.get(shard, ()), np.int64)
                values.append(column.take(pa.array(chosen[chosen < len(column)])))
    return any(encode_array(part) != encode_array(_emptied(part)) for part in values)
