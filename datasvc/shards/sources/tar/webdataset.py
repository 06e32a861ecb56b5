"""Source of WebDataset tars, in which consecutive files with the same key are one sample.

The key of a file is its path up to the first dot of its base name; its field is the rest in lower case: "a/b.seg.png"
is the field "seg.png" of the sample "a/b". Files whose base name has no dot are skipped, as are hidden files, such as
those of macOS, and WebDataset's own `__meta__` files. WebDataset allows the same key in several tars; a data set does
not, so the ingest reports the second sample.

The last extension of a field gives its column:

- Images (jpg, jpeg, png, webp, ...) are image columns. The column `image` is the field whose name is only an image
  extension. Several such fields are one column if no sample has two of them (0.jpg and 1.png). Without such a field,
  a single image field of another name becomes `image`. Other image fields ("seg.png") keep their names.
- A sound (wav, flac, mp3, ogg, opus, ...) is the column `audio`, and a video (mp4, mkv, webm, avi, mov) the column
  `video`, by the same rules. Fields of `SourceOptions.as_bytes` are bytes instead, as other fields are.
- "cls" is an integer; the field with exactly this name is the column `label`.
- "txt", "text" and "json" are text. JSON is not parsed: its structure may differ from sample to sample, while a
  column has one type.
- All others are bytes.

The field "key.txt" is the key: `datasvc export` writes it for keys that cannot be a path. A field called `key`,
`image`, `width`, `height` or `label` gets the prefix "source_" if the data set has another column of this name; so
does one with a name of `audio`, of `video`, and of what is measured of these.
"""

from __future__ import annotations

import importlib
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Final

import pyarrow as pa

from datasvc.errors import BadSampleError, ConfigError, CorruptDataError, MissingPackageError, NotFoundError
from datasvc.extras import explain_missing
from datasvc.printable import count_text
from datasvc.repository.store.redaction import redact_url
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
    is_audio,
    is_video,
    video_field,
)
from datasvc.shards.images.header import EXTENSIONS
from datasvc.shards.sources.common.columns import to_batches
from datasvc.shards.sources.common.file_checks import hidden_part
from datasvc.shards.sources.common.files import FileReader
from datasvc.shards.sources.common.listing import list_files
from datasvc.shards.sources.common.options import SourceOptions
from datasvc.shards.sources.common.source import BadSample, FileSource, SourcePart, file_part
from datasvc.shards.sources.tar.tar import MAX_MEMBER_BYTES, TarMember, TarReader, open_tar
from datasvc.shards.video.video_file import EXTENSIONS as VIDEO_EXTENSIONS
from datasvc.threads import map_in_threads

_TAR_EXTENSIONS: Final = frozenset({".tar", ".tgz"})
# Limits of the samples, bytes and tars of each split that are read to choose the columns.
_FIRST_SAMPLES, _FIRST_BYTES, _FIRST_PARTS = 1000, 32 << 20, 16
_CUTS_AT_ONCE: Final = 8
_MAGIC_RANGE, _MAGIC = (257, 5), b"ustar"
_META: Final = re.compile(r"__[^/]*__(/|$)")
KEY_FIELD: Final = "key.txt"
_IMAGES: Final = frozenset(extension[1:] for extension in EXTENSIONS)  # without the dot
_SOUNDS: Final = frozenset(extension[1:] for extension in AUDIO_EXTENSIONS)
_VIDEOS: Final = frozenset(extension[1:] for extension in VIDEO_EXTENSIONS)
_EXTENSIONS_OF: Final = {IMAGE: _IMAGES, AUDIO: _SOUNDS, VIDEO: _VIDEOS}
_MEDIA: Final[Mapping[str, Callable[..., pa.Field]]] = {IMAGE: image_field, AUDIO: audio_field, VIDEO: video_field}
_INTEGER, _TEXTS = "cls", frozenset({"txt", "text", "json"})
_DIGITS: Final = re.compile(rb"\s*([+-]?[0-9]{1,19})\s*")  # an int64 has at most 19 digits
_SOURCE_PREFIX: Final = "source_"
_NULLABLE_FROM_ONE_IN: Final = 10  # `image` is nullable if at least one in this many first samples lacks it


@dataclass(frozen=True, kw_only=True)
class WebDatasetSource(FileSource):
    """A source of WebDataset tars, each of which is a part.

    Attributes:
        columns: column of each field.
    """

    kind: ClassVar[str] = "webdataset"

    columns: dict[str, str]

    @classmethod
    def list(cls, url: str, options: SourceOptions | None = None) -> WebDatasetSource:
        """List the tars; the first samples of each split determine the columns. For errors, see `FileSource.list`.

        CorruptDataError is raised only if a split has no readable sample; `read` reports other damaged tars.
        """
        options = options or SourceOptions()
        files = list_files(url)
        tars = [file for file in files if file.extension in _TAR_EXTENSIONS]
        if not tars:
            raise NotFoundError(
                f"cannot ingest {redact_url(url)}: no tar among its {count_text(len(files), 'file')}; expected .tar, "
                ".tar.gz, .tgz or .tar.zst"
            )
        parts = [file_part(file, options) for file in tars]
        reader = FileReader(url)
        first_fields: list[list[str]] = []  # field names of each of the first samples
        for split in dict.fromkeys(part.split for part in parts):
            first_fields += _first_fields(reader, [part for part in parts if part.split == split])
        columns, schema = choose_columns(first_fields, options.as_bytes)
        _check_packages(columns, schema)
        ignored = files.unused(tars)
        return cls(url=url, schema=schema, parts=parts, ignored=ignored, columns=columns)

    def read(self, part: SourcePart) -> Iterator[pa.RecordBatch | BadSample]:
        """Yield the samples of one tar; see `StreamedSource.read`."""
        reader, where = FileReader(self.url), part.where
        start, stop = where.get("start", 0), where.get("stop")
        with open_tar(reader, where["path"], start=start, stop=stop) as stream:
            length = None if stop is None else stop - start
            groups = group_by_key(TarReader(stream, reader.location(where["path"]), length))
            yield from to_batches(self.schema, part, ((group.key, group) for group in groups), self._sample)

    def cut(self, part_bytes: int) -> WebDatasetSource:
        """Return a source with large tars divided into parts of whole samples, of `part_bytes` or one sample more.

        The headers of these tars are read, and of remote tars all bytes. A tar that is compressed or damaged, or has
        a header that holds for all its members, stays one part. Raises NotFoundError or UnavailableError.
        """
        reader = FileReader(self.url)
        parts = map_in_threads(lambda part: _cut(reader, part, part_bytes), self.parts, _CUTS_AT_ONCE)
        return replace(self, parts=[piece for pieces in parts for piece in pieces])

    def _sample(self, key: str, group: Group) -> dict[str, Any]:
        """Return a sample by column, from the files of one key. Raise BadSampleError if they do not fit."""
        if group.problem is not None:
            raise BadSampleError(group.problem)
        sample: dict[str, Any] = {KEY: key}
        for name, content in group.contents.items():
            if name == KEY_FIELD:
                sample[KEY] = field_value(name, content)
                continue
            column = self.columns.get(name)
            if column is None:
                raise BadSampleError(
                    f"its field {name!r} is in none of the first samples, which determine the columns; put a sample "
                    "with it into the first tar, or ingest the tars that contain it as another data set"
                )
            if column in sample:
                raise BadSampleError(f"two of its fields {sorted(group.contents)} would be the column {column!r}")
            sample[column] = field_value(name, content)
        for required in self.schema:
            if not required.nullable and required.name not in sample:
                raise BadSampleError(f"it has no {required.name}; its fields are {sorted(group.contents)}")
        return sample


def _cut(reader: FileReader, part: SourcePart, part_bytes: int) -> Sequence[SourcePart]:
    """Return the parts of a tar; see `WebDatasetSource.cut`."""
    path = part.where["path"]
    # Only a tar that is not compressed has this text in its first header.
    if part.size_bytes <= part_bytes or reader.read_range(path, *_MAGIC_RANGE) != _MAGIC:
        return [part]
    cuts = [0]
    with open_tar(reader, path) as stream:
        tar = TarReader(stream, reader.location(path))
        try:
            for group in group_by_key(tar, with_contents=False):
                if group.start - cuts[-1] >= part_bytes:
                    cuts.append(group.start)
        except CorruptDataError:
            return [part]
    if tar.has_global_header or len(cuts) == 1:
        return [part]
    # The last part is read to the end of the tar, with its end mark.
    stops = [*cuts[1:], None]
    return [
        replace(
            part,
            name=f"{part.name}#{start}",
            size_bytes=(part.size_bytes if stop is None else stop) - start,
            where={**part.where, "start": start, "stop": stop},
        )
        for start, stop in zip(cuts, stops, strict=True)
    ]


@dataclass
class Group:
    """The files of one sample, as `group_by_key` collects them, in the order of the tar.

    `start` is the offset of its first header in the tar. `problem` is the reason why it is not a valid sample, and
    then `contents` is empty.
    """

    key: str
    start: int = 0
    contents: dict[str, bytes] = field(default_factory=dict)
    size_bytes: int = 0
    problem: str | None = None


def group_by_key(tar: TarReader, *, with_contents: bool = True) -> Iterator[Group]:
    """Yield the samples of a tar, one at a time. Without `with_contents`, contents are empty, and skipped.

    Raises:
        CorruptDataError: see `TarReader`; the message names the incomplete sample, which is not yielded.
    """
    group: Group | None = None
    try:
        for member in tar:
            parsed = split_name(member.name)
            if parsed is None:
                continue
            key, name = parsed
            if group is None or key != group.key:
                if group is not None:
                    yield group
                group = Group(key, member.start)
            # After the first problem the sample is left out, so its other files are not read.
            group.problem = group.problem or _problem(group, member, name)
            group.size_bytes += member.size_bytes
            if group.problem is None:
                group.contents[name] = tar.read(member) if with_contents else b""
            else:
                group.contents.clear()
    except CorruptDataError as error:
        lost = f"; sample {group.key!r} may be incomplete and is left out" if group is not None else ""
        raise CorruptDataError(f"{error}{lost}") from error
    if group is not None:
        yield group


def split_name(path: str) -> tuple[str, str] | None:
    """Return key and field of a file; None if WebDataset skips it."""
    folder, slash, base = path.rpartition("/")
    stem, dot, extension = base.partition(".")
    if not stem or not dot or _META.match(path) or hidden_part(path) is not None:
        return None
    return f"{folder}{slash}{stem}", extension.lower()


def _problem(group: Group, member: TarMember, name: str) -> str | None:
    """Return why `member` must not become the field `name` of the group; None if it may."""
    if member.problem is not None:
        return f"{member.name} {member.problem}"
    if not name:
        return f"{member.name} has no extension"
    if name in group.contents:
        return f"its field {name!r} occurs twice"
    if group.size_bytes + member.size_bytes > MAX_MEMBER_BYTES:
        return f"with {member.name} it is larger than {MAX_MEMBER_BYTES} bytes"
    return None


def _first_fields(reader: FileReader, parts: Sequence[SourcePart]) -> list[list[str]]:
    """Return the field names of each of the first samples of a split, from its `parts`.

    Raise CorruptDataError for the first damaged tar if there is no sample; NotFoundError if no tar is damaged either.
    """
    samples: list[list[str]] = []
    size_bytes, first_error = 0, None
    for number, part in enumerate(parts):
        # These bounds keep the listing fast. They count only after a sample is found: without one there is no column.
        is_enough = len(samples) >= _FIRST_SAMPLES or size_bytes >= _FIRST_BYTES or number >= _FIRST_PARTS
        if samples and is_enough:
            break
        with open_tar(reader, part.where["path"]) as stream:
            try:
                for group in group_by_key(
                    TarReader(stream, reader.location(part.where["path"])), with_contents=False
                ):
                    if group.problem is None:
                        samples.append(list(group.contents))
                    size_bytes += group.size_bytes
                    # The limit in bytes ends a tar only after a sample: a tar of bad samples is read to its end.
                    if len(samples) >= _FIRST_SAMPLES or (samples and size_bytes >= _FIRST_BYTES):
                        break
            except CorruptDataError as error:
                # `read` reports the damage if another tar has samples.
                first_error = first_error or error
    if not samples and first_error is not None:
        raise first_error
    if not samples:
        raise NotFoundError(
            f"no sample in {parts[0].name} ({len(parts)} tars); expected files with a key and an extension, "
            "such as 0001.jpg and 0001.cls"
        )
    return samples


def _check_packages(columns: Mapping[str, str], schema: pa.Schema) -> None:
    """Raise MissingPackageError if a sound or video cannot be checked: before the ingest reads its first sample."""
    for name, column in columns.items():
        if column not in schema.names or not (is_audio(schema.field(column)) or is_video(schema.field(column))):
            continue
        try:
            with explain_missing(f"its field {name!r}"):
                importlib.import_module("soundfile" if is_audio(schema.field(column)) else "av")
        except MissingPackageError as error:
            raise MissingPackageError(
                f"{error}; to keep the field as bytes without a check, give --as-bytes {name} (as_bytes=)",
                name=error.name,
            ) from error


def choose_columns(
    samples: Sequence[Collection[str]], as_bytes: Collection[str] = ()
) -> tuple[dict[str, str], pa.Schema]:
    """Return the column of each field, and the schema, from the field names of each of the first samples.

    A field may be absent in later samples, except an image field that all of `samples` have. The column `image` is
    nullable only if at least one sample in ten lacks it: otherwise a sample without an image is a bad sample. The
    fields `as_bytes` are bytes, whatever their extensions.
    """
    counts = Counter(name for names in samples for name in names if name != KEY_FIELD)  # number of samples by field
    unknown = sorted({*as_bytes} - counts.keys())
    if unknown:
        raise ConfigError(
            f"--as-bytes (as_bytes=) has {unknown}; the fields of the first samples are {sorted(counts)}"
        )
    main = {  # the fields of the columns `image`, `audio` and `video`
        column: _main_fields(
            samples,
            [name for name in counts if _last(name) in extensions and name not in as_bytes],
            extensions - {*as_bytes},
        )
        for column, extensions in _EXTENSIONS_OF.items()
    }
    # A field must not get the name of a column that loaders read as something else.
    taken = {KEY}
    for column, names in main.items():
        if names:
            taken |= {column, *added_columns(_MEDIA[column](column))}
    if _INTEGER in counts:
        taken.add(LABEL)
    columns = {name: f"{_SOURCE_PREFIX}{name}" if name in taken else name for name in counts}
    for column, names in main.items():
        columns |= dict.fromkeys(names, column)
    if _INTEGER in counts:
        columns[_INTEGER] = LABEL
    fields = {KEY: pa.field(KEY, pa.string(), nullable=False)}
    for name, column in columns.items():
        if column in main:
            # No sample has two of these fields, so each field counts other samples.
            num_without = len(samples) - sum(counts[each] for each in main[column])
            nullable = num_without * _NULLABLE_FROM_ONE_IN >= len(samples)
        else:
            nullable = counts[name] < len(samples)
        fields[column] = (
            pa.field(column, pa.large_binary()) if name in as_bytes else _field(name, column, nullable=nullable)
        )
    return columns, pa.schema(list(fields.values()))


def field_value(name: str, content: bytes) -> bytes | str | int:
    """Return the content of the field `name` as a value of its column; raise BadSampleError if it is not valid."""
    last = _last(name)
    if last == _INTEGER:
        digits = _DIGITS.fullmatch(content)
        if digits is None:
            raise BadSampleError(f"its field {name!r} is not an integer: {content[:40]!r}")
        return int(digits[1])
    if last in _TEXTS:
        try:
            return content.decode()
        except UnicodeDecodeError as error:
            raise BadSampleError(f"its field {name!r} is not UTF-8: {error}") from error
    return content


def _main_fields(
    samples: Sequence[Collection[str]], fields: Sequence[str], extensions: Collection[str]
) -> Sequence[str]:
    """Return the fields that become `image`, `audio` or `video`; they may include fields that no sample has yet."""
    extension_only = [name for name in fields if "." not in name]
    if not extension_only:
        return fields if len(fields) == 1 else []
    # Two of these fields in one sample cannot both be the column.
    if len(extension_only) > 1 and any(sum(name in extension_only for name in names) > 1 for names in samples):
        return []
    return sorted(extensions)  # all of them, because later samples may have another one


def _field(name: str, column: str, *, nullable: bool) -> pa.Field:
    """Return the `column` for the field `name`. `nullable` is for these media: all others are nullable."""
    last = _last(name)
    for media, extensions in _EXTENSIONS_OF.items():
        if last in extensions:
            return _MEDIA[media](column, nullable=nullable)
    if last == _INTEGER:
        return pa.field(column, pa.int32() if column == LABEL else pa.int64())
    return pa.field(column, pa.string() if last in _TEXTS else pa.large_binary())


def _last(name: str) -> str:
    """Return the last extension in the name of a field: "png" for "seg.png"."""
    return name.rpartition(".")[2]
