"""Map the columns of a format to sample columns (names, types, images, keys), and build batches of samples.

Raw columns are those that the reader of a format yields. In samples, blobs are `large_binary`. A blob column whose
first value starts like an encoded image or sound is a column of these; videos are declared. Most columns keep their
names, except:

- A single image column becomes `image`, and a single column of sounds or videos `audio` or `video`: the names that
  loaders read.
- The column of class indices becomes `label`.
- `width` and `height` get the prefix `source_` if there is an `image`: the ingest adds columns of these names. So do
  `rate`, `channels`, `frames` and `duration` if there is an `audio`, and what is measured of a `video`.

Sources make the map when they list, and convert batches with it when they read.
"""

from __future__ import annotations

import base64
import copy
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from datasvc.errors import BadSampleError, ConfigError, CorruptDataError
from datasvc.shards.audio.audio_file import looks_like_audio
from datasvc.shards.format.schema import (
    AUDIO,
    IMAGE,
    KEY,
    LABEL,
    VIDEO,
    VIDEO_FRAMES,
    added_columns,
    audio_field,
    image_field,
    is_audio,
    is_blob,
    is_image,
    is_video,
    measured_columns,
    video_field,
)
from datasvc.shards.sources.common.column_types import cast_column, check_unique, decode_column, is_text, sample_type
from datasvc.shards.sources.common.python_values import MISFITS, check_nesting, infer_array, to_array
from datasvc.shards.sources.common.source import BATCH_BYTES, BATCH_SAMPLES, BadSample, SourcePart

# First bytes of JPEG, PNG and both byte orders of TIFF.
_MAGIC: Final = (b"\xff\xd8\xff", b"\x89PNG\r\n", b"II*\0", b"MM\0*")
# Main brands of AVIF and HEIC, whose container video has too.
_BRANDS: Final = frozenset({b"avif", b"avis", b"heic", b"heix", b"hevc", b"mif1", b"msf1"})
# If no column is called `label`, the first integer column of these names is renamed to it.
_LABELS: Final = ("cls", "class", "target")
_SOURCE_PREFIX: Final = "source_"

_Content = TypeVar("_Content")
_Converted = TypeVar("_Converted")


def looks_like_image(blob: bytes | None) -> bool:
    """Return whether `blob` starts with the magic bytes of an encoded image."""
    if not blob:
        return False
    is_webp = blob[:4] == b"RIFF" and blob[8:12] == b"WEBP"
    is_bitmap = blob[:2] == b"BM" and blob[6:10] == bytes(4)  # the zeros exclude a text that starts with "BM"
    is_heif = blob[4:8] == b"ftyp" and blob[8:12] in _BRANDS
    return blob.startswith(_MAGIC) or is_webp or is_bitmap or is_heif


def schema_to_text(schema: pa.Schema) -> str:
    """Return a schema as text for JSON; `schema_of_text` returns it."""
    return base64.b64encode(schema.serialize()).decode()


def schema_of_text(text: str) -> pa.Schema:
    """Return the schema that `schema_to_text` wrote. Raise ValueError or ArrowException for other text."""
    return pa.ipc.read_schema(pa.py_buffer(base64.b64decode(text)))


class ColumnMap:
    """Mapping of raw columns to sample columns.

    Args:
        raw: schema of the batches that the format's reader yields.
        first: the first samples, with the columns of `raw`; image columns are detected in them.
        key: raw column that holds the keys; None: a column called `key`. Without one, the source makes the keys.
        images: raw columns that the format defines as encoded images.
        sounds: raw columns that the format defines as encoded sounds.
        videos: raw columns that the format defines as encoded videos.
        label: raw column that the format defines as class index; None: the column `label`, or else an integer column
            called `cls`, `class` or `target`.

    Attributes:
        schema: columns of the samples, `key` first.
        key: raw column of the keys, or None.
        label: raw column that becomes `label`, or None.

    Raises:
        ConfigError: `key` is not a column, or holds neither text nor integers; or two columns would have one name.
    """

    def __init__(
        self,
        raw: pa.Schema,
        first: pa.Table | pa.RecordBatch | None = None,
        *,
        key: str | None = None,
        images: Collection[str] = (),
        sounds: Collection[str] = (),
        videos: Collection[str] = (),
        label: str | None = None,
    ) -> None:
        check_names(raw.names)
        check_unique(raw.names, "the source")
        self.key = _choose_key(raw, key)
        # Sizes in an exported version are left out, because the ingest measures images, sounds and videos again.
        measured = measured_columns(raw)
        videos = (*videos, VIDEO) if VIDEO_FRAMES in measured else videos
        value_names = [name for name in raw.names if name != self.key and name not in measured]
        fields = {name: _sample_field(raw.field(name), first, images, sounds, videos) for name in value_names}
        for chosen, is_kind in ((IMAGE, is_image), (AUDIO, is_audio), (VIDEO, is_video)):
            found = [name for name, field in fields.items() if is_kind(field)]
            if len(found) == 1 and chosen not in fields:
                fields[found[0]] = fields[found[0]].with_name(chosen)
        integers = (name for name in _LABELS if name in fields and pa.types.is_integer(fields[name].type))
        self.label = label or (LABEL if LABEL in fields else next(integers, None))
        self._classes: pa.Array | None = None
        if self.label is not None:
            fields[self.label] = fields[self.label].with_name(LABEL)
        reserved = {name for field in fields.values() for name in added_columns(field)}
        # Sample fields by the name of their raw column, without the key.
        self._fields = {name: _final_field(field, reserved) for name, field in fields.items()}
        self.schema = self._sample_schema()

    def with_labels(self, name: str, classes: Sequence[str] = ()) -> ColumnMap:
        """Return a map that makes `label` of the raw column `name`, as int32.

        The column holds whole numbers (NaN and null for no class), booleans, or names in `classes`; the index of a
        name is the label. A column that was `label` becomes `source_label`.
        """
        changed = copy.copy(self)
        changed.label, changed._classes = name, pa.array(classes, pa.string()) if classes else None  # noqa: SLF001 - a copy
        changed._fields = {
            raw: field.with_name(f"{_SOURCE_PREFIX}{LABEL}") if field.name == LABEL else field
            for raw, field in self._fields.items()
        }
        is_integer = pa.types.is_integer(self._fields[name].type)
        label = self._fields[name].with_name(LABEL).with_type(pa.int32())
        changed._fields[name] = label.with_nullable(label.nullable or not is_integer)
        changed.schema = changed._sample_schema()  # noqa: SLF001
        return changed

    def to_json(self) -> dict[str, Any]:
        """Return the map as JSON values, from which `of_json` makes an equal one."""
        return {
            "key": self.key,
            "label": self.label,
            "classes": None if self._classes is None else self._classes.to_pylist(),
            "raw": list(self._fields),
            "fields": schema_to_text(pa.schema(list(self._fields.values()))),
        }

    @classmethod
    def of_json(cls, described: Mapping[str, Any]) -> ColumnMap:
        """Return the map that `to_json` described. Raise KeyError, TypeError, ValueError, ArrowException."""
        made = cls(pa.schema([]))
        made.key, made.label = described["key"], described["label"]
        made._classes = None if described["classes"] is None else pa.array(described["classes"], pa.string())
        made._fields = dict(zip(described["raw"], schema_of_text(described["fields"]), strict=True))
        made.schema = made._sample_schema()
        return made

    def field(self, name: str) -> pa.Field | None:
        """Return the sample field of the raw column `name`; None if there is none, or if it holds the keys."""
        return self._fields.get(name)

    def _sample_schema(self) -> pa.Schema:
        sample_fields = [pa.field(KEY, pa.string(), nullable=False), *self._fields.values()]
        names = Counter(field.name for field in sample_fields)
        if duplicates := sorted(name for name, count in names.items() if count > 1):
            raise ConfigError(f"two columns would be called {duplicates}; rename one of them")
        return pa.schema(sample_fields)

    @property
    def raw_names(self) -> list[str]:
        """Raw columns that are needed to make samples."""
        return [*([] if self.key is None else [self.key]), *self._fields]

    @property
    def required(self) -> list[str]:
        """Raw columns that must have a value in each sample: the key, and each column that is not nullable."""
        key = [] if self.key is None else [self.key]
        return [*key, *(name for name, field in self._fields.items() if not field.nullable)]

    def convert(self, batch: pa.RecordBatch, keys: pa.Array | Sequence[str]) -> pa.RecordBatch:
        """Return a batch of raw samples as a batch of `schema`; `keys` are used if no raw column holds the keys.

        Raises:
            ConfigError: a column is missing or does not convert, or a key or image is null.
        """
        columns = [self._keys(batch, keys)]
        for name, field in self._fields.items():
            is_named = name == self.label and self._classes is not None
            column = self._indices(batch, name) if is_named else _convert(batch, name, field.type)
            # Checked here, because Arrow accepts nulls even if the field is not nullable.
            if column.null_count and not field.nullable:
                raise ConfigError(f"column {name!r} is null; expected a value in each sample")
            columns.append(column)
        return pa.RecordBatch.from_arrays(columns, schema=self.schema)

    def _indices(self, batch: pa.RecordBatch, name: str) -> pa.Array:
        """Return the labels of a column of class names: null for null and for an empty text."""
        names = _convert(batch, name, pa.string())
        labels = pc.index_in(names, value_set=self._classes)
        unknown = pc.and_(labels.is_null(), pc.fill_null(pc.not_equal(names, ""), fill_value=False))
        if labels.null_count and pc.any(unknown).as_py():
            raise ConfigError(f"column {name!r}: {names.filter(unknown)[0].as_py()!r} is not one of the classes")
        return labels

    def _keys(self, batch: pa.RecordBatch, keys: pa.Array | Sequence[str]) -> pa.Array:
        """Return the keys in the raw column of keys; without such a column, `keys`."""
        if self.key is None:
            return keys if isinstance(keys, pa.Array) else pa.array(keys, pa.string())
        column = _convert(batch, self.key, pa.string())
        if column.null_count:
            raise ConfigError(f"column {self.key!r}, which holds the keys, is null; expected a key for each sample")
        return column


class SampleBatcher:
    """Collects samples given as dicts into batches; a sample that does not fit the schema becomes a `BadSample`."""

    def __init__(self, schema: pa.Schema, split: str) -> None:
        self._schema = schema
        self._split = split
        self._samples: list[Mapping[str, Any]] = []
        self._size_bytes = 0

    def add(self, sample: Mapping[str, Any]) -> Iterator[pa.RecordBatch | BadSample]:
        """Add a sample; absent columns are null. Yield the previous samples if they fill a batch.

        The caller must read the iterator to its end: the sample is added last.
        """
        unknown = sample.keys() - set(self._schema.names)
        if unknown:
            yield BadSample(self._split, str(sample.get(KEY)), f"has unknown columns {sorted(unknown, key=str)}")
            return
        try:
            check_nesting(sample.values())
        except ValueError as error:
            key = sample.get(KEY)
            yield BadSample(self._split, key if isinstance(key, str) else "a sample", str(error))
            return
        size_bytes = sum(map(_size_of, sample.values()))
        # Flush before the sample is added, so that a batch exceeds the limit only if a single sample does.
        if self._size_bytes + size_bytes > BATCH_BYTES or len(self._samples) >= BATCH_SAMPLES:
            yield from self.flush()
        self._samples.append(sample)
        self._size_bytes += size_bytes

    def flush(self) -> Iterator[pa.RecordBatch | BadSample]:
        """Yield the samples that were added since the last batch, and a `BadSample` for each that does not fit."""
        samples, self._samples, self._size_bytes = self._samples, [], 0
        converted = bisect_errors(len(samples), lambda start, stop: self._batch(samples[start:stop]), MISFITS)
        for first, batch in converted:
            if isinstance(batch, Exception):
                key = str(samples[first].get(KEY))
                yield BadSample(self._split, key, f"does not fit the columns: {batch}")
            else:
                yield batch

    def _batch(self, samples: Sequence[Mapping[str, Any]]) -> pa.RecordBatch:
        """Return samples as one batch. Raise one of `MISFITS` if one of them does not fit the schema."""
        columns = []
        for field in self._schema:
            column = _to_array(samples, field)
            if column.null_count and not field.nullable:
                raise ValueError(f"column {field.name!r} is missing")  # one of `MISFITS`, which `flush` handles
            columns.append(column)
        return pa.RecordBatch.from_arrays(columns, schema=self._schema)


def to_batches(
    schema: pa.Schema,
    part: SourcePart,
    contents: Iterable[tuple[str, _Content | BadSampleError]],
    to_sample: Callable[[str, _Content], Mapping[str, Any]],
) -> Iterator[pa.RecordBatch | BadSample]:
    """Yield the samples of a part in batches of `schema`, for the `read` method of a source.

    Args:
        schema: columns of the samples.
        part: part that is read.
        contents: each sample's name, with its content or the error of reading it. If the iterator raises
            CorruptDataError, this error is the last `BadSample` of the part.
        to_sample: makes a sample of a name and its content, or raises BadSampleError.
    """
    batcher = SampleBatcher(schema, part.split)
    try:
        for name, content in contents:
            try:
                if isinstance(content, BadSampleError):
                    raise content  # handled below, like an error of `to_sample`
                sample = to_sample(name, content)
            except BadSampleError as error:
                yield BadSample(part.split, name, str(error))
            else:
                yield from batcher.add(sample)
    except CorruptDataError as error:
        yield from batcher.flush()  # the samples before the damage are good
        yield BadSample(part.split, part.name, str(error))
    else:
        yield from batcher.flush()


def bisect_errors(
    num_samples: int, convert: Callable[[int, int], _Converted], errors: tuple[type[Exception], ...]
) -> Iterator[tuple[int, _Converted | Exception]]:
    """Convert samples together; if this fails, convert each half alone, and so on. Only failing samples are lost.

    `convert` converts the samples `start` to `stop`, and raises one of `errors` if one of them does not convert. In
    order, yield the number of a first sample, with the result of `convert` from there or the sample's own error.
    """
    pending = [(0, num_samples)] if num_samples else []
    while pending:
        start, stop = pending.pop()
        try:
            converted = convert(start, stop)
        except errors as error:
            if stop - start == 1:
                yield start, error
                continue
            # Arrow's error does not name the sample. Bad samples are rare, so halving is faster than one by one.
            middle = (start + stop) // 2
            # `pop` takes the last range, so append the first half last.
            pending += [(middle, stop), (start, middle)]
        else:
            yield start, converted


def infer_table(samples: Sequence[Mapping[str, Any]]) -> pa.Table:
    """Return the first samples as a table with the types that hold all their values.

    Raises:
        ConfigError: a column holds values of several types, or its name is not text.
    """
    names = list(dict.fromkeys(name for sample in samples for name in sample))
    check_names(names)
    columns = {}
    for name in names:
        values = [sample.get(name) for sample in samples]
        try:
            check_nesting(values)
            columns[name] = infer_array(values)
        except MISFITS as error:
            raise ConfigError(
                f"column {name!r} holds values that no column can store: {error}; expected numbers, text, bytes, "
                "dates, lists, dicts or NumPy arrays, all values of one type"
            ) from error
    return pa.table(columns)


def check_names(names: Iterable[Any]) -> None:
    """Raise ConfigError if the name of a column is not text, or not UTF-8."""
    for name in names:
        if not isinstance(name, str) or name.encode("utf-8", "replace").decode() != name:
            raise ConfigError(f"the column name {name!r} is not UTF-8 text; rename the column")


def _choose_key(raw: pa.Schema, key: str | None) -> str | None:
    """Return the raw column of the keys: `key`, else one called `key`, else None."""
    if key is None:
        if KEY not in raw.names:
            return None
        key = KEY
    if key not in raw.names:
        raise ConfigError(f"the key column {key!r} does not exist; found {raw.names}")
    key_type = raw.field(key).type
    if not (is_text(key_type) or pa.types.is_integer(sample_type(key_type))):
        raise ConfigError(f"column {key!r} cannot hold keys: its type is {key_type}; expected text or integers")
    return key


def _sample_field(
    raw: pa.Field,
    first: pa.Table | pa.RecordBatch | None,
    images: Collection[str],
    sounds: Collection[str],
    videos: Collection[str],
) -> pa.Field:
    """Return the sample field of a raw column. Media are required, unless a `first` sample has none."""
    field_type = sample_type(raw.type)
    if is_blob(field_type):
        column = None if first is None else first.column(raw.name)
        nullable = raw.nullable and column is not None and column.null_count > 0
        # The first value is read only if the format defines nothing: it may be a sample that does not decode.
        is_defined = any(raw.name in defined for defined in (images, sounds, videos))
        head = None if is_defined or column is None else _first_bytes(column)
        if raw.name in images or looks_like_image(head):
            return image_field(raw.name, nullable=nullable)
        # An MP3 without a tag starts with 11 bits, which other blobs may start with too.
        if raw.name in sounds or (head and head[:1] != b"\xff" and looks_like_audio(head)):
            return audio_field(raw.name, nullable=nullable)
        # Not by the first bytes: a data set whose videos were bytes before would refuse to be continued.
        if raw.name in videos:
            return video_field(raw.name, nullable=nullable)
    return pa.field(raw.name, field_type, nullable=raw.nullable)


def _first_bytes(column: pa.Array | pa.ChunkedArray) -> bytes | None:
    """Return the start of the first value that is not null."""
    # Only the first value is inspected, because the type of a column is fixed before the other values are read.
    chunks = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
    for chunk in chunks:
        for value in decode_column(chunk):
            if value.is_valid:
                head: bytes = value.as_buffer()[:16].to_pybytes()
                return head
    return None


def _convert(batch: pa.RecordBatch, name: str, data_type: pa.DataType) -> pa.Array:
    """Return the raw column `name` as `data_type`. Raise ConfigError, with this name, if that is impossible."""
    if name not in batch.schema.names:
        raise ConfigError(f"column {name!r} is missing; found {batch.schema.names}")
    try:
        column = decode_column(batch.column(name))
        if pa.types.is_floating(column.type) and pa.types.is_integer(data_type):
            # Only labels are converted so; pandas writes NaN for an integer that is missing.
            column = pc.if_else(pc.is_nan(column), pa.scalar(None, column.type), column)
        return cast_column(column, data_type)
    except pa.ArrowException as error:
        raise ConfigError(f"column {name!r} does not convert to {data_type}: {error}") from error
    except ConfigError as error:
        raise ConfigError(f"column {name!r}: {error}") from error


def _to_array(samples: Sequence[Mapping[str, Any]], field: pa.Field) -> pa.Array:
    """Return one column of samples. Raise ValueError, with the name of the column, if a value does not fit."""
    try:
        return to_array([sample.get(field.name) for sample in samples], field.type)
    except MISFITS as error:
        raise ValueError(f"column {field.name!r}: {error}") from error


def _size_of(value: Any) -> int:
    """Return the approximate size of a value in bytes."""
    if isinstance(value, (bytes, str)):
        return len(value)
    if isinstance(value, (list, tuple)):
        # If the first value is a number, all count as numbers of 8 bytes, which needs no loop.
        return 8 * len(value) if value and isinstance(value[0], (int, float)) else sum(map(_size_of, value))
    if isinstance(value, dict):
        return sum(map(_size_of, value.values()))
    return int(getattr(value, "nbytes", 8))


def _final_field(field: pa.Field, reserved: Collection[str]) -> pa.Field:
    """Return a sample field with the name and the integer type that the ingest expects."""
    if field.name in reserved:
        # The ingest adds columns of these names, with what it measures.
        return field.with_name(f"{_SOURCE_PREFIX}{field.name}")
    if field.name == LABEL and pa.types.is_integer(field.type):
        return field.with_type(pa.int32())
    return field
