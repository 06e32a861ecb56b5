"""Choose the source class for the URL of an ingest: by `--format`, or else by the names of the files there."""

from __future__ import annotations

import importlib
import os
from collections import Counter
from typing import Any, Final, cast

from fsspec import AbstractFileSystem
from fsspec.implementations.local import LocalFileSystem

from datasvc.errors import ConfigError, NotFoundError
from datasvc.repository.store.retries import map_exceptions
from datasvc.repository.store.storage import redact_url, resolve_url
from datasvc.shards.images.header import EXTENSIONS as IMAGES
from datasvc.shards.sources.common.files import expand_braces, is_marker
from datasvc.shards.sources.common.options import SourceOptions
from datasvc.shards.sources.common.source import Source
from datasvc.shards.sources.common.streams import COMPRESSIONS

# A class is imported when it is chosen, so that an image folder needs neither tokenizers nor lmdb.
_CLASSES: Final = {
    "image-folder": "images.image_folder.ImageFolderSource",
    "manifest": "images.manifest.ManifestSource",
    "imagenet": "images.imagenet.ImageNetSource",
    "webdataset": "tar.webdataset.WebDatasetSource",
    "parquet": "tabular.parquet.ParquetSource",
    "arrow": "tabular.arrow_files.ArrowSource",
    "csv": "tabular.csv_files.CsvSource",
    "json-lines": "tabular.json_lines.JsonLinesSource",
    "huggingface": "tabular.huggingface.HuggingFaceSource",
    "lmdb": "records.lmdb_database.LmdbSource",
    "tfrecord": "records.tfrecord.TfRecordSource",
    "mds": "mds.mds.MdsSource",
    "numpy": "arrays.numpy_files.NumpySource",
    "tokens": "text.tokens.TokenSource",
}
FORMATS: Final = tuple(_CLASSES)
_CHOOSE_FORMAT: Final = f"choose it with --format: {', '.join(FORMATS)}"
_EXTENSIONS: Final = {
    "webdataset": (".tar", ".tgz"),
    "parquet": (".parquet", ".pq"),
    "arrow": (".arrow", ".arrows", ".feather", ".ipc"),
    "csv": (".csv", ".tsv"),
    "json-lines": (".jsonl", ".ndjson", ".json"),
    "lmdb": (".mdb", ".lmdb"),
    "tfrecord": (".tfrecord", ".tfrecords"),
    "numpy": (".npy", ".npz"),
    "tokens": (".txt",),
    "image-folder": tuple(IMAGES),
}
_BY_EXTENSION: Final = {extension: kind for kind, extensions in _EXTENSIONS.items() for extension in extensions}
# Files that identify the format of a folder, whatever other files it contains.
_BY_NAME: Final = {
    "dataset_dict.json": "huggingface",
    "state.json": "huggingface",
    "dataset_info.json": "huggingface",
    "data.mdb": "lmdb",
    "index.json": "mds",
}
_IMAGENET_TARS: Final = frozenset({"ILSVRC2012_img_train.tar", "ILSVRC2012_img_val.tar"})
# The summary that `datasvc export` writes into the folder of the exported files.
_EXPORT_SUMMARY: Final = "datasvc-export.json"
_MAX_SCANNED_FILES: Final = 1000


def open_source(url: str, options: SourceOptions | None = None) -> Source:
    """Return the source at `url`, with its files listed.

    Raises:
        ConfigError: the format is unknown or cannot be detected; or see the `list` method of the source class.
        NotFoundError: there are no files at `url`.
        UnavailableError: the store does not respond.
    """
    options = options or SourceOptions()
    kind = options.format or choose_format(url, options)
    # An option may select another reader of the same files.
    if kind == "image-folder" and options.manifest is not None:
        kind = "manifest"
    if kind == "json-lines" and options.tokenizer is not None:
        kind = "tokens"
    if kind not in _CLASSES:
        raise ConfigError(f"format {kind!r} is unknown; expected one of {', '.join(FORMATS)}")
    module, _, name = _CLASSES[kind].rpartition(".")
    source_class: Any = getattr(importlib.import_module(f"datasvc.shards.sources.{module}"), name)
    return cast("Source", source_class.list(url, options))


def choose_format(url: str, options: SourceOptions) -> str:
    """Return the format of the files at `url`. For errors, see `open_source`."""
    if options.manifest is not None:
        return "manifest"
    first = expand_braces(url)[0]
    format_of_name = _by_file_name(first)
    if format_of_name is not None:
        return format_of_name
    file_system, root = resolve_url(first)
    with map_exceptions("list", redact_url(url)):
        if file_system.isfile(root):
            raise ConfigError(f"cannot detect the format of {redact_url(url)} from its name; {_CHOOSE_FORMAT}")
        names = _scan_names(file_system, root)
        is_folder = bool(names) or file_system.isdir(root)
    if not names:
        problem = "it is empty" if is_folder else "there is no such folder"
        raise NotFoundError(f"cannot ingest {redact_url(url)}: {problem}")
    return _by_all_names(names, url)


def _by_all_names(names: list[str], url: str) -> str:
    """Return the format of a folder that holds files of these names. Raise ConfigError if the format is unclear."""
    unique_names = set(names)
    if unique_names & _IMAGENET_TARS:
        return "imagenet"
    for name, kind in _BY_NAME.items():
        if name in unique_names:
            return kind
    kinds = Counter(kind for kind in map(_by_file_name, names) if kind is not None)
    # Image folders often hold notes and lists too, so a single image decides.
    if len(kinds) == 1 or "image-folder" in kinds:
        return "image-folder" if "image-folder" in kinds else next(iter(kinds))
    counts = ", ".join(f"{count} of {kind}" for kind, count in kinds.most_common()) or "of no supported format"
    raise ConfigError(f"cannot detect the format of {redact_url(url)}: its files are {counts}; {_CHOOSE_FORMAT}")


def _by_file_name(name: str) -> str | None:
    """Return the format that the name of a file indicates; None if it indicates none."""
    file_name = os.path.basename(name.rstrip("/"))
    if file_name in _IMAGENET_TARS:
        return "imagenet"
    base, last = os.path.splitext(file_name)
    if last.lower() in COMPRESSIONS:
        base, last = os.path.splitext(base)
    if last.lower() in _BY_EXTENSION:
        return _BY_EXTENSION[last.lower()]
    # TensorFlow writes the number after the extension, and its ImageNet files have no extension.
    is_numbered = "-of-" in file_name and (".tfrecord" in file_name or not last)
    return "tfrecord" if is_numbered else None


def _scan_names(file_system: AbstractFileSystem, root: str) -> list[str]:
    """Return the names of about `_MAX_SCANNED_FILES` files below a folder, those of parent folders first."""
    names: list[str] = []
    repositories: list[str] = []
    is_local = isinstance(file_system, LocalFileSystem)
    # fsspec's own walk of local files reads the attributes of each file; only the names are needed here.
    walk = os.walk(root, followlinks=True) if is_local else file_system.walk(root)
    for folder, _, files in walk:
        # The files of a datasvc repository are not part of a source.
        if any(map(is_marker, files)):
            repositories.append(f"{folder.rstrip('/')}/")
        if f"{folder.rstrip('/')}/".startswith(tuple(repositories)):
            continue
        names += [name for name in files if not name.startswith(".") and name != _EXPORT_SUMMARY]
        if len(names) >= _MAX_SCANNED_FILES:
            break
    return names
