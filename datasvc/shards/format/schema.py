"""Schemas of shards: their columns, and the number of the shard format. A shard is a plain Arrow IPC file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np
import pyarrow as pa

from datasvc.errors import ConfigError, CorruptDataError

SHARD_FORMAT = 1
_FORMAT: Final = b"datasvc.shard.format"
_METADATA = {_FORMAT: str(SHARD_FORMAT).encode()}

KEY, IMAGE, LABEL, WIDTH, HEIGHT = "key", "image", "label", "width", "height"
_KIND: Final = b"datasvc.kind"  # in the metadata of a source's column; the value `image` means encoded images
_PREFIX: Final = b"datasvc."
_MAX_DIGITS: Final = 10  # a format number has fewer digits; a longer one is damage


def image_schema(*, labelled: bool) -> pa.Schema:
    """Return the schema of image samples.

    `image` has the encoded file unchanged. `width` and `height` are in pixels after the EXIF rotation, so that a crop
    can be chosen before the image is decoded. `label` is an index into the class names of the shard table.
    """
    fields = [pa.field(KEY, pa.string(), nullable=False), image_field(IMAGE)]
    if labelled:
        fields.append(pa.field(LABEL, pa.int32(), nullable=False))
    return stored_schema(pa.schema(fields))


def image_field(name: str, *, nullable: bool = False) -> pa.Field:
    """Return the field by which a source declares a column of encoded images."""
    return pa.field(name, pa.large_binary(), nullable=nullable, metadata={_KIND: b"image"})


def is_image(field: pa.Field) -> bool:
    """Return whether a column of a source holds encoded images."""
    return (field.metadata or {}).get(_KIND) == b"image"


def stored_schema(source: pa.Schema) -> pa.Schema:
    """Return the shard schema for a source's columns, with `width` and `height` added after the column `image`.

    Metadata of the source with the prefix `datasvc.`, such as a tokenizer's digest, is kept.

    Raises:
        ConfigError: see `shard_schema`.
    """
    fields: list[pa.Field] = []
    for field in source:
        if field.name == IMAGE and is_image(field):
            fields += [
                field.remove_metadata(),
                *(pa.field(name, pa.int32(), nullable=False) for name in (WIDTH, HEIGHT)),
            ]
        else:
            fields.append(field)
    metadata = {name: value for name, value in (source.metadata or {}).items() if name.startswith(_PREFIX)}
    return shard_schema(fields, metadata)


def shard_schema(fields: list[pa.Field], metadata: Mapping[bytes, bytes] | None = None) -> pa.Schema:
    """Return a shard's schema with `fields`, the number of the shard format, and further `metadata`.

    Raises:
        ConfigError: there is no `key` column of strings, or two columns have the same name.
    """
    names = [field.name for field in fields]
    if len(set(names)) != len(names):
        raise ConfigError(f"column names must be unique; got {names}")
    if KEY not in names or fields[names.index(KEY)].type != pa.string():
        raise ConfigError(f"a shard needs a column {KEY!r} of strings, unique in its split; got the columns {names}")
    # The format number comes last, so that `metadata` does not override it.
    return pa.schema(fields, metadata={**(metadata or {}), **_METADATA})


def measured_columns(schema: pa.Schema) -> tuple[str, ...]:
    """Return the columns of a shard's schema that hold measured image sizes; () for any other schema."""
    is_shard = _FORMAT in (schema.metadata or {})
    return (WIDTH, HEIGHT) if is_shard and IMAGE in schema.names else ()


def is_gathered(data_type: pa.DataType) -> bool:
    """Return whether a writer copies values of this type one by one into a buffer, as it does for blobs and text."""
    checks = (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary)
    return any(check(data_type) for check in checks)


def offset_dtype(data_type: pa.DataType) -> type[np.int32 | np.int64]:
    """Return the type of the offsets in Arrow arrays of blobs, texts, lists or maps."""
    checks = (pa.types.is_large_binary, pa.types.is_large_string, pa.types.is_large_list)
    return np.int64 if any(check(data_type) for check in checks) else np.int32


def is_blob(data_type: pa.DataType) -> bool:
    """Return whether values of this type are blobs: bytes that readers return as zero-copy views."""
    return bool(pa.types.is_large_binary(data_type))


def check_shard_schema(schema: pa.Schema, name: str) -> None:
    """Check the schema of a stored shard.

    Raises:
        ConfigError: the schema has no shard format, or a newer one than this datasvc reads.
        CorruptDataError: the format is not a number, or there is no column `key` of strings.
    """
    stored = (schema.metadata or {}).get(_FORMAT)
    if stored is not None and not (stored.isdigit() and len(stored) < _MAX_DIGITS):
        raise CorruptDataError(f"{name} has the shard format {stored[:20]!r}, which is not a number")
    if stored is None or int(stored) > SHARD_FORMAT:
        found = stored.decode() if stored else "none"
        raise ConfigError(f"{name} has shard format {found}; this datasvc reads up to {SHARD_FORMAT}")
    if KEY not in schema.names or schema.field(KEY).type != pa.string():
        raise CorruptDataError(f"{name} has no column {KEY!r} of strings; restore it from another copy")
