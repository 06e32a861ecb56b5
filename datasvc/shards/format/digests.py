"""Digests of single samples, which show whether a sample changed and which samples are duplicates.

The sample index of a shard stores two digests per sample. Neither depends on the key, on the order of columns, on
null columns, or on columns that are measured from an image (`width`, `height`):

- *sample*: over the values of all other columns. Equal digests mean equal samples.
- *payload*: over the blobs alone, so equal images with different labels have the same payload digest. For a sample
  without blobs, it is the sample digest.

Both are 128-bit xxHash3, which is four times faster than the BLAKE3 of object names. It detects accidental changes
as reliably, but an attacker can construct collisions.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from xxhash import xxh3_128_digest

from datasvc.shards.format.schema import HEIGHT, IMAGE, KEY, WIDTH, is_blob, offset_dtype

DIGEST_BYTES: Final = 16
_LENGTH: Final = struct.Struct("<q")


def digest_blob(blob: Any) -> bytes:
    """Return the digest of one blob, which may be any buffer of bytes."""
    return xxh3_128_digest(blob)


def digest_sample(blobs: Mapping[str, bytes], values: Mapping[str, bytes | None]) -> tuple[bytes, bytes]:
    """Return the sample digest and the payload digest of one sample.

    Args:
        blobs: digest of each blob that is not null, by column.
        values: result of `encode_value` for all other columns.
    """
    # Put the byte 2 before the digest of a blob. `encode_value` starts values of other types with other bytes.
    encoded = {**{name: b"\2" + digest for name, digest in blobs.items()}, **values}
    sample = xxh3_128_digest(_join(encoded))
    return sample, _payload([blobs[name] for name in sorted(blobs)], sample)


def digest_batch(batch: pa.RecordBatch) -> tuple[list[bytes], list[bytes]]:
    """Return the sample digests and the payload digests of a batch, in its order."""
    measured = (WIDTH, HEIGHT) if IMAGE in batch.schema.names else ()
    values: dict[str, Sequence[bytes | None]] = {}
    blobs: dict[str, Sequence[bytes | None]] = {}
    for name in batch.schema.names:
        column = batch.column(name)
        if name == KEY or name in measured:
            continue
        if is_blob(column.type):
            blobs[name] = [None if blob is None else digest_blob(blob) for blob in blob_views(column)]
        else:
            values[name] = _encode_column(column)
    return digest_samples(batch.num_rows, blobs, values)


def digest_samples(
    num_samples: int, blobs: Mapping[str, Sequence[bytes | None]], values: Mapping[str, Sequence[bytes | None]]
) -> tuple[list[bytes], list[bytes]]:
    """Return the sample digests and the payload digests of samples that are given as columns.

    Args:
        num_samples: number of values in each column.
        blobs: by column, the digest of each blob, None for null.
        values: by column, the result of `encode_value` for each value; without keys and measured columns.
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


def encode_value(value: Any) -> bytes | None:
    """Return the canonical encoding of a Python value for digests; None for null."""
    if value is None:
        return None
    # Test this before int, because bool is a subclass of int.
    if isinstance(value, bool):
        return b"b1" if value else b"b0"
    if isinstance(value, int):
        return b"i%d" % value
    if isinstance(value, float):
        return b"f" + struct.pack("<d", value)
    if isinstance(value, str):
        return b"s" + value.encode()
    if isinstance(value, (bytes, bytearray, memoryview)):
        return b"\2" + digest_blob(value)  # the same first byte as in `_digest_parts`
    if isinstance(value, Mapping):
        return b"{" + _join({str(name): encode_value(item) for name, item in value.items()})
    if isinstance(value, Iterable):
        items = [encode_value(item) for item in value]
        # A null item has the length -1, so that it differs from an empty one.
        return b"[" + b"".join(_LENGTH.pack(-1) if item is None else _sized(item) for item in items)
    return b"o" + str(value).encode()  # dates, times and decimals have a unique text form


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


def _encode_column(column: pa.Array) -> list[bytes | None]:
    is_number = pa.types.is_integer(column.type) or pa.types.is_floating(column.type)
    # For numbers without null, NumPy gives the same Python values as Arrow in less time.
    values = column.to_numpy().tolist() if is_number and not column.null_count else column.to_pylist()
    return [encode_value(value) for value in values]


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
