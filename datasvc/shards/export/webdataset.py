"""Export format of WebDataset: one tar per shard, in which the files of a sample are consecutive.

WebDataset takes the part of a file name before the first dot as the key of the sample. Therefore the extension of an
image is removed from the key, and other dots are percent-encoded. If the resulting name differs from the key, the
file `NAME.key.txt` holds the exact key. Each export of a version writes the same bytes.
"""

from __future__ import annotations

import re
import tarfile
from collections.abc import Iterator
from typing import Any, BinaryIO, ClassVar, Final

import pyarrow as pa

from datasvc.shards.audio.audio_file import audio_extension
from datasvc.shards.export.destination import (
    Destination,
    image_extension,
    percent_encoded,
    safe_part,
    safe_path,
    split_extension,
)
from datasvc.shards.export.export_format import (
    ExportFormat,
    ExportUnit,
    WrittenFiles,
    encode_json,
    given_columns,
    is_json,
    is_label,
    refused_column,
)
from datasvc.shards.format.schema import AUDIO, IMAGE, KEY, VIDEO, is_blob, is_text
from datasvc.shards.versions.dataset import Split
from datasvc.shards.video.video_file import video_extension

_BLOCK_BYTES: Final = 512
_RECORD_BYTES: Final = 20 * _BLOCK_BYTES
# The column names that can be extensions: WebDataset converts extensions to lower case, and splits them at dots.
_EXTENSION: Final = re.compile(r"[a-z0-9_-]+")
_DOT: Final = re.compile(r"\.")
# The first of two underscores at the start of a name. It is percent-encoded: readers skip names such as __meta__.
_FIRST_OF_TWO_UNDERSCORES: Final = re.compile(r"^_(?=_)")


class WebDatasetExport(ExportFormat):
    """Writes each unit as one file, `SPLIT-000000.tar`; see the module docstring."""

    name: ClassVar[str] = "webdataset"

    def check(self, split: Split) -> None:
        """Raise ConfigError for columns that neither a file nor JSON can hold."""
        for column in given_columns(split.table.sample_schema):
            if not _is_file(column) and not is_json(column.type):
                raise refused_column(self.name, column)

    def write(self, unit: ExportUnit, destination: Destination) -> WrittenFiles:
        """Write one tar. For errors, see `ExportFormat.write`."""
        columns = given_columns(unit.split.table.sample_schema)
        used_names: set[str] = set()
        with destination.writing(f"{safe_part(unit.split.name)}-{unit.number:06d}.tar") as file:
            tar = _TarWriter(file)
            for sample in unit.samples():
                name = _member_name(sample[KEY], _image_extension(sample))
                while name in used_names:  # "a.jpg" and "a" give the same name
                    name += "%"
                used_names.add(name)
                for extension, content in _members(sample, name, columns):
                    tar.add(f"{name}.{extension}", content)
            tar.close()
        return WrittenFiles(len(used_names), 1, tar.size_bytes)


class _TarWriter:
    """Writer of tars without times, owners or other values that differ between two exports of a version."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.size_bytes = 0

    def add(self, name: str, content: Any) -> None:
        member = tarfile.TarInfo(name)
        member.size, member.mode = len(content), 0o644
        self._write(member.tobuf(tarfile.GNU_FORMAT, "utf-8", "strict"))
        self._write(content)
        self._write(bytes(-len(content) % _BLOCK_BYTES))

    def close(self) -> None:
        self._write(bytes(2 * _BLOCK_BYTES))
        # tar pads a file to whole records of 20 blocks.
        self._write(bytes(-self.size_bytes % _RECORD_BYTES))

    def _write(self, content: Any) -> None:
        self._file.write(content)
        self.size_bytes += len(content)


def _is_file(column: pa.Field) -> bool:
    """Return whether a column is written as a separate file of the sample; other columns share its JSON file."""
    if is_label(column):
        return True
    if not is_blob(column.type) and not is_text(column.type):
        return False
    return _EXTENSION.fullmatch(column.name) is not None


def _image_extension(sample: dict[str, Any]) -> str | None:
    """Return the extension for the column `image`; None if it holds no image of a known format."""
    image = sample.get(IMAGE)
    # A blob is a memoryview here. A column `image` that is not of blobs holds no images.
    return image_extension(image) if isinstance(image, memoryview) else None


def _member_name(key: str, extension: str | None) -> str:
    """Return the part of a sample's file names before the dot; `extension` is that of the sample's image."""
    folder, slash, base = safe_path(split_extension(key, extension)[0]).rpartition("/")
    path = f"{folder}{slash}{_DOT.sub(percent_encoded, base)}"
    return _FIRST_OF_TWO_UNDERSCORES.sub(percent_encoded, path)


def _members(sample: dict[str, Any], name: str, columns: list[pa.Field]) -> Iterator[tuple[str, Any]]:
    """Yield extension and content of each file of a sample; a null column gives no file."""
    num_members = 0
    json_values = {}
    for column in columns:
        value = sample[column.name]
        if not _is_file(column):
            if value is not None:
                json_values[column.name] = value
        elif value is not None:
            yield _file_extension(column, value), _content(value)
            num_members += 1
    if json_values:
        yield "json", encode_json(json_values, sample[KEY])
    # A sample that has no other file would be lost without this one.
    if name != sample[KEY] or not (num_members or json_values):
        yield "key.txt", sample[KEY].encode()


def _file_extension(column: pa.Field, value: Any) -> str:
    """Return the extension from which readers derive the column, such as "jpg", "cls" or "caption.txt"."""
    if is_label(column):
        return "cls"
    if is_text(column.type):
        return f"{column.name}.txt"
    head = bytes(memoryview(value)[:16])
    if column.name == AUDIO:
        extension = audio_extension(head)
    elif column.name == VIDEO:
        extension = video_extension(head)
    else:
        extension = image_extension(value)
    if column.name in {AUDIO, IMAGE, VIDEO} and extension is not None:
        return extension
    return f"{column.name}.{extension or 'bin'}"


def _content(value: Any) -> Any:
    """Return the bytes of a text, a label or a blob."""
    if isinstance(value, str):
        return value.encode()
    return str(value).encode() if isinstance(value, int) else value
