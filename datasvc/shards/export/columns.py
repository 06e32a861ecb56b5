"""Functions for columns that the export formats share: kinds of values, JSON, and errors for unsupported columns."""

from __future__ import annotations

import json
from typing import Any, Final

import pyarrow as pa

from datasvc.errors import ConfigError
from datasvc.shards.format.schema import HEIGHT, IMAGE, KEY, LABEL, WIDTH, is_blob
from datasvc.shards.versions.dataset import Split

# Types whose values are JSON scalars.
_PLAIN_JSON: Final = (
    pa.types.is_null,
    pa.types.is_boolean,
    pa.types.is_integer,
    pa.types.is_floating,
    pa.types.is_string,
    pa.types.is_large_string,
)
_LISTS: Final = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)


def given_columns(schema: pa.Schema) -> list[pa.Field]:
    """Return the columns that an export must hold: all except the key, and the width and height of an image.

    Each format stores the key in a way of its own. A reader can measure width and height again.
    """
    measured = (WIDTH, HEIGHT) if IMAGE in schema.names else ()
    return [field for field in schema if field.name != KEY and field.name not in measured]


def is_label(column: pa.Field) -> bool:
    """Return whether a column holds class indices."""
    return bool(column.name == LABEL and pa.types.is_integer(column.type))


def has_label(schema: pa.Schema) -> bool:
    """Return whether there is a column of class indices."""
    return any(is_label(column) for column in schema)


def check_images(export_format: str, split: Split) -> None:
    """Raise ConfigError if a split has no column of encoded images; for formats that hold only images."""
    schema = split.table.sample_schema
    if IMAGE not in schema.names or not is_blob(schema.field(IMAGE).type):
        raise ConfigError(
            f"{export_format} holds images, but {split} has no column {IMAGE!r} of images; formats that can: "
            "webdataset, parquet, mds, tfrecord"
        )


def is_text(data_type: pa.DataType) -> bool:
    """Return whether values are strings."""
    return bool(pa.types.is_string(data_type) or pa.types.is_large_string(data_type))


def is_list(data_type: pa.DataType) -> bool:
    """Return whether values are lists, of fixed length or not."""
    return any(check(data_type) for check in _LISTS)


def is_json(data_type: pa.DataType) -> bool:
    """Return whether JSON stores values of this type without loss."""
    if pa.types.is_dictionary(data_type) or is_list(data_type):
        return is_json(data_type.value_type)
    if pa.types.is_struct(data_type):
        return all(is_json(field.type) for field in data_type.fields)
    if pa.types.is_map(data_type):
        return is_json(data_type.key_type) and is_json(data_type.item_type)
    return any(check(data_type) for check in _PLAIN_JSON)


def encode_json(value: Any, key: str) -> bytes:
    """Return `value` as compact JSON.

    Raises:
        ConfigError: `value` holds NaN or an infinity, which JSON cannot represent. The message names the sample by
            `key`, the key of the sample.
    """
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
    except ValueError as error:
        raise ConfigError(
            f"sample {key!r} holds NaN or an infinity in {value!r}, which JSON cannot represent; export it as parquet"
        ) from error


def refused_column(export_format: str, column: pa.Field, supported_by: str = "parquet") -> ConfigError:
    """Return the error for a column that a format cannot hold; `supported_by` lists formats that can."""
    return ConfigError(
        f"{export_format} cannot hold the column {column.name!r} of {column.type}; formats that can: {supported_by}"
    )


def refused_null(export_format: str, column: str, key: str, supported_by: str) -> ConfigError:
    """Return the error for a null that a format cannot hold; `supported_by` lists formats that can."""
    return ConfigError(
        f"{export_format} cannot hold a null: sample {key!r} has no {column!r}; formats that can: {supported_by}"
    )
