"""Export format of MosaicML's MDS: one `.mds` file per shard, and an `index.json` per split that describes them.

A file consists of the number of samples, the offset of each sample and of the end (all uint32, little-endian), the
description of its columns as JSON, and the samples. A sample consists of the sizes of its values of variable size,
and then of all its values, in the order of the column names. The encodings are chosen for each shard from its values.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import numpy as np
import pyarrow as pa

from datasvc.errors import ConfigError
from datasvc.shards.export.destination import Destination, safe_part
from datasvc.shards.export.export_format import (
    ExportFormat,
    ExportUnit,
    WrittenFiles,
    encode_json,
    given_columns,
    is_json,
    refused_column,
    refused_null,
)
from datasvc.shards.format.digests import blob_views
from datasvc.shards.format.schema import IMAGE, KEY, is_blob, is_list, is_text
from datasvc.shards.versions.dataset import Split

_VERSION: Final = 2
_MAX_FILE_BYTES: Final = (1 << 32) - 1  # the largest offset, a uint32
_IMAGE_ENCODINGS: Final = {frozenset({"JPEG"}): "jpeg", frozenset({"PNG"}): "png"}
_SIZE = np.dtype("<u4")  # of sizes and offsets


@dataclass(frozen=True)
class _ColumnEncoding:
    """The encoding of a column in one file.

    Attributes:
        field: column of the samples.
        encoding: name in MDS, such as "ndarray:int32:1024".
        dtype: numpy type of numbers; None for other values.
        size_bytes: size of each value; None if sizes vary.
    """

    field: pa.Field
    encoding: str
    dtype: Any = None
    size_bytes: int | None = None


class MdsExport(ExportFormat):
    """Writes `SPLIT/shard.00000.mds` and `SPLIT/index.json`; see the module docstring."""

    name: ClassVar[str] = "mds"

    def check(self, split: Split) -> None:
        """Raise ConfigError for columns that are not blobs, numbers, text or JSON."""
        for column in given_columns(split.table.sample_schema):
            if not is_blob(column.type) and not is_json(column.type):
                raise refused_column(self.name, column)

    def write(self, unit: ExportUnit, destination: Destination) -> WrittenFiles:
        """Write one file. For errors, see `ExportFormat.write`."""
        schema = unit.split.table.sample_schema
        batches = list(unit.batches())  # views of the mapped shard, without a copy
        # MDS orders columns by name.
        fields = sorted([schema.field(KEY), *given_columns(schema)], key=lambda field: field.name)
        columns = [_choose_encoding(field, batches, unit.split) for field in fields]
        described = {
            "version": _VERSION,
            "format": "mds",
            "compression": None,
            "hashes": [],
            "size_limit": None,
            "column_names": [column.field.name for column in columns],
            "column_encodings": [column.encoding for column in columns],
            "column_sizes": [column.size_bytes for column in columns],
        }
        header = json.dumps(described, sort_keys=True).encode()
        samples = [sample for batch in batches for sample in _encode_batch(batch, columns)]
        sizes = [sum(len(piece) for piece in sample) for sample in samples]
        # The file begins with the number of samples, the offsets (one more than samples) and the header.
        start = 4 + 4 * (len(samples) + 1) + len(header)
        # Summed as int64: a uint32 would wrap around, and the check below would miss a file that is too large.
        offsets = start + np.cumsum([0, *sizes], dtype=np.int64)
        name = f"shard.{unit.number:05d}.mds"
        if offsets[-1] > _MAX_FILE_BYTES:
            raise ConfigError(
                f"mds files have less than 4 GiB, but a shard of {unit.split} would have {offsets[-1]} bytes; "
                "ingest it with a smaller --shard-size, or export it as webdataset"
            )
        with destination.writing(f"{safe_part(unit.split.name)}/{name}") as file:
            file.write(_SIZE.type(len(samples)).tobytes() + offsets.astype(_SIZE).tobytes() + header)
            for sample in samples:
                file.writelines(sample)
        size_bytes = int(offsets[-1])
        raw = {"basename": name, "bytes": size_bytes, "hashes": {}}
        return WrittenFiles(
            len(samples),
            1,
            size_bytes,
            {**described, "samples": len(samples), "raw_data": raw, "zip_data": None},
        )

    def join(self, split: Split, written: Sequence[WrittenFiles], destination: Destination) -> WrittenFiles:
        """Write the split's `index.json`. For errors, see `ExportFormat.join`."""
        index = {"version": _VERSION, "shards": [dict(files.about) for files in written]}
        content = json.dumps(index, sort_keys=True).encode()
        return WrittenFiles(0, 1, destination.put(f"{safe_part(split.name)}/index.json", content))


def _choose_encoding(field: pa.Field, batches: list[pa.RecordBatch], split: Split) -> _ColumnEncoding:
    """Return the most specific encoding that holds the values of all `batches`."""
    arrays = [batch.column(field.name) for batch in batches]
    data_type = field.type
    if is_blob(data_type):
        kinds = frozenset(split.table.image_kinds if field.name == IMAGE else ())
        return _ColumnEncoding(field, _IMAGE_ENCODINGS.get(kinds, "bytes"))
    # Of the encodings below, only JSON has a value for null.
    if any(array.null_count for array in arrays):
        return _ColumnEncoding(field, "json")
    if is_text(data_type):
        return _ColumnEncoding(field, "str")
    if _is_number(data_type):
        dtype = np.dtype(data_type.to_pandas_dtype())
        return _ColumnEncoding(field, dtype.name, dtype, dtype.itemsize)
    if is_list(data_type) and _is_number(data_type.value_type) and not any(map(_has_empty_or_null, arrays)):
        dtype = np.dtype(data_type.value_type.to_pandas_dtype())
        if pa.types.is_fixed_size_list(data_type):
            length = data_type.list_size
            return _ColumnEncoding(field, f"ndarray:{dtype.name}:{length}", dtype, dtype.itemsize * length)
        return _ColumnEncoding(field, f"ndarray:{dtype.name}", dtype)
    return _ColumnEncoding(field, "json")


def _is_number(data_type: pa.DataType) -> bool:
    return bool(pa.types.is_integer(data_type) or pa.types.is_floating(data_type))


def _has_empty_or_null(array: pa.Array) -> bool:
    """Return whether a list is empty or holds a null; MDS arrays allow neither."""
    lengths = array.value_lengths()
    return bool(array.flatten().null_count) or bool(len(lengths) and lengths.to_numpy().min() == 0)


def _encode_batch(batch: pa.RecordBatch, columns: list[_ColumnEncoding]) -> list[list[Any]]:
    """Return for each sample the byte strings that it consists of, in order; blobs are views."""
    keys = batch.column(KEY).to_pylist()
    encoded = [_encode_column(batch.column(column.field.name), column, keys) for column in columns]
    # A sample starts with the sizes of its values of variable size, in the order of the columns.
    varying = [values for values, column in zip(encoded, columns, strict=True) if column.size_bytes is None]
    sizes = np.array([[len(value) for value in values] for values in varying], _SIZE).T
    heads = [row.tobytes() for row in np.ascontiguousarray(sizes)]
    return [list(sample) for sample in zip(heads, *encoded, strict=True)]


def _encode_column(array: pa.Array, column: _ColumnEncoding, keys: list[str]) -> list[Any]:
    """Return the encoded value of each sample; blobs are views. Raise ConfigError for a null blob or NaN in JSON."""
    if is_blob(array.type):
        views = blob_views(array)
        if array.null_count:
            key = next(key for key, view in zip(keys, views, strict=True) if view is None)
            raise refused_null("mds", column.field.name, key, "parquet, webdataset")
        return views
    if column.encoding == "str":
        return [text.encode() for text in array.to_pylist()]
    # All other encodings without a numpy type are JSON.
    if column.dtype is None:
        return [encode_json(value, key) for value, key in zip(array.to_pylist(), keys, strict=True)]
    little_endian = column.dtype.newbyteorder("<")
    if not is_list(array.type):
        raw = array.to_numpy(zero_copy_only=False).astype(little_endian).tobytes()
        width = little_endian.itemsize
        return [raw[start : start + width] for start in range(0, len(raw), width)]
    # A list: the numbers of all samples are encoded together, and cut at the end of each list.
    values = array.flatten().to_numpy(zero_copy_only=False).astype(little_endian).tobytes()
    stops = np.cumsum(array.value_lengths().to_numpy()) * column.dtype.itemsize
    parts = [values[start:stop] for start, stop in zip([0, *stops[:-1].tolist()], stops.tolist(), strict=True)]
    # For lists of fixed size, the name of the encoding has the length. Otherwise, each value starts with its length.
    if column.size_bytes is not None:
        return parts
    return [_shape(len(part) // column.dtype.itemsize) + part for part in parts]


def _shape(length: int) -> bytes:
    """Return a list's shape in MDS: one byte (number of dimensions, log2 of the length's bytes), then the length."""
    log2_bytes = next(number for number in range(4) if length < 1 << (8 << number))
    return bytes([1 << 2 | log2_bytes]) + length.to_bytes(1 << log2_bytes, "little")
