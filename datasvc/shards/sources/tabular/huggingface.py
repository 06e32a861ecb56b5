"""Source of folders of the Hugging Face library `datasets`, read without the library.

There are two layouts: that of `save_to_disk` (`state.json` lists Arrow streams, `dataset_dict.json` one folder per
split), and that of a hub repository (Parquet files named by split). Class names come from `dataset_info.json` or
from the metadata of the schema.
"""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final

import pyarrow as pa

from datasvc.errors import ConfigError, NotFoundError
from datasvc.printable import count_text
from datasvc.repository.store.redaction import redact_url
from datasvc.shards.sources.common.files import FileReader
from datasvc.shards.sources.common.listing import SourceFile, list_files
from datasvc.shards.sources.common.options import SourceOptions, split_of
from datasvc.shards.sources.common.source import BadSample, SourcePart
from datasvc.shards.sources.common.tables import RawBatch, TableSource
from datasvc.shards.sources.tabular.arrow_files import ArrowSource, read_arrow
from datasvc.shards.sources.tabular.features import features_in
from datasvc.shards.sources.tabular.parquet import EXTENSIONS, ParquetSource, read_parquet, read_parquet_column

_DICT, _STATE, _INFO = "dataset_dict.json", "state.json", "dataset_info.json"
# Files that describe the data. They are not counted as ignored.
_DESCRIPTIONS: Final = frozenset({_DICT, _STATE, _INFO, "dataset_infos.json"})
_HUB_NAME: Final = re.compile(r"([\w.]+)-\d{5,}-of-\d{5,}(?:-[0-9a-f]+)?\.parquet")
_ROW_GROUPS: Final = "row_groups"  # key of `SourcePart.where` that only parts of Parquet files have


@dataclass(frozen=True, kw_only=True)
class HuggingFaceSource(TableSource):
    """A source of one `datasets` folder. Without a key column, the key of a sample is `FILE#ROW`."""

    kind: ClassVar[str] = "huggingface"

    @classmethod
    def list(cls, url: str, options: SourceOptions | None = None) -> HuggingFaceSource:
        """List the source from its JSON files or its Parquet files' names. For errors, see `FileSource.list`."""
        options = options or SourceOptions()
        reader = FileReader(url)
        listed = list_files(url)
        files = {file.name: file for file in listed}
        # The layout of `save_to_disk` is recognised by its descriptions; without them, Parquet files are used.
        saved = _saved_splits(reader, files, options)
        if saved:
            splits = {file.name: split for split, _, split_files in saved for file in split_files}
        else:
            splits = {
                name: _hub_split(name, options)
                for name, file in files.items()
                if file.extension in EXTENSIONS and file.size_bytes
            }
        # A hub repository has one description, in its root.
        features = _features(reader, files, [folder for _, folder, _ in saved] or [""])
        if not splits:
            raise NotFoundError(
                f"cannot ingest {redact_url(url)} as Hugging Face data: expected {_STATE}, {_DICT} or Parquet files, "
                f"found {sorted(files)[:10]}"
            )
        described = [file for name, file in files.items() if posixpath.basename(name) in _DESCRIPTIONS]
        ignored = listed.unused([*(files[name] for name in splits), *described])
        reader_class: type[ArrowSource | ParquetSource] = ArrowSource if saved else ParquetSource
        table = reader_class.of_files(url, [files[name] for name in splits], ignored, options, features)
        # Replace the splits that `of_files` derived from the file names by those of this layout.
        parts = [replace(part, split=splits[part.where["name"]]) for part in table.parts]
        return cls(
            url=url,
            schema=table.schema,
            classes=table.classes,
            parts=parts,
            columns=table.columns,
            ignored=table.ignored,
        )

    def read_raw(self, part: SourcePart) -> Iterator[RawBatch | BadSample]:
        """Yield the samples of one part with raw columns."""
        read = read_parquet if _ROW_GROUPS in part.where else read_arrow
        return read(FileReader(self.url), part)

    def read_column(self, part: SourcePart, name: str) -> Iterator[pa.Array]:
        """Yield the values of one raw column; the others are not read from Parquet files."""
        if _ROW_GROUPS in part.where:
            return read_parquet_column(FileReader(self.url), part, name)
        return super().read_column(part, name)


def _saved_splits(
    reader: FileReader, files: Mapping[str, SourceFile], options: SourceOptions
) -> Sequence[tuple[str, str, Sequence[SourceFile]]]:
    """Return split, folder and files of each data set of `save_to_disk`; empty for another layout."""
    if _DICT in files:
        names = _parsed(reader, files[_DICT]).get("splits")
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ConfigError(f"{_DICT} does not list its splits; expected text such as {{'splits': ['train']}}")
        return [(options.split or name, f"{name}/", _saved_files(reader, files, f"{name}/")) for name in names]
    if _STATE in files:
        split = _parsed(reader, files[_STATE]).get("_split")
        name = options.split or (split if isinstance(split, str) else "train")
        return [(name, "", _saved_files(reader, files, ""))]
    return []


def _saved_files(reader: FileReader, files: Mapping[str, SourceFile], folder: str) -> Sequence[SourceFile]:
    """Return the files that the state of a split lists, in the listed order, which is the order of the samples."""
    path = f"{folder}{_STATE}"
    if path not in files:
        raise NotFoundError(f"{path} is missing, but {_DICT} lists the split; copy the whole folder")
    entries = _parsed(reader, files[path]).get("_data_files")
    if not isinstance(entries, list):
        raise ConfigError(f"{path} does not list its data files; expected a folder written by save_to_disk")
    names = [entry.get("filename") if isinstance(entry, dict) else None for entry in entries]
    missing = [str(name) for name in names if f"{folder}{name}" not in files]
    if missing:
        raise NotFoundError(
            f"{path} lists {missing[:10]} ({count_text(len(missing), 'file')}), which are missing; copy the "
            "whole folder"
        )
    return [files[f"{folder}{name}"] for name in names]


def _hub_split(name: str, options: SourceOptions) -> str:
    """Return the split of a hub repository's file; a split may be any word: `unsupervised-00000-of-00001.parquet`."""
    if options.split is not None:
        return options.split
    match = _HUB_NAME.fullmatch(posixpath.basename(name))
    return match[1] if match else split_of(name)


def _features(reader: FileReader, files: Mapping[str, SourceFile], folders: Sequence[str]) -> Mapping[str, Any]:
    """Return the features in the folders' descriptions; {} if there are none. Raise ConfigError if they differ."""
    paths = [path for folder in folders if (path := f"{folder}{_INFO}") in files]
    parsed = [(path, features_in(_parsed(reader, files[path]))) for path in paths]
    described = [(path, features) for path, features in parsed if features]
    if not described:
        return {}
    first_path, first = described[0]
    for path, features in described[1:]:
        if features != first:
            raise ConfigError(f"{path} and {first_path} differ in their features; ingest the splits separately")
    return first


def _parsed(reader: FileReader, file: SourceFile) -> dict[str, Any]:
    """Return the JSON object in a file. Raise ConfigError if there is none; see also `FileReader.read`."""
    content = reader.read(file.path)
    try:
        parsed = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file.name} is not JSON: {error}; copy the folder again") from error
    if not isinstance(parsed, dict):
        raise ConfigError(f"{file.name} is not a JSON object; copy the folder again")
    return parsed
