"""A folder of image files, verbatim: `SPLIT/CLASS/KEY.jpg`, and what else is known of them in `SPLIT/metadata.jsonl`.

The metadata are as Hugging Face's image folder wants them, `file_name` and columns; they are there when a sample has
more than its image and label, or a name differs from its key.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, ClassVar, Final

import numpy as np
from blake3 import blake3

from datasvc.errors import ConfigError
from datasvc.shards.export.columns import (
    encode_json,
    given_columns,
    has_images,
    has_label,
    is_json,
    refused_column,
    refused_null,
)
from datasvc.shards.export.destination import Destination
from datasvc.shards.export.export_format import ExportFormat, WrittenFiles
from datasvc.shards.export.names import image_extension, safe_part, safe_path, split_extension
from datasvc.shards.export.progress import unit_path
from datasvc.shards.export.samples import ExportUnit, samples_of
from datasvc.shards.format.schema import IMAGE, KEY, LABEL
from datasvc.shards.versions.dataset import Split

METADATA_FILE: Final = "metadata.jsonl"
FILE_NAME: Final = "file_name"
_ABLE: Final = "parquet, webdataset"
# Waiting for the disk, or for a store, once per file is what takes the time.
_FILES_AT_ONCE: Final = 16


class Folder(ExportFormat):
    """Image files; see the module."""

    name: ClassVar[str] = "folder"

    def check(self, split: Split) -> None:
        """Raise ConfigError without images, or for columns that JSON cannot hold."""
        schema = split.table.sample_schema
        if not has_images(schema):
            raise ConfigError(
                f"folder writes images and {split} has no column {IMAGE!r}; "
                "formats that can: webdataset, parquet, mds, tfrecord"
            )
        for column in given_columns(schema):
            if column.name == FILE_NAME or (column.name != IMAGE and not is_json(column.type)):
                raise refused_column(self.name, column)

    def write(self, unit: ExportUnit, destination: Destination) -> WrittenFiles:
        """Write the images of a shard, and their metadata for `join`. Raises as `ExportFormat.write`."""
        split_name = safe_part(unit.split.name)
        lines: list[bytes] = []
        size_bytes = 0
        is_plain = not _extra_columns(unit.split)
        with ThreadPoolExecutor(_FILES_AT_ONCE, thread_name_prefix="datasvc-export") as pool:
            for batch in unit.batches():
                samples = list(samples_of(batch))
                files = [_file_name(sample, unit.split) for sample in samples]
                is_plain = is_plain and all(file == sample[KEY] for file, sample in zip(files, samples, strict=True))
                paths = [f"{split_name}/{file}" for file in files]
                # All results of a batch before the next: what waits holds a batch's memory.
                size_bytes += sum(pool.map(destination.put, paths, [sample[IMAGE] for sample in samples]))
                lines += map(partial(_metadata_line, split=unit.split), samples, files)
        destination.put(unit_path(unit.split.name, unit.number, "jsonl"), b"".join(lines))
        return WrittenFiles(len(lines), len(lines), size_bytes, {"is_plain": is_plain})

    def join(self, split: Split, written: Sequence[WrittenFiles], destination: Destination) -> WrittenFiles:
        """Write the split's metadata where they say more than the files.

        Raises:
            ConfigError: two samples have one file name.
            UnavailableError: a store failed, or the disk is full.
        """
        _check_unique(split, len(written), destination)
        if all(each.about["is_plain"] for each in written):
            return WrittenFiles(0, 0, 0)
        with destination.writing(f"{safe_part(split.name)}/{METADATA_FILE}") as file:
            for number in range(len(written)):
                file.write(destination.storage.read(unit_path(split.name, number, "jsonl")))
            size_bytes = file.tell()
        return WrittenFiles(0, 1, size_bytes)


def _extra_columns(split: Split) -> list[str]:
    return [field.name for field in given_columns(split.table.sample_schema) if field.name not in {IMAGE, LABEL}]


def _file_name(sample: Mapping[str, Any], split: Split) -> str:
    """Return where a sample's image goes, below its split. Raises ConfigError."""
    image = sample[IMAGE]
    key: str = sample[KEY]
    if image is None:
        raise refused_null("folder", IMAGE, key, _ABLE)
    folder = ""
    if has_label(split.table.sample_schema):
        name = _class_name(sample, split)
        key, folder = key.removeprefix(f"{name}/"), f"{safe_part(name)}/"
    extension = image_extension(image)
    stem, own = split_extension(key, extension)
    return f"{folder}{safe_path(stem)}" + (f".{own or extension}" if extension else "")


def _class_name(sample: Mapping[str, Any], split: Split) -> str:
    label = sample[LABEL]
    if label is None:
        raise refused_null("folder", LABEL, sample[KEY], _ABLE)
    if not split.classes:
        return str(label)
    if not 0 <= label < len(split.classes):
        raise ConfigError(
            f"folder cannot hold the label {label} of sample {sample[KEY]!r}: {split} names {len(split.classes)} "
            f"classes; formats that can: {_ABLE}"
        )
    name: str = split.classes[label]
    return name


def _metadata_line(sample: Mapping[str, Any], file: str, *, split: Split) -> bytes:
    described = {FILE_NAME: file, KEY: sample[KEY]}
    if has_label(split.table.sample_schema):
        described[LABEL] = _class_name(sample, split) if split.classes else sample[LABEL]
    values = {name: sample[name] for name in _extra_columns(split) if name not in described}
    held = {name: value for name, value in values.items() if value is not None}
    return encode_json({**described, **held}, sample[KEY]) + b"\n"


def _check_unique(split: Split, num_units: int, destination: Destination) -> None:
    """Raise ConfigError when two samples have one file name, as "1" and "1.jpg" do."""
    names = _all_names(split, num_units, destination)
    digests = np.frombuffer(b"".join(blake3(name.encode()).digest(16) for name in names), "V16")
    ordered = np.sort(digests)
    twice = ordered[1:][ordered[1:] == ordered[:-1]]
    if len(twice):
        wanted = bytes(twice[0])
        names = _all_names(split, num_units, destination)
        name = next(name for name in names if blake3(name.encode()).digest(16) == wanted)
        raise ConfigError(
            f"folder cannot hold {split}: {len(twice)} samples would get the file name of another, such as {name!r}; "
            f"formats that can: {_ABLE}"
        )


def _all_names(split: Split, num_units: int, destination: Destination) -> Iterator[str]:
    yield METADATA_FILE  # written last: it would replace an image of that name
    for number in range(num_units):
        yield from _names(split, number, destination)


def _names(split: Split, number: int, destination: Destination) -> Iterator[str]:
    for line in destination.storage.read(unit_path(split.name, number, "jsonl")).splitlines():
        yield json.loads(line)[FILE_NAME]
