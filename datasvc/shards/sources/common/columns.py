"""How what a format calls columns or fields becomes the columns of our samples: names, types, images, keys.

Blobs are `large_binary`; what starts like an image is one; a lone image column is called `image`, so that an image
loader finds it. Everything else keeps its name and type, nested or not.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Final

import pyarrow as pa

from datasvc.errors import ConfigError
from datasvc.shards.format.schema import (
    HEIGHT,
    IMAGE,
    KEY,
    LABEL,
    WIDTH,
    image_field,
    is_blob,
    is_image,
    measured_columns,
)
from datasvc.shards.sources.common.column_types import check_unique, converted, is_text, plain, sample_type
from datasvc.shards.sources.common.source import BATCH_BYTES, BATCH_SAMPLES, BadSample

_MAGIC: Final = (b"\xff\xd8\xff", b"\x89PNG\r\n", b"II*\0", b"MM\0*")
_LABELS: Final = ("cls", "class", "target")
_SOURCE_PREFIX: Final = "source_"
_MISFITS: Final = (pa.ArrowException, OverflowError, TypeError, ValueError)


def looks_like_image(blob: bytes | None) -> bool:
    """Return whether `blob` starts as an encoded image does."""
    if not blob:
        return False
    is_webp = blob[:4] == b"RIFF" and blob[8:12] == b"WEBP"
    is_bitmap = blob[:2] == b"BM" and blob[6:10] == bytes(4)  # two letters alone would be text as well
    return blob.startswith(_MAGIC) or is_webp or is_bitmap


class ColumnMap:
    """Raw columns to sample columns.

    Args:
        raw: schema as the format's reader gives it.
        first: some first samples, by which images are recognised; columns of `raw`.
        key: raw column that holds the keys; default: one called `key`, else keys are made by the source.
        images: raw columns that are known to hold encoded images.
        label: raw column that is known to hold the index of the class; default: an integer column called `label`,
            or else `cls`, `class` or `target`.

    Attributes:
        schema: the source's columns, `key` first.
        key: the raw column of the keys, or None.

    Raises:
        ConfigError: `key` is no column, or no text or integer; or two columns would get one name.
    """

    def __init__(
        self,
        raw: pa.Schema,
        first: pa.Table | pa.RecordBatch | None = None,
        *,
        key: str | None = None,
        images: Collection[str] = (),
        label: str | None = None,
    ) -> None:
        check_unique(raw.names, "the source")
        self.key = _choose_key(raw, key)
        measured = measured_columns(raw)  # of an exported version: they are measured again
        given = [name for name in raw.names if name != self.key and name not in measured]
        fields = {name: _sample_field(raw.field(name), first, images) for name in given}
        blobs = [name for name, field in fields.items() if is_image(field)]
        if len(blobs) == 1 and IMAGE not in fields:
            fields[blobs[0]] = fields[blobs[0]].with_name(IMAGE)
        label = _choose_label(fields, label)
        if label is not None:
            fields[label] = fields[label].with_name(LABEL)
        has_image = any(field.name == IMAGE and is_image(field) for field in fields.values())
        self._fields = {name: _finished(field, has_image=has_image) for name, field in fields.items()}
        every = [pa.field(KEY, pa.string(), nullable=False), *self._fields.values()]
        _check_names([field.name for field in every])
        self.schema = pa.schema(every)

    @property
    def raw_names(self) -> list[str]:
        """The raw columns that samples are made of."""
        return [*([] if self.key is None else [self.key]), *self._fields]

    def convert(self, batch: pa.RecordBatch, keys: pa.Array | Sequence[str]) -> pa.RecordBatch:
        """Return raw samples as batches of `schema`; `keys` serve where no raw column does.

        Raises:
            ConfigError: a column is missing or does not convert, or a key or image is null.
        """
        columns = [self._keys(batch, keys)]
        for name, field in self._fields.items():
            column = _convert(batch, name, field.type)
            if column.null_count and not field.nullable:
                raise ConfigError(f"column {name!r} is null")
            columns.append(column)
        return pa.RecordBatch.from_arrays(columns, schema=self.schema)

    def _keys(self, batch: pa.RecordBatch, keys: pa.Array | Sequence[str]) -> pa.Array:
        if self.key is None:
            return keys if isinstance(keys, pa.Array) else pa.array(keys, pa.string())
        column = _convert(batch, self.key, pa.string())
        if column.null_count:
            raise ConfigError(f"column {self.key!r}, which holds the keys, is null")
        return column


class SampleBatcher:
    """Samples as dicts to batches of a schema; those that do not fit it become `BadSample`s.

    Args:
        schema: of the source.
        split: for `BadSample`.
    """

    def __init__(self, schema: pa.Schema, split: str) -> None:
        self._schema = schema
        self._split = split
        self._samples: list[Mapping[str, Any]] = []
        self._size_bytes = 0

    def add(self, sample: Mapping[str, Any]) -> Iterator[pa.RecordBatch | BadSample]:
        """Take a sample; absent columns are null. Yields what is complete by it."""
        unknown = sample.keys() - set(self._schema.names)
        if unknown:
            yield BadSample(self._split, str(sample.get(KEY)), f"has unknown columns {sorted(unknown)}")
            return
        size_bytes = sum(map(_size_of, sample.values()))
        if self._size_bytes + size_bytes > BATCH_BYTES or len(self._samples) >= BATCH_SAMPLES:
            yield from self.flush()
        self._samples.append(sample)
        self._size_bytes += size_bytes

    def flush(self) -> Iterator[pa.RecordBatch | BadSample]:
        """Yield what is left."""
        samples, self._samples, self._size_bytes = self._samples, [], 0
        if not samples:
            return
        try:
            yield self._batch(samples)
        except _MISFITS:
            yield from self._one_by_one(samples)

    def _batch(self, samples: Sequence[Mapping[str, Any]]) -> pa.RecordBatch:
        columns = []
        for field in self._schema:
            column = pa.array([sample.get(field.name) for sample in samples], field.type)
            if column.null_count and not field.nullable:
                raise ValueError(f"column {field.name!r} is missing")
            columns.append(column)
        return pa.RecordBatch.from_arrays(columns, schema=self._schema)

    def _one_by_one(self, samples: Sequence[Mapping[str, Any]]) -> Iterator[pa.RecordBatch | BadSample]:
        good: list[Mapping[str, Any]] = []
        for sample in samples:
            try:
                self._batch([sample])
            except _MISFITS as error:
                if good:
                    yield self._batch(good)
                    good = []
                yield BadSample(self._split, str(sample.get(KEY)), f"does not fit the columns: {error}")
            else:
                good.append(sample)
        if good:
            yield self._batch(good)


def infer_columns(samples: Sequence[Mapping[str, Any]], *, key: str | None = None) -> ColumnMap:
    """Return the columns of samples given as dicts, from some first ones.

    Raises:
        ConfigError: a column holds values of several types, or as `ColumnMap`.
    """
    names = list(dict.fromkeys(name for sample in samples for name in sample))
    columns = {}
    for name in names:
        try:
            columns[name] = pa.array([sample.get(name) for sample in samples])
        except _MISFITS as error:
            raise ConfigError(f"column {name!r} does not hold values of one type: {error}") from error
    table = pa.table(columns)
    return ColumnMap(table.schema, table, key=key)


def _choose_key(raw: pa.Schema, key: str | None) -> str | None:
    if key is None:
        if KEY not in raw.names:
            return None
        key = KEY
    if key not in raw.names:
        raise ConfigError(f"there is no column {key!r} to take keys from; found {raw.names}")
    found = raw.field(key).type
    if not (is_text(found) or pa.types.is_integer(sample_type(found))):
        raise ConfigError(f"column {key!r} cannot hold keys: it is {found}; expected text or integers")
    return key


def _choose_label(fields: Mapping[str, pa.Field], label: str | None) -> str | None:
    if label is not None or LABEL in fields:
        return label
    return next((name for name in _LABELS if name in fields and pa.types.is_integer(fields[name].type)), None)


def _sample_field(raw: pa.Field, first: pa.Table | pa.RecordBatch | None, images: Collection[str]) -> pa.Field:
    wanted = sample_type(raw.type)
    column = None if first is None else first.column(raw.name)
    if is_blob(wanted) and (raw.name in images or (column is not None and _holds_images(column))):
        return image_field(raw.name, nullable=raw.nullable and column is not None and column.null_count > 0)
    return pa.field(raw.name, wanted, nullable=raw.nullable)


def _holds_images(column: pa.Array | pa.ChunkedArray) -> bool:
    chunks = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
    for chunk in chunks:
        for value in plain(chunk):
            if value.is_valid:
                return looks_like_image(value.as_buffer()[:16].to_pybytes())
    return False


def _convert(batch: pa.RecordBatch, name: str, wanted: pa.DataType) -> pa.Array:
    if name not in batch.schema.names:
        raise ConfigError(f"column {name!r} is missing; found {batch.schema.names}")
    try:
        return converted(batch.column(name), wanted)
    except pa.ArrowException as error:
        raise ConfigError(f"column {name!r} does not convert to {wanted}: {error}") from error
    except ConfigError as error:
        raise ConfigError(f"column {name!r}: {error}") from error


def _size_of(value: Any) -> int:
    """Return about how many bytes a value takes."""
    if isinstance(value, (bytes, str)):
        return len(value)
    if isinstance(value, (list, tuple)):
        return 8 * len(value) if value and isinstance(value[0], (int, float)) else sum(map(_size_of, value))
    if isinstance(value, dict):
        return sum(map(_size_of, value.values()))
    return int(getattr(value, "nbytes", 8))


def _finished(field: pa.Field, *, has_image: bool) -> pa.Field:
    if has_image and field.name in (WIDTH, HEIGHT):
        return field.with_name(f"{_SOURCE_PREFIX}{field.name}")  # ours are measured
    if field.name == LABEL and pa.types.is_integer(field.type):
        return field.with_type(pa.int32())
    return field


def _check_names(names: list[str]) -> None:
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(f"two columns would be called {twice}; rename one of them")
