"""Export format of image folders: unchanged images as `SPLIT/CLASS/KEY.jpg`, other columns in `SPLIT/metadata.jsonl`.

The metadata file has the layout of Hugging Face's image folder: a line of JSON per sample, with `file_name` and the
columns. It is written if there are other columns than image and label, or if a file name differs from its key.
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
from datasvc.printable import count_text
from datasvc.shards.export.destination import Destination, image_extension, safe_part, safe_path, split_extension
from datasvc.shards.export.export_format import (
    ExportFormat,
    ExportUnit,
    WrittenFiles,
    check_images,
    encode_json,
    given_columns,
    has_label,
    is_json,
    refused_column,
    refused_null,
    samples_of,
)
from datasvc.shards.export.records import unit_path
from datasvc.shards.format.schema import IMAGE, KEY, LABEL
from datasvc.shards.versions.dataset import Split

METADATA_FILE: Final = "metadata.jsonl"
FILE_NAME: Final = "file_name"
_SUPPORTED_BY: Final = "parquet, webdataset"
# Files are written in parallel: most of the time is spent waiting for the disk or the store, once per file.
_WRITING_THREADS: Final = 16


class FolderExport(ExportFormat):
    """Writes `SPLIT/CLASS/KEY.jpg` and `SPLIT/metadata.jsonl`; see the module docstring."""

    name: ClassVar[str] = "folder"

    def check(self, split: Split) -> None:
        """Raise ConfigError if there are no images, or for columns that JSON cannot hold."""
        schema = split.table.sample_schema
        check_images(self.name, split)
        for column in given_columns(schema):
            if column.name == FILE_NAME or (column.name != IMAGE and not is_json(column.type)):
                raise refused_column(self.name, column)

    def write(self, unit: ExportUnit, destination: Destination) -> WrittenFiles:
        """Write the images of a unit, and their metadata for `join`. For errors, see `ExportFormat.write`."""
        split_name = safe_part(unit.split.name)
        lines: list[bytes] = []
        size_bytes = 0
        # A unit is plain if its image paths give keys and labels, and there are no other columns. If all units are
        # plain, `join` writes no metadata file.
        is_plain = not _extra_columns(unit.split)
        with ThreadPoolExecutor(_WRITING_THREADS, thread_name_prefix="datasvc-export") as pool:
            for batch in unit.batches():
                samples = list(samples_of(batch))
                files = [_file_name(sample, unit.split) for sample in samples]
                is_plain = is_plain and all(file == sample[KEY] for file, sample in zip(files, samples, strict=True))
                paths = [f"{split_name}/{file}" for file in files]
                # Finish the writes of a batch before the next one is read: they keep the batch in memory.
                size_bytes += sum(pool.map(destination.put, paths, [sample[IMAGE] for sample in samples]))
                lines += map(partial(_metadata_line, split=unit.split), samples, files)
        destination.put(unit_path(unit.split.name, unit.number, "jsonl"), b"".join(lines))
        return WrittenFiles(len(lines), len(lines), size_bytes, {"is_plain": is_plain})

    def join(self, split: Split, written: Sequence[WrittenFiles], destination: Destination) -> WrittenFiles:
        """Write the metadata file of the split, unless the images and their paths already hold all values.

        Raises:
            ConfigError: two samples have the same file name.
            UnavailableError: a store failed, or the disk is full.
        """
        # Check after all units are written, because samples of different shards may have the same file name.
        _check_unique(split, len(written), destination)
        if all(files.about["is_plain"] for files in written):
            return WrittenFiles(0, 0, 0)
        with destination.writing(f"{safe_part(split.name)}/{METADATA_FILE}") as file:
            for number in range(len(written)):
                file.write(destination.storage.read(unit_path(split.name, number, "jsonl")))
            size_bytes = file.tell()
        return WrittenFiles(0, 1, size_bytes)


def _extra_columns(split: Split) -> list[str]:
    """Return the columns that only the metadata file can hold."""
    return [field.name for field in given_columns(split.table.sample_schema) if field.name not in {IMAGE, LABEL}]


def _file_name(sample: Mapping[str, Any], split: Split) -> str:
    """Return the path of a sample's image in the folder of its split. Raise ConfigError for a null."""
    image = sample[IMAGE]
    key: str = sample[KEY]
    if image is None:
        raise refused_null("folder", IMAGE, key, _SUPPORTED_BY)
    folder = ""
    if has_label(split.table.sample_schema):
        name = _class_name(sample, split)
        # Keys of an ingested image folder start with the class, which the path needs only once.
        key, folder = key.removeprefix(f"{name}/"), f"{safe_part(name)}/"
    extension = image_extension(image)
    stem, key_extension = split_extension(key, extension)
    # Keep the spelling of the extension in the key, such as ".JPEG".
    suffix = f".{key_extension or extension}" if extension else ""
    return f"{folder}{safe_path(stem)}{suffix}"


def _class_name(sample: Mapping[str, Any], split: Split) -> str:
    """Return the name of a sample's class, or its label as text if the split has no class names."""
    label = sample[LABEL]
    if label is None:
        raise refused_null("folder", LABEL, sample[KEY], _SUPPORTED_BY)
    if not split.classes:
        return str(label)
    if not 0 <= label < len(split.classes):
        raise ConfigError(
            f"folder cannot hold the label {label} of sample {sample[KEY]!r}: {split} has {len(split.classes)} "
            f"classes; formats that can: {_SUPPORTED_BY}"
        )
    name: str = split.classes[label]
    return name


def _metadata_line(sample: Mapping[str, Any], file: str, *, split: Split) -> bytes:
    """Return the line of a sample in the metadata file; further columns that are null are left out."""
    described = {FILE_NAME: file, KEY: sample[KEY]}
    if has_label(split.table.sample_schema):
        described[LABEL] = _class_name(sample, split) if split.classes else sample[LABEL]
    extras = {name: sample[name] for name in _extra_columns(split) if sample[name] is not None}
    return encode_json({**described, **extras}, sample[KEY]) + b"\n"


def _check_unique(split: Split, num_units: int, destination: Destination) -> None:
    """Raise ConfigError if two samples have the same file name, such as "1" and "1.jpg"."""
    names = _all_names(split, num_units, destination)
    # Compare digests of 16 bytes instead of names, so that all digests of a large split fit into memory.
    digests = np.frombuffer(b"".join(blake3(name.encode()).digest(16) for name in names), "V16")
    ordered = np.sort(digests)
    duplicates = ordered[1:][ordered[1:] == ordered[:-1]]
    if len(duplicates):
        digest = bytes(duplicates[0])
        # Read the names again to find the one with this digest; the first iterator is exhausted.
        names = _all_names(split, num_units, destination)
        name = next(name for name in names if blake3(name.encode()).digest(16) == digest)
        raise ConfigError(
            f"folder cannot hold {split}: {count_text(len(duplicates), 'sample')} would have the file name of "
            "another, such as "
            f"{name!r}; formats that can: {_SUPPORTED_BY}"
        )


def _all_names(split: Split, num_units: int, destination: Destination) -> Iterator[str]:
    """Yield the names of all files in the folder of the split, from the metadata that `write` kept."""
    yield METADATA_FILE  # `join` writes this file last, so it would replace an image of the same name
    for number in range(num_units):
        for line in destination.storage.read(unit_path(split.name, number, "jsonl")).splitlines():
            yield json.loads(line)[FILE_NAME]
