"""Folders of Hugging Face `datasets` on disk, read without that library.

Two layouts: what `save_to_disk` writes (`state.json` names Arrow streams, `dataset_dict.json` one folder a split),
and what a hub repository holds (Parquet files named by split). Class names come from `dataset_info.json`, or from
the schema's metadata.
"""

from __future__ import annotations

import json
import posixpath
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final

from datasvc.errors import ConfigError, NotFoundError
from datasvc.repository.store.storage import redact_url
from datasvc.shards.sources.common.files import FileReader, SourceFile, list_files
from datasvc.shards.sources.common.options import SourceOptions
from datasvc.shards.sources.common.source import BadSample, SourcePart
from datasvc.shards.sources.common.splits import split_of
from datasvc.shards.sources.common.tables import RawBatch, TableSource
from datasvc.shards.sources.tabular.arrow_files import ArrowFiles, read_arrow
from datasvc.shards.sources.tabular.features import features_in
from datasvc.shards.sources.tabular.parquet import EXTENSIONS, ParquetSource, read_parquet

_DICT, _STATE, _INFO = "dataset_dict.json", "state.json", "dataset_info.json"
_DESCRIPTIONS: Final = frozenset({_DICT, _STATE, _INFO, "dataset_infos.json"})
_HUB_NAME: Final = re.compile(r"([\w.]+)-\d{5,}-of-\d{5,}(?:-[0-9a-f]+)?\.parquet")
_ROW_GROUPS: Final = "row_groups"


@dataclass(frozen=True)
class HuggingFace(TableSource):
    """A listed folder. A sample's key is `FILE#ROW` where no column holds keys."""

    kind: ClassVar[str] = "huggingface"

    @classmethod
    def list(cls, url: str, options: SourceOptions | None = None) -> HuggingFace:
        """List the source.

        Raises:
            NotFoundError: it is no such folder, a file that it names is not there, or no samples are.
            ConfigError: a description does not parse, or splits differ in columns or class names; and as
                `ColumnMap`.
            UnavailableError: the store does not answer.
        """
        options = options or SourceOptions()
        reader = FileReader(url)
        files = {file.name: file for file in list_files(url)}
        saved = _saved_splits(reader, files, options)
        if saved:
            data = {file.name: (split, file) for split, _, of_split in saved for file in of_split}
        else:
            data = {name: (_hub_split(name, options), file) for name, file in files.items() if _is_parquet(file)}
        features = _features(reader, files, [folder for _, folder, _ in saved] or [""])
        if not data:
            raise NotFoundError(
                f"cannot ingest {redact_url(url)} as Hugging Face data: it holds neither {_STATE} or {_DICT} nor "
                f"Parquet files, but {sorted(files)[:10]}"
            )
        ignored = Counter(
            file.extension or "(none)"
            for name, file in files.items()
            if name not in data and posixpath.basename(name) not in _DESCRIPTIONS
        )
        listed = [file for _, file in data.values()]
        table: TableSource = (
            ArrowFiles.of_files(url, listed, ignored, options, features)
            if saved
            else ParquetSource.of_files(url, listed, ignored, options, features)
        )
        parts = [replace(part, split=data[part.where["name"]][0]) for part in table.parts]
        return cls(url, table.schema, table.classes, parts, table.columns, table.ignored)

    def read_raw(self, part: SourcePart) -> Iterator[RawBatch | BadSample]:
        """Yield the samples of one part with raw columns."""
        read = read_parquet if _ROW_GROUPS in part.where else read_arrow
        return read(FileReader(self.url), part)


def _saved_splits(
    reader: FileReader, files: Mapping[str, SourceFile], options: SourceOptions
) -> Sequence[tuple[str, str, Sequence[SourceFile]]]:
    """Return split, folder and files of each data set that `save_to_disk` wrote; none where it did not."""
    if _DICT in files:
        names = _parsed(reader, files[_DICT]).get("splits")
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ConfigError(f"{_DICT} does not list its splits; expected a text such as {{'splits': ['train']}}")
        return [(options.split or name, f"{name}/", _saved_files(reader, files, f"{name}/")) for name in names]
    if _STATE in files:
        split = _parsed(reader, files[_STATE]).get("_split")
        named = options.split or (split if isinstance(split, str) else "train")
        return [(named, "", _saved_files(reader, files, ""))]
    return []


def _saved_files(reader: FileReader, files: Mapping[str, SourceFile], folder: str) -> Sequence[SourceFile]:
    """Return the files that a split's state names, in its order, which is the order of its samples."""
    path = f"{folder}{_STATE}"
    if path not in files:
        raise NotFoundError(f"{path} is not there, though {_DICT} lists the split; copy the whole folder")
    entries = _parsed(reader, files[path]).get("_data_files")
    if not isinstance(entries, list):
        raise ConfigError(f"{path} does not list its data files; was it written by save_to_disk?")
    names = [entry.get("filename") if isinstance(entry, dict) else None for entry in entries]
    lacking = [str(name) for name in names if f"{folder}{name}" not in files]
    if lacking:
        raise NotFoundError(f"{path} names {lacking[:10]} ({len(lacking)} files), which are not there")
    return [files[f"{folder}{name}"] for name in names]


def _is_parquet(file: SourceFile) -> bool:
    return file.extension in EXTENSIONS and file.size_bytes > 0


def _hub_split(name: str, options: SourceOptions) -> str:
    """Return the split of a hub's file: any word may be one, as in `unsupervised-00000-of-00001.parquet`."""
    if options.split is not None:
        return options.split
    match = _HUB_NAME.fullmatch(posixpath.basename(name))
    return match[1] if match else split_of(name)


def _features(reader: FileReader, files: Mapping[str, SourceFile], folders: Sequence[str]) -> Mapping[str, Any]:
    """Return the features that the folders' descriptions agree on; none where they say nothing."""
    found = [
        (folder, features_in(_parsed(reader, files[path])))
        for folder in folders
        if (path := f"{folder}{_INFO}") in files
    ]
    described = [(folder, features) for folder, features in found if features]
    for folder, features in described[1:]:
        if features != described[0][1]:
            raise ConfigError(
                f"{folder}{_INFO} and {described[0][0]}{_INFO} differ in their features; ingest the splits apart"
            )
    return described[0][1] if described else {}


def _parsed(reader: FileReader, file: SourceFile) -> dict[str, Any]:
    try:
        parsed = json.loads(reader.read(file.path))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file.name} is no JSON: {error}; copy the folder again") from error
    if not isinstance(parsed, dict):
        raise ConfigError(f"{file.name} holds no JSON object; copy the folder again")
    return parsed
