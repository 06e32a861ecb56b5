"""What a shard's columns are. A shard is a plain Arrow IPC file: other tools open it unaided."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import pyarrow as pa

from datasvc.errors import ConfigError

SHARD_FORMAT = 1
_FORMAT: Final = b"datasvc.shard.format"
_METADATA = {_FORMAT: str(SHARD_FORMAT).encode()}

KEY, IMAGE, LABEL, WIDTH, HEIGHT = "key", "image", "label", "width", "height"
_KIND: Final = b"datasvc.kind"
_OURS: Final = b"datasvc."


def image_schema(*, labelled: bool) -> pa.Schema:
    """Return the schema of image samples.

    `image` holds the encoded file verbatim; `width` and `height` are pixels after the EXIF rotation, so that a
    crop can be drawn before anything is decoded; `label` is an index into the shard table's class names.
    """
    fields = [pa.field(KEY, pa.string(), nullable=False), image_field(IMAGE)]
    if labelled:
        fields.append(pa.field(LABEL, pa.int32(), nullable=False))
    return stored_schema(pa.schema(fields))


def image_field(name: str, *, nullable: bool = False) -> pa.Field:
    """Return a column of encoded images, as sources declare them."""
    return pa.field(name, pa.large_binary(), nullable=nullable, metadata={_KIND: b"image"})


def is_image(field: pa.Field) -> bool:
    """Return whether a column of a source holds encoded images."""
    return (field.metadata or {}).get(_KIND) == b"image"


def stored_schema(source: pa.Schema) -> pa.Schema:
    """Return the shard schema for a source's columns: `width` and `height` follow the column `image`.

    What the source says of itself under `datasvc.`, such as a tokenizer's digest, stays.

    Raises:
        ConfigError: as `shard_schema`.
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
    own = {name: value for name, value in (source.metadata or {}).items() if name.startswith(_OURS)}
    return shard_schema(fields, own)


def shard_schema(fields: list[pa.Field], metadata: Mapping[bytes, bytes] | None = None) -> pa.Schema:
    """Return a shard's schema over `fields`, marked with the format's version, with more `metadata`.

    Raises:
        ConfigError: there is no `key` column of strings, or a column has a name twice.
    """
    names = [field.name for field in fields]
    if len(set(names)) != len(names):
        raise ConfigError(f"column names must be unique; got {names}")
    if KEY not in names or fields[names.index(KEY)].type != pa.string():
        raise ConfigError(f"a shard needs a column {KEY!r} of strings, unique in its split; got {names}")
    return pa.schema(fields, metadata={**(metadata or {}), **_METADATA})


def measured_columns(schema: pa.Schema) -> tuple[str, ...]:
    """Return the columns that were measured of images rather than given: those of samples that were in a shard."""
    is_ours = _FORMAT in (schema.metadata or {})
    return (WIDTH, HEIGHT) if is_ours and IMAGE in schema.names else ()


def is_blob(data_type: pa.DataType) -> bool:
    """Return whether values of this type are stored as bytes that are read as zero-copy views."""
    return bool(pa.types.is_large_binary(data_type))


def check_shard_format(schema: pa.Schema, name: str) -> None:
    """Raise ConfigError when `schema` is of a later shard format, or of none."""
    found = (schema.metadata or {}).get(_FORMAT)
    if found is None or int(found) > SHARD_FORMAT:
        raise ConfigError(
            f"{name} has shard format {found.decode() if found else 'none'}; this datasvc reads up to {SHARD_FORMAT}"
        )
