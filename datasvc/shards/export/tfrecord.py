"""Export format of TFRecord: one file of `tf.Example` messages per shard. Each value that is not null is a feature.

`tf.Example` holds only bytes, float32 and int64. Text is stored as UTF-8, booleans as 0 or 1, lists as features with
several values. A column whose values could lose precision is refused.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Final

import numpy as np
import pyarrow as pa

from datasvc.errors import ConfigError
from datasvc.shards.export.destination import Destination, safe_part
from datasvc.shards.export.export_format import (
    ExportFormat,
    ExportUnit,
    WrittenFiles,
    given_columns,
    is_json,
    refused_column,
    refused_null,
)
from datasvc.shards.format.schema import KEY, is_blob, is_list, is_text
from datasvc.shards.sources.common.protobuf import bytes_field, packed_varints
from datasvc.shards.sources.records.tfrecord import masked_crc
from datasvc.shards.versions.dataset import Split

# Field numbers of Feature in TensorFlow's feature.proto. Each field is a message that has the values in its field 1.
_BYTES_LIST, _FLOAT_LIST, _INT64_LIST = 1, 2, 3
_SUPPORTED_BY: Final = "parquet, webdataset, mds"

_Encoder = Callable[[Sequence[Any]], bytes]


class TfRecordExport(ExportFormat):
    """Writes each unit as one file, `SPLIT-00000-of-00010.tfrecord`; see the module docstring."""

    name: ClassVar[str] = "tfrecord"

    def check(self, split: Split) -> None:
        """Raise ConfigError for columns whose values a feature cannot hold exactly."""
        for column in given_columns(split.table.sample_schema):
            if _encoder(column.type) is None:
                # WebDataset and MDS hold such a column only if its values fit into JSON.
                raise refused_column(self.name, column, _SUPPORTED_BY if is_json(column.type) else "parquet")

    def write(self, unit: ExportUnit, destination: Destination) -> WrittenFiles:
        """Write one file. For errors, see `ExportFormat.write`."""
        schema = unit.split.table.sample_schema
        columns = [schema.field(KEY), *given_columns(schema)]
        size_bytes = 0
        name = f"{safe_part(unit.split.name)}-{unit.number:05d}-of-{unit.num_units:05d}.tfrecord"
        with destination.writing(name) as file:
            for sample in unit.samples():
                record = _framed(_example(sample, columns))
                file.write(record)
                size_bytes += len(record)
        return WrittenFiles(unit.num_samples, 1, size_bytes)


def _framed(message: bytes) -> bytes:
    """Return a message in the TFRecord frame: its length, a checksum of the length, the message, its checksum."""
    length = struct.pack("<Q", len(message))
    return b"".join([length, struct.pack("<I", masked_crc(length)), message, struct.pack("<I", masked_crc(message))])


def _example(sample: dict[str, Any], columns: Sequence[pa.Field]) -> bytes:
    """Return a sample as an encoded `tf.Example`. Raise ConfigError for a null in a list, or too large an integer."""
    entries = []
    for column in columns:
        value = sample[column.name]
        # `tf.Example` has no null; a missing feature stands for it.
        if value is None:
            continue
        values = value if is_list(column.type) else [value]
        if None in values:
            raise refused_null("tfrecord", f"{column.name}[]", sample[KEY], _SUPPORTED_BY)
        encode = _encoder(column.type)
        assert encode is not None  # `TfRecordExport.check` has refused all other columns
        try:
            feature = encode(values)
        except OverflowError as error:
            raise ConfigError(
                f"tfrecord cannot hold {column.name!r} of sample {sample[KEY]!r}: its integers have 63 bits and a "
                f"sign; formats that can: {_SUPPORTED_BY}"
            ) from error
        # An entry of the map of features: field 1 is the name, field 2 the Feature.
        entries.append(bytes_field(1, bytes_field(1, column.name.encode()), bytes_field(2, feature)))
    # Field 1 of Example is the message that contains the map.
    return bytes_field(1, *entries)


def _encoder(data_type: pa.DataType) -> _Encoder | None:
    """Return the function that encodes the values of a sample as a Feature; None if none can hold the type."""
    inner = data_type.value_type if is_list(data_type) else data_type
    if is_blob(inner):
        return _bytes_feature
    if is_text(inner):
        return lambda values: _bytes_feature([text.encode() for text in values])
    if pa.types.is_integer(inner) or pa.types.is_boolean(inner):
        return _integers_feature
    # float64 is refused, because a Feature would store it as float32.
    if pa.types.is_float32(inner) or pa.types.is_float16(inner):
        return _floats_feature
    return None


def _bytes_feature(values: Sequence[Any]) -> bytes:
    return bytes_field(_BYTES_LIST, *[bytes_field(1, value) for value in values])


def _integers_feature(values: Sequence[int]) -> bytes:
    packed = packed_varints(np.array(values, np.int64))
    # The Protocol Buffers format has no field 1 for an empty list.
    return bytes_field(_INT64_LIST, bytes_field(1, packed) if packed else b"")


def _floats_feature(values: Sequence[float]) -> bytes:
    packed = np.array(values, "<f4").tobytes()
    return bytes_field(_FLOAT_LIST, bytes_field(1, packed) if packed else b"")
