"""What a shard's columns are. A shard is a plain Arrow IPC file: other tools open it unaided."""

from __future__ import annotations

import pyarrow as pa

from datasvc.errors import ConfigError

SHARD_FORMAT = 1
_METADATA = {b"datasvc.shard.format": str(SHARD_FORMAT).encode()}

KEY, IMAGE, LABEL, WIDTH, HEIGHT = "key", "image", "label", "width", "height"


def image_schema(*, labelled: bool) -> pa.Schema:
    """Return the schema of image samples.

    `image` holds the encoded file verbatim; `width` and `height` are pixels after the EXIF rotation, so that a
    crop can be drawn before anything is decoded; `label` is an index into the shard table's class names.
    """
    fields = [
        pa.field(KEY, pa.string(), nullable=False),
        pa.field(IMAGE, pa.large_binary(), nullable=False),
        pa.field(WIDTH, pa.int32(), nullable=False),
        pa.field(HEIGHT, pa.int32(), nullable=False),
    ]
    if labelled:
        fields.append(pa.field(LABEL, pa.int32(), nullable=False))
    return shard_schema(fields)


def shard_schema(fields: list[pa.Field]) -> pa.Schema:
    """Return a shard's schema over `fields`, marked with the format's version.

    Raises:
        ConfigError: there is no `key` column of strings, or a column has a name twice.
    """
    names = [field.name for field in fields]
    if len(set(names)) != len(names):
        raise ConfigError(f"column names must be unique; got {names}")
    if KEY not in names or fields[names.index(KEY)].type != pa.string():
        raise ConfigError(f"a shard needs a column {KEY!r} of strings, unique in its split; got {names}")
    return pa.schema(fields, metadata=_METADATA)


def is_blob(data_type: pa.DataType) -> bool:
    """Return whether values of this type are stored as bytes that are read as zero-copy views."""
    return bool(pa.types.is_large_binary(data_type))


def check_shard_format(schema: pa.Schema, name: str) -> None:
    """Raise ConfigError when `schema` is of a later shard format, or of none."""
    found = (schema.metadata or {}).get(b"datasvc.shard.format")
    if found is None or int(found) > SHARD_FORMAT:
        raise ConfigError(
            f"{name} has shard format {found.decode() if found else 'none'}; this datasvc reads up to {SHARD_FORMAT}"
        )
