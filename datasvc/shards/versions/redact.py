"""Empties the purged samples of a shard: the new shard has the same rows, but no value of these, only their keys.

A number becomes 0, a text, list or blob empty; width and height of an image become 0. The key stays, so that
`trained-on`, `delete` and `forget` find the sample, or becomes `hashed_key`. Schema metadata marks the rows. Equal
shards with the same rows give equal bytes, however many purges made them.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import pyarrow as pa

from datasvc.errors import NotFoundError
from datasvc.keyed_random import Integers
from datasvc.repository import Digest, ObjectInfo, Objects
from datasvc.repository.objects.objects import digest_of
from datasvc.shards.format.reader import open_shard
from datasvc.shards.format.sample_index import SampleIndex
from datasvc.shards.format.schema import KEY, is_gathered, with_redacted
from datasvc.shards.versions.combine import write_shard

_HASHED: Final = "purged-"
_HASH_DIGITS: Final = 32


def hashed_key(key: str) -> str:
    """Return what replaces the key of a purged sample on request: anybody with the key can compute it."""
    return key if key.startswith(_HASHED) else f"{_HASHED}{digest_of(key.encode())[:_HASH_DIGITS]}"


def redact_shard(
    objects: Objects,
    info: ObjectInfo,
    index: Digest | None,
    rows: Integers,
    *,
    hash_keys: bool = False,
    into: Objects | None = None,
) -> tuple[ObjectInfo, Digest]:
    """Store a shard without the values of `rows`, and its sample index; return their object and digest.

    They are stored in `objects`, or in another repository, `into`. Of a shard that is lost, such as that of a removed
    version, only the index is written: it has keys and digests.

    Raises:
        CorruptDataError: the shard is damaged; it must be repaired or deleted first.
        NotFoundError: neither the shard nor its index exists.
        UnavailableError: the store does not respond.
    """
    try:
        shard = open_shard(objects, info)
    except NotFoundError:
        if index is None:
            raise
        return info, _redact_index(objects, index, rows, into or objects, hash_keys=hash_keys)
    flags = np.zeros(shard.num_samples, np.bool_)
    flags[rows] = True
    batches, start = [], 0
    for batch in shard.batches:
        chosen = flags[start : start + batch.num_rows]
        batches.append(_emptied(batch, chosen, hash_keys=hash_keys) if chosen.any() else batch)
        start += batch.num_rows
    flags[shard.redacted] = True
    schema = with_redacted(shard.schema, flags)
    return write_shard(into or objects, schema, [batch.replace_schema_metadata(schema.metadata) for batch in batches])


def _redact_index(objects: Objects, index: Digest, rows: Integers, into: Objects, *, hash_keys: bool) -> Digest:
    decoded = SampleIndex.decode(objects.read(index), objects.location(index))
    keys, samples, payloads = (decoded.table.column(name).to_pylist() for name in ("key", "sample", "payload"))
    for row in rows.tolist():
        keys[row] = hashed_key(keys[row]) if hash_keys else keys[row]
        samples[row] = payloads[row] = bytes(len(samples[row]))
    return into.put(SampleIndex.build(keys, samples, payloads).encode()).digest


def _emptied(batch: pa.RecordBatch, chosen: Any, *, hash_keys: bool) -> pa.RecordBatch:
    """Return a batch with empty values in the rows where `chosen`, `bool[num_rows]`, is True."""
    # Take from the column with one empty value appended: this copies the values, so no old bytes stay below new ones.
    source = pa.array(np.where(chosen, batch.num_rows, np.arange(batch.num_rows)))
    columns = []
    for field in batch.schema:
        column = batch.column(field.name)
        if field.name != KEY:
            columns.append(pa.concat_arrays([column, empty_value(field.type)]).take(source))
        elif hash_keys:
            keys = zip(column.to_pylist(), chosen.tolist(), strict=True)
            columns.append(pa.array([hashed_key(key) if purged else key for key, purged in keys], field.type))
        else:
            columns.append(column)
    return pa.RecordBatch.from_arrays(columns, schema=batch.schema)


def empty_value(data_type: pa.DataType) -> pa.Array:
    """Return an array of one value of a type: 0, or empty. It is not null, which loaders refuse in numbers."""
    if isinstance(data_type, pa.BaseExtensionType):
        return pa.ExtensionArray.from_storage(data_type, empty_value(data_type.storage_type))
    if pa.types.is_null(data_type) or (pa.types.is_struct(data_type) and not data_type.num_fields):
        return pa.nulls(1, data_type)
    if pa.types.is_struct(data_type):
        fields = [data_type.field(number) for number in range(data_type.num_fields)]
        return pa.StructArray.from_arrays([empty_value(field.type) for field in fields], fields=fields)
    if pa.types.is_fixed_size_list(data_type):
        if not data_type.list_size:  # it has no values, and Arrow divides by its size
            return pa.nulls(1, data_type)
        values = pa.concat_arrays([empty_value(data_type.value_type)] * data_type.list_size)
        return pa.FixedSizeListArray.from_arrays(values, type=data_type)
    if is_gathered(data_type):
        return pa.array([b""]).cast(data_type)
    if pa.types.is_nested(data_type):
        return pa.array([[]], data_type)
    zeros = pa.py_buffer(bytes(-(-data_type.bit_width // 8)))
    return pa.Array.from_buffers(data_type, 1, [None, zeros])
