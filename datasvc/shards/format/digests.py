"""Digests of single samples, which show whether a sample changed and which samples are duplicates.

The sample index of a shard stores two digests per sample. Neither depends on the key, on the order of columns, on
null columns, or on columns that the ingest measures (`width` of an image, `rate` of a sound):

- *sample*: over the values of all other columns. Equal digests mean equal samples.
- *payload*: over the blobs alone, so equal images with different labels have the same payload digest. For a sample
  without blobs, it is the sample digest.

Both are 128-bit xxHash3, which is four times faster than the BLAKE3 of object names. It detects accidental changes
as reliably, but an attacker can construct collisions.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from xxhash import xxh3_128_digest

from datasvc.shards.format.schema import KEY, is_blob, is_gathered, is_list, is_text, measured_among, offset_dtype

DIGEST_BYTES: Final = 16
_LENGTH: Final = struct.Struct("<q")
# Types whose encoding changed with format 3 of the sample index.
_UNITS: Final = (
    pa.types.is_date,
    pa.types.is_time,
    pa.types.is_timestamp,
    pa.types.is_duration,
    pa.types.is_decimal,
)

EncodeLeaf = Callable[[pa.Array], list[bytes | None]]
"""Returns the encoding of an array of a type of `has_units` that is not nested; None for null."""


def digest_blob(blob: Any) -> bytes:
    """Return the digest of one blob, which may be any buffer of bytes."""
    return xxh3_128_digest(blob)


def digest_sample(blobs: Mapping[str, bytes], values: Mapping[str, bytes | None]) -> tuple[bytes, bytes]:
    """Return the sample digest and the payload digest of one sample.

    Args:
        blobs: digest of each blob that is not null, by column.
        values: result of `encode_array` for all other columns.
    """
    # Put the byte 2 before the digest of a blob. `encode_array` starts values of other types with other bytes.
    encoded = {**{name: b"\2" + digest for name, digest in blobs.items()}, **values}
    sample = xxh3_128_digest(_join(encoded))
    return sample, _payload([blobs[name] for name in sorted(blobs)], sample)


def digest_batch(
    batch: pa.RecordBatch,
    encode_leaf: EncodeLeaf | None = None,
    known: Mapping[str, Sequence[bytes | None]] | None = None,
) -> tuple[list[bytes], list[bytes]]:
    """Return the sample digests and the payload digests of a batch, in its order.

    `encode_leaf` encodes the types of `has_units`; None: as in the newest format, see `encode_array`. `known` has the
    digests of blobs by column, for columns that the batch lacks.
    """
    blobs: dict[str, Sequence[bytes | None]] = dict(known or {})
    measured = measured_among(batch.schema, {*batch.schema.names, *blobs})
    values: dict[str, Sequence[bytes | None]] = {}
    for name in batch.schema.names:
        column = batch.column(name)
        if name == KEY or name in measured:
            continue
        if is_blob(column.type):
            blobs[name] = [None if blob is None else digest_blob(blob) for blob in blob_views(column)]
        else:
            values[name] = encode_array(column, encode_leaf or _encode_units)
    return digest_samples(batch.num_rows, blobs, values)


def digest_samples(
    num_samples: int, blobs: Mapping[str, Sequence[bytes | None]], values: Mapping[str, Sequence[bytes | None]]
) -> tuple[list[bytes], list[bytes]]:
    """Return the sample digests and the payload digests of samples that are given as columns.

    Args:
        num_samples: number of values in each column.
        blobs: by column, the digest of each blob, None for null.
        values: by column, the result of `encode_array`; without keys and measured columns.
    """
    # Hash the same bytes as `digest_sample` does, in less time: names are put before values column by column, so that
    # only the join is done per sample. Null adds no bytes.
    parts = {name: _digest_parts(name, digests) for name, digests in blobs.items()}
    parts |= {name: _value_parts(name, column) for name, column in values.items()}
    columns = [parts[name] for name in sorted(parts)]
    rows = zip(*columns, strict=True) if columns else [()] * num_samples
    samples = [xxh3_128_digest(b"".join(row)) for row in rows]
    # The payload of a sample without blobs is the sample itself.
    if not blobs:
        return samples, samples
    blob_columns = [blobs[name] for name in sorted(blobs)]
    if len(blob_columns) == 1:
        return samples, [digest or sample for digest, sample in zip(blob_columns[0], samples, strict=True)]
    return samples, [
        _payload([digest for digest in row if digest], samples[number])
        for number, row in enumerate(zip(*blob_columns, strict=True))
    ]


def _digest_parts(name: str, digests: Sequence[bytes | None]) -> list[bytes]:
    """Return the bytes by which `_join` would represent each digest of a blob in column `name`."""
    head = _prefix(name) + _LENGTH.pack(1 + DIGEST_BYTES) + b"\2"
    return [b"" if digest is None else head + digest for digest in digests]


def _value_parts(name: str, encoded: Sequence[bytes | None]) -> list[bytes]:
    """Return the bytes by which `_join` would represent each encoded value of column `name`."""
    prefix = _prefix(name)
    return [b"" if value is None else prefix + _sized(value) for value in encoded]


def has_units(data_type: pa.DataType) -> bool:
    """Return whether values of a type, at any depth, are dates, times, durations, decimals or an extension type."""
    if pa.types.is_nested(data_type):
        return any(has_units(data_type.field(number).type) for number in range(data_type.num_fields))
    if pa.types.is_dictionary(data_type):
        return has_units(data_type.value_type)
    return isinstance(data_type, pa.BaseExtensionType) or any(is_kind(data_type) for is_kind in _UNITS)


def encode_array(array: pa.Array, encode_leaf: EncodeLeaf | None = None) -> list[bytes | None]:
    """Return the canonical encoding of each value of an array for digests; None for null.

    The encoding depends on the values alone, not on widths of integers and floats, 32- or 64-bit offsets, chunks,
    dictionaries, or bytes below a null. It has the bits of a float: -0.0 differs from 0.0, and so do two NaN of
    different bits. Dates, times, durations and decimals are encoded as the integer that Arrow stores, with its unit,
    time zone or scale, and values of an extension type as those of its storage, unless `encode_leaf` encodes them.
    """
    data_type = array.type
    if isinstance(data_type, pa.BaseExtensionType):
        return encode_array(array.storage) if encode_leaf is None else encode_leaf(array)
    if pa.types.is_dictionary(data_type):
        return encode_array(array.dictionary_decode(), encode_leaf)
    if pa.types.is_null(data_type):
        return [None] * len(array)
    if pa.types.is_struct(data_type):
        return _encode_structs(array, encode_leaf)
    if pa.types.is_map(data_type):
        filled = array.drop_null()  # a null map may have pairs below it
        pairs = pa.StructArray.from_arrays([filled.keys, filled.items], ["key", "value"])
        start, stop = value_offsets(filled)[[0, -1]].tolist() if len(filled) else (0, 0)
        keys, values = (encode_array(part.slice(start, stop - start), encode_leaf) for part in pairs.flatten())
        return _encode_lists(
            array, [b"[" + encode_items([key, value]) for key, value in zip(keys, values, strict=True)]
        )
    if is_list(data_type):
        return _encode_lists(array, encode_array(array.flatten(), encode_leaf))  # without the values of null lists
    if is_gathered(data_type):
        if is_text(data_type):
            return [None if text is None else b"s" + text.encode() for text in array.to_pylist()]
        return [None if view is None else b"\2" + digest_blob(view) for view in blob_views(array)]
    if any(is_kind(data_type) for is_kind in _UNITS):
        return (encode_leaf or _encode_units)(array)
    if array.null_count == 0:
        if pa.types.is_integer(data_type):
            return [b"i%d" % value for value in array.to_numpy().tolist()]
        if pa.types.is_floating(data_type):
            # From bytes, since Python may change the bits of a NaN.
            raw = array.to_numpy().astype("<f8", copy=False).tobytes()
            return [b"f" + raw[start : start + 8] for start in range(0, len(raw), 8)]
    elif pa.types.is_integer(data_type) or pa.types.is_floating(data_type):
        encoded = iter(encode_array(array.drop_null(), encode_leaf))
        return [next(encoded) if is_valid else None for is_valid in _validity(array)]
    return [_encode_value(value) for value in array.to_pylist()]


def _encode_structs(array: pa.StructArray, encode_leaf: EncodeLeaf | None) -> list[bytes | None]:
    names = [field.name for field in array.type]
    # `flatten` makes the fields of a null struct null.
    parts = {
        name: _value_parts(name, encode_array(column, encode_leaf))
        for name, column in zip(names, array.flatten(), strict=True)
    }
    rows = zip(*(parts[name] for name in sorted(parts)), strict=True) if parts else [()] * len(array)
    encoded = [b"{" + b"".join(row) for row in rows]
    return [value if is_valid else None for value, is_valid in zip(encoded, _validity(array), strict=True)]


def _encode_lists(array: pa.Array, values: Sequence[bytes | None]) -> list[bytes | None]:
    """Return the encoding of lists from that of their values, `values`, without those of null lists."""
    valid = _validity(array)
    if pa.types.is_fixed_size_list(array.type):
        lengths = [array.type.list_size] * len(array)
    else:
        lengths = np.diff(value_offsets(array)).tolist()
    encoded: list[bytes | None] = []
    start = 0
    for length, is_valid in zip(lengths, valid, strict=True):
        if not is_valid:
            encoded.append(None)
            continue
        encoded.append(b"[" + encode_items(values[start : start + length]))
        start += length
    return encoded


def encode_items(values: Iterable[bytes | None]) -> bytes:
    """Return the encoding of the items of a list, each with its length before it."""
    # A null item has the length -1, so that it differs from an empty one.
    return b"".join([_LENGTH.pack(-1) if value is None else _LENGTH.pack(len(value)) + value for value in values])


def _encode_units(array: pa.Array) -> list[bytes | None]:
    """Return the encoding of dates, times, durations and decimals: unit, and the integer that Arrow stores."""
    data_type = array.type
    if pa.types.is_decimal(data_type):
        size = data_type.byte_width
        raw = memoryview(array.buffers()[1] or b"")[array.offset * size : (array.offset + len(array)) * size]
        head = b"n%d:" % data_type.scale
        values = [
            int.from_bytes(raw[start : start + size], "little", signed=True) for start in range(0, len(raw), size)
        ]
    else:
        if pa.types.is_date(data_type):
            unit = "date,D" if pa.types.is_date32(data_type) else "date,ms"
        elif pa.types.is_time(data_type):
            unit = f"time,{data_type.unit}"
        elif pa.types.is_duration(data_type):
            unit = f"duration,{data_type.unit}"
        else:
            unit = f"timestamp,{data_type.unit},{data_type.tz or ''}"
        head = b"t" + unit.encode() + b":"
        values = array.view(pa.int32() if data_type.bit_width == 32 else pa.int64()).fill_null(0).to_numpy().tolist()
    return [
        head + b"%d" % value if is_valid else None for value, is_valid in zip(values, _validity(array), strict=True)
    ]


def _validity(array: pa.Array) -> Sequence[bool]:
    if not array.null_count:
        return [True] * len(array)
    valid: list[bool] = array.is_valid().to_numpy(zero_copy_only=False).tolist()
    return valid


def _encode_value(value: Any) -> bytes | None:
    """Return the encoding of a boolean, of bytes, or of an interval of months, days and nanoseconds."""
    if value is None:
        return None
    if isinstance(value, bool):
        return b"b1" if value else b"b0"
    if isinstance(value, bytes):
        return b"\2" + digest_blob(value)  # the same first byte as in `_digest_parts`
    assert isinstance(value, tuple), value
    return b"[" + encode_items([b"i%d" % part for part in value])


def value_offsets(column: pa.Array) -> npt.NDArray[Any]:
    """Return the offsets of an Arrow array of blobs, texts, lists or maps, as a view: `int[n + 1]`."""
    if not len(column):
        return np.zeros(1, np.int64)  # Arrow may omit the buffers of an empty array
    offsets = np.frombuffer(column.buffers()[1], offset_dtype(column.type))
    return offsets[column.offset : column.offset + len(column) + 1]


def joined_bytes(column: pa.Array) -> npt.NDArray[np.uint8]:
    """Return the bytes of all values of an Arrow array of blobs or texts, as a view; see `value_offsets`."""
    return np.frombuffer(column.buffers()[2] or b"", np.uint8)


class BlobViews:
    """The values of an array of blobs or texts as views of their bytes; the array must outlive the views."""

    def __init__(self, column: pa.Array) -> None:
        # Keep a view of Arrow's offsets: a list of Python numbers would take five times as much memory.
        self._offsets = value_offsets(column).data
        self._content = joined_bytes(column).data
        is_null = ~column.is_valid().to_numpy(zero_copy_only=False) if column.null_count else np.empty(0)
        self._nulls = frozenset(np.flatnonzero(is_null).tolist())

    def view(self, row: int) -> memoryview | None:
        """Return the bytes of one value; None for null."""
        return None if row in self._nulls else self._content[self._offsets[row] : self._offsets[row + 1]]


def blob_views(column: pa.Array) -> list[memoryview | None]:
    """Return the values of an array of blobs or text as views of their bytes; None for null."""
    views = BlobViews(column)
    return [views.view(row) for row in range(len(column))]


def _payload(blob_digests: Sequence[bytes], sample_digest: bytes) -> bytes:
    """Return the payload digest of a sample from the digests of its blobs, sorted by column, without nulls."""
    if not blob_digests:
        return sample_digest
    # With one blob, its digest serves as the payload digest, without a second hash.
    return blob_digests[0] if len(blob_digests) == 1 else xxh3_128_digest(b"".join(blob_digests))


def _join(values: Mapping[str, bytes | None]) -> bytes:
    """Return the names and values, sorted by name, each with its length before it; null values are left out."""
    return b"".join(_prefix(name) + _sized(value) for name, value in sorted(values.items()) if value is not None)


@cache
def _prefix(name: str) -> bytes:
    """Return the bytes that precede each value of column `name`."""
    return _sized(name.encode())


def _sized(value: bytes) -> bytes:
    return _LENGTH.pack(len(value)) + value
