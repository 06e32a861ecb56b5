"""Source of images or sounds listed in a manifest: a CSV, JSON lines or Parquet file.

All files in the manifest must be below the source. Other files below the source are counted and left out.
"""

from __future__ import annotations

import posixpath
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar, Final

import pyarrow as pa

from datasvc.errors import ConfigError, NotFoundError
from datasvc.repository.store.redaction import redact_url
from datasvc.repository.store.storage import resolve_url
from datasvc.shards.audio.audio_file import EXTENSIONS as AUDIO_EXTENSIONS
from datasvc.shards.format.schema import (
    AUDIO,
    IMAGE,
    KEY,
    LABEL,
    VIDEO,
    added_columns,
    audio_field,
    image_field,
    video_field,
)
from datasvc.shards.sources.common.column_types import cast_column, is_text, sample_type
from datasvc.shards.sources.common.listing import extension_of, find_below
from datasvc.shards.sources.common.options import DEFAULT_SPLIT, SPLIT_NAMES, SourceOptions
from datasvc.shards.sources.common.source import BadSample, ListedFile, ListedSource
from datasvc.shards.sources.common.tables import TableSource
from datasvc.shards.sources.tabular.csv_files import EXTENSIONS as CSV_EXTENSIONS
from datasvc.shards.sources.tabular.csv_files import CsvSource
from datasvc.shards.sources.tabular.json_lines import EXTENSIONS as JSON_EXTENSIONS
from datasvc.shards.sources.tabular.json_lines import JsonLinesSource
from datasvc.shards.sources.tabular.parquet import EXTENSIONS as PARQUET_EXTENSIONS
from datasvc.shards.sources.tabular.parquet import ParquetSource
from datasvc.shards.video.video_file import EXTENSIONS as VIDEO_EXTENSIONS

_UNLISTED: Final = "not in the manifest"
_MAX_SHOWN_FILES: Final = 10
FILE_COLUMNS: Final = ("file", "path", "filename", "file_name", "image", "audio", "audio_filepath", "video")
LABEL_COLUMNS: Final = ("label", "class")
SPLIT_COLUMN: Final = "split"
_MAX_LABEL: Final = (1 << 31) - 1


@dataclass(frozen=True)
class ManifestSource(ListedSource):
    """A listed folder with a manifest; `schema` has the other columns of the manifest too."""

    # A manifest is only an option of an image folder, so log entries name the format of the folder.
    kind: ClassVar[str] = "image-folder"

    url: str
    schema: pa.Schema
    splits: dict[str, list[ListedFile]]
    classes: tuple[str, ...]
    ignored: Counter[str]
    has_keys: bool

    @property
    def keys_are_places(self) -> bool:
        """Whether keys are paths: true unless the manifest has a column of keys."""
        return not self.has_keys

    @classmethod
    def list(cls, url: str, options: SourceOptions | None = None) -> ManifestSource:
        """List the source; `options.manifest` is required.

        Raises:
            NotFoundError: the folder, the manifest, or files that it lists are missing.
            ConfigError: the manifest has no column of files; a line does not parse, repeats a file, or lists a file
                outside the source; labels mix names and integers; or a link leads out of the source.
            UnavailableError: the store does not respond.
        """
        options = options or SourceOptions()
        if options.manifest is None:
            raise ConfigError("no manifest is given; expected the URL of a CSV, JSON lines or Parquet file")
        manifest = ManifestTable.read(options)
        files_below, root, _ = find_below(url, with_hidden=True)  # a manifest may list them
        names = _match_unicode_forms(_file_names(manifest), files_below)
        _check_exist(names, files_below, url)
        labels, classes = manifest.labels()
        keys = names if manifest.key is None else manifest.texts(manifest.key)
        splits = _splits(names, manifest, options)
        extras = [manifest.values(name) for name in manifest.extras]
        rows = zip(names, keys, splits, labels, *extras, strict=True)
        files_by_split: dict[str, list[ListedFile]] = {}
        for name, key, split, label, *values in rows:
            source_file = files_below[name]
            file = ListedFile(key, source_file.path, source_file.size_bytes, label, source_file.stamp, tuple(values))
            files_by_split.setdefault(split, []).append(file)
        for files in files_by_split.values():
            files.sort(key=lambda file: file.key)
        _check_keys(files_by_split)
        # The manifest itself is not counted.
        own, unlisted = resolve_url(options.manifest)[1], files_below.keys() - set(names)
        num_unlisted = sum(f"{root}/{name}" != own for name in unlisted)
        ignored = Counter({_UNLISTED: num_unlisted} if num_unlisted else {})
        chosen, media = _choose_media(names[0])
        return chosen(url, manifest.schema(labels, media), files_by_split, classes, ignored, manifest.key is not None)


@dataclass(frozen=True)
class AudioManifestSource(ManifestSource):
    """A manifest whose first file is a sound by its extension."""

    kind: ClassVar[str] = "audio-folder"


@dataclass(frozen=True)
class VideoManifestSource(ManifestSource):
    """A manifest whose first file is a video by its extension."""

    kind: ClassVar[str] = "video-folder"


def _choose_media(name: str) -> tuple[type[ManifestSource], pa.Field]:
    """Return the source of a manifest, and the column that has its files, by the name of the first file."""
    if extension_of(name) in AUDIO_EXTENSIONS:
        return AudioManifestSource, audio_field(AUDIO)
    if extension_of(name) in VIDEO_EXTENSIONS:
        return VideoManifestSource, video_field(VIDEO)
    return ManifestSource, image_field(IMAGE)


def _file_names(manifest: ManifestTable) -> list[str]:
    """Return the paths in the manifest, relative to the source. Raise ConfigError if one is invalid or repeated."""
    index_of_name: dict[str, int] = {}
    for index, path in enumerate(manifest.texts(manifest.file)):
        name = posixpath.normpath(path)
        if path.startswith("/") or "://" in path or ".." in path.split("/"):
            raise ConfigError(
                f"{manifest.line(index)} lists {path!r}; expected a path below the source, without '..'"
            )
        if name in index_of_name:
            raise ConfigError(
                f"{manifest.line(index)} lists {name!r} again, after {manifest.line(index_of_name[name])}; "
                "remove one of them"
            )
        index_of_name[name] = index
    return [*index_of_name]


def _match_unicode_forms(names: Sequence[str], files: Mapping[str, Any]) -> list[str]:
    """Return the names, where a file is missing that of the file with the same name in another Unicode form."""
    # A Mac stores "é" in the name of a file as two characters (NFD), while a manifest usually has one (NFC).
    if all(name in files for name in names):
        return list(names)
    forms: dict[str, list[str]] = {}
    for name in files:
        forms.setdefault(unicodedata.normalize("NFC", name), []).append(name)
    listed = set(names)  # a file that the manifest lists as it is has its own sample
    free = {form: list(set(found) - listed) for form, found in forms.items() if len(found) == 1}
    found_names = []
    for name in names:
        others = [] if name in files else free.get(unicodedata.normalize("NFC", name), [])
        found_names.append(others.pop() if others else name)
    return found_names


def _check_exist(names: Sequence[str], files: Mapping[str, Any], url: str) -> None:
    """Raise NotFoundError if the manifest lists a file that is not below the source."""
    missing = [name for name in names if name not in files]
    if missing:
        more = f" and {len(missing) - _MAX_SHOWN_FILES} more" if len(missing) > _MAX_SHOWN_FILES else ""
        raise NotFoundError(
            f"{len(missing)} of {len(names)} files in the manifest are not below {redact_url(url)}: "
            f"{', '.join(missing[:_MAX_SHOWN_FILES])}{more}; add them, or remove their lines"
        )


def _splits(names: Sequence[str], manifest: ManifestTable, options: SourceOptions) -> list[str]:
    """Return the split of each file: from the options, else the manifest, else the name of its top folder."""
    if options.split is not None:
        return [options.split] * len(names)
    if manifest.split is not None:
        return [split.lower() for split in manifest.texts(manifest.split)]
    top_folders = [name.partition("/")[0].lower() if "/" in name else "" for name in names]
    return [top if top in SPLIT_NAMES else DEFAULT_SPLIT for top in top_folders]


def _check_keys(splits: Mapping[str, Sequence[ListedFile]]) -> None:
    """Raise ConfigError if two files of a split have the same key. The files must be sorted by key."""
    for split, files in splits.items():
        for previous, file in pairwise(files):
            if previous.key == file.key:
                raise ConfigError(
                    f"the key {file.key!r} occurs twice in split {split!r}; give each sample its own key"
                )


# The columns of files, keys, labels and splits are found by their names.


@dataclass(frozen=True)
class ManifestTable:
    """The columns of a manifest, found by their names and converted to the types that samples have.

    `location` is its URL for messages. A CSV file has a header line and no types.
    """

    table: pa.Table
    location: str
    file: str
    key: str | None
    label: str | None
    split: str | None
    extras: list[str]
    is_csv: bool

    @classmethod
    def read(cls, options: SourceOptions) -> ManifestTable:
        """Read the CSV, JSON lines or Parquet file `options.manifest`.

        Raises:
            NotFoundError: the manifest does not exist or is empty.
            ConfigError: a line cannot be parsed, no column has file names, or the column `key` or `label` is missing.
            UnavailableError: the store does not respond.
        """
        assert options.manifest is not None
        location, key, label = redact_url(options.manifest), options.key, options.label
        table = _read_columns(options.manifest, location, options)
        names = table.column_names
        file = next((name for name in FILE_COLUMNS if name in names), None)
        if file is None:
            raise ConfigError(f"{location} has no column of files: expected one of {FILE_COLUMNS}; found {names}")
        key = key or (KEY if KEY in names else None)
        if key is not None and key not in names:
            raise ConfigError(f"{location} has no key column {key!r}; found {names}")
        if label is not None and label not in names:
            raise ConfigError(f"{location} has no label column {label!r}; found {names}")
        label = label or next((name for name in LABEL_COLUMNS if name in names and name != key), None)
        split = SPLIT_COLUMN if SPLIT_COLUMN in names else None
        extras = [name for name in names if name not in (file, key, label, split)]
        return cls(table, location, file, key, label, split, extras, extension_of(location) in CSV_EXTENSIONS)

    def line(self, index: int) -> str:
        """Return the position of a sample in the manifest, for messages."""
        return f"line {index + 1 + self.is_csv} of {self.location}"

    def texts(self, name: str) -> list[str]:
        """Return the values of a column of text or integers, as text. Raise ConfigError if one is empty."""
        column = self.table.column(name)
        if not (is_text(column.type) or pa.types.is_integer(column.type)):
            raise ConfigError(
                f"column {name!r} of {self.location} has the type {column.type}; expected text or integers"
            )
        values: list[Any] = column.cast(pa.string()).to_pylist()
        for index, value in enumerate(values):
            if not value:
                raise ConfigError(f"column {name!r} is empty in {self.line(index)}; fill it, or remove the line")
        return values

    def schema(self, labels: Sequence[int | None], media: pa.Field) -> pa.Schema:
        """Return the columns of the samples: `media` has the files; `label` is nullable if `labels` has None."""
        fields = [pa.field(KEY, pa.string(), nullable=False), media]
        # Columns that the source or the ingest makes; an extra column of such a name gets the prefix `source_`.
        reserved = {KEY, LABEL, media.name, *added_columns(media)}
        if self.label is not None:
            fields.append(pa.field(LABEL, pa.int32(), nullable=None in labels))
        for name in self.extras:
            column = f"source_{name}" if name in reserved else name
            fields.append(pa.field(column, self.table.schema.field(name).type))
        names = [field.name for field in fields]
        if len(set(names)) < len(names):
            raise ConfigError(f"the columns of {self.location} would be called {names}; rename the duplicates")
        return pa.schema(fields)

    def labels(self) -> tuple[list[int | None], tuple[str, ...]]:
        """Return the label of each sample (None without one), and the sorted class names (none for integers).

        Raises:
            ConfigError: labels are neither class names nor integers from 0, or a CSV file mixes the two.
        """
        if self.label is None:
            return [None] * self.table.num_rows, ()
        column = self.table.column(self.label)
        if pa.types.is_floating(column.type):
            try:
                column = column.cast(pa.int64())  # pandas writes integers with missing values as floats
            except pa.ArrowInvalid as error:
                raise ConfigError(f"column {self.label!r} of {self.location} holds no labels: {error}") from error
        values = column.to_pylist()
        if pa.types.is_integer(column.type):
            for index, value in enumerate(values):
                if value is not None and not 0 <= value <= _MAX_LABEL:
                    raise ConfigError(
                        f"{self.line(index)} has the label {value}; expected 0 to {_MAX_LABEL}, or an empty value "
                        "for a sample that has no class"
                    )
            return values, ()
        if not is_text(column.type):
            raise ConfigError(
                f"column {self.label!r} of {self.location} has the type {column.type}; expected class names "
                "or integers"
            )
        class_names = [value or None for value in values]  # an empty text means no class
        # A CSV file has no types, so a column that mixes integers and names is read as text, without an error.
        if self.is_csv:
            _check_unmixed(class_names, self)
        classes = sorted({name for name in class_names if name is not None})
        label_of_class: dict[str | None, int | None] = {name: label for label, name in enumerate(classes)}
        return [label_of_class.get(name) for name in class_names], tuple(classes)

    def values(self, name: str) -> list[Any]:
        """Return the values of a column as Python values from which Arrow can build the same column again."""
        column = self.table.column(name)
        # Python's types of these values cannot hold nanoseconds. Return integers, which Arrow can convert back.
        checks = (pa.types.is_timestamp, pa.types.is_duration, pa.types.is_time64)
        if any(check(column.type) for check in checks):
            column = column.cast(pa.int64())
        values: list[Any] = column.to_pylist()
        return values


def _check_unmixed(names: Sequence[str | None], table: ManifestTable) -> None:
    """Raise ConfigError if some labels look like integers and others do not."""
    filled = [(index, name) for index, name in enumerate(names) if name is not None]
    integers = [(index, name) for index, name in filled if name.lstrip("-").isdecimal()]
    others = [(index, name) for index, name in filled if not name.lstrip("-").isdecimal()]
    if integers and others:
        (integer_index, integer), (other_index, other) = integers[0], others[0]
        raise ConfigError(
            f"labels mix integers and names: {integer!r} in {table.line(integer_index)}, "
            f"{other!r} in {table.line(other_index)}; use one or the other"
        )


def _read_columns(url: str, location: str, options: SourceOptions) -> pa.Table:
    """Return the columns of a manifest, with the types that samples have. For errors, see `ManifestTable.read`."""
    extension = extension_of(location)
    source: TableSource
    if extension in CSV_EXTENSIONS:
        # The columns of files, splits and keys are read as text, even if all of their values look like numbers.
        source = CsvSource.list(url, texts=[*FILE_COLUMNS, SPLIT_COLUMN, options.key or KEY, *options.as_text])
    elif extension in JSON_EXTENSIONS:
        source = JsonLinesSource.list(url)
    elif extension in PARQUET_EXTENSIONS:
        source = ParquetSource.list(url)
    else:
        raise ConfigError(f"{location} is not a manifest by its name; expected .csv, .tsv, .jsonl or .parquet")
    batches = []
    for part in source.parts:
        for raw in source.read_raw(part):
            if isinstance(raw, BadSample):
                raise ConfigError(f"{location}: {raw.key}: {raw.reason}; repair this line")
            batches.append(raw.batch)
    table = pa.Table.from_batches(batches)
    fields = [field.with_type(sample_type(field.type)).remove_metadata() for field in table.schema]
    columns = [
        pa.chunked_array([cast_column(chunk, field.type) for chunk in column.chunks], field.type)
        for column, field in zip(table.columns, fields, strict=True)
    ]
    return pa.Table.from_arrays(columns, schema=pa.schema(fields))
