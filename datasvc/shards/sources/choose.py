"""Which kind of source a URL is: by `--format`, else by what lies there. Names decide, then the files found."""

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
from datasvc.shards.sources.common.files import COMPRESSIONS, expand_braces, is_marker
from datasvc.shards.sources.common.options import SourceOptions
from datasvc.shards.sources.common.source import Source

# Loaded where they are used: tokenizers and lmdb are nothing that an image folder needs.
_CLASSES: Final = {
    "image-folder": "images.image_folder.ImageFolder",
    "manifest": "images.manifest.Manifest",
    "imagenet": "images.imagenet.ImageNet",
    "webdataset": "tar.webdataset.WebDatasetSource",
    "parquet": "tabular.parquet.ParquetSource",
    "arrow": "tabular.arrow_files.ArrowFiles",
    "csv": "tabular.csv_files.CsvFiles",
    "json-lines": "tabular.json_lines.JsonLines",
    "huggingface": "tabular.huggingface.HuggingFace",
    "lmdb": "records.lmdb_database.LmdbSource",
    "tfrecord": "records.tfrecord.TfRecords",
    "mds": "mds.mds.MdsDataset",
    "numpy": "arrays.numpy_files.NumpyFiles",
    "tokens": "text.tokens.TokenFiles",
}
FORMATS: Final = tuple(_CLASSES)
_SAY_IT: Final = f"say it with --format: {', '.join(FORMATS)}"
_BY_EXTENSION: Final = {
    ".tar": "webdataset",
    ".tgz": "webdataset",
    ".parquet": "parquet",
    ".pq": "parquet",
    ".arrow": "arrow",
    ".arrows": "arrow",
    ".feather": "arrow",
    ".ipc": "arrow",
    ".csv": "csv",
    ".tsv": "csv",
    ".jsonl": "json-lines",
    ".ndjson": "json-lines",
    ".json": "json-lines",
    ".mdb": "lmdb",
    ".lmdb": "lmdb",
    ".tfrecord": "tfrecord",
    ".tfrecords": "tfrecord",
    ".npy": "numpy",
    ".npz": "numpy",
    ".txt": "tokens",
    **dict.fromkeys(IMAGES, "image-folder"),
}
# Files by whose presence in a folder its format is known.
_BY_NAME: Final = {
    "dataset_dict.json": "huggingface",
    "state.json": "huggingface",
    "dataset_info.json": "huggingface",
    "data.mdb": "lmdb",
    "index.json": "mds",
}
_IMAGENET_TARS: Final = frozenset({"ILSVRC2012_img_train.tar", "ILSVRC2012_img_val.tar"})
# What `datasvc export` says of itself, beside what it wrote.
_EXPORT_SUMMARY: Final = "datasvc-export.json"
_LOOKED_AT: Final = 1000


def open_source(url: str, options: SourceOptions | None = None) -> Source:
    """List the source at `url`.

    Raises:
        ConfigError: the format is unknown, cannot be told from what is there, or as the source's own `list`.
        NotFoundError: nothing is there.
        UnavailableError: the store does not answer.
    """
    options = options or SourceOptions()
    kind = options.format or choose_format(url, options)
    if kind == "image-folder" and options.manifest is not None:
        kind = "manifest"
    if kind == "json-lines" and options.tokenizer is not None:
        kind = "tokens"
    if kind not in _CLASSES:
        raise ConfigError(f"format {kind!r} is unknown; expected one of {', '.join(FORMATS)}")
    module, _, name = _CLASSES[kind].rpartition(".")
    found: Any = getattr(importlib.import_module(f"datasvc.shards.sources.{module}"), name)
    return cast("Source", found.list(url, options))


def choose_format(url: str, options: SourceOptions) -> str:
    """Return the format of what lies at `url`. Raises ConfigError, NotFoundError, UnavailableError."""
    if options.manifest is not None:
        return "manifest"
    first = expand_braces(url)[0]
    named = _by_file_name(first)
    if named is not None:
        return named
    file_system, root = resolve_url(first)
    with map_exceptions("look at", redact_url(url)):
        if file_system.isfile(root):
            raise ConfigError(f"cannot tell the format of {redact_url(url)} from its name; {_SAY_IT}")
        found = _some_files(file_system, root)
        is_folder = bool(found) or file_system.isdir(root)
    if not found:
        what = "it is empty" if is_folder else "there is no such folder"
        raise NotFoundError(f"cannot ingest {redact_url(url)}: {what}")
    return _by_content(found, url)


def _by_content(found: list[str], url: str) -> str:
    names = {os.path.basename(name) for name in found}
    if names & _IMAGENET_TARS:
        return "imagenet"
    for name, kind in _BY_NAME.items():
        if name in names:
            return kind
    kinds = Counter(kind for kind in map(_by_file_name, found) if kind is not None)
    if len(kinds) == 1 or "image-folder" in kinds:  # notes and lists may lie beside images
        return "image-folder" if "image-folder" in kinds else next(iter(kinds))
    said = ", ".join(f"{count} of {kind}" for kind, count in kinds.most_common()) or "none that is known"
    raise ConfigError(f"cannot tell the format of {redact_url(url)}: its files are {said}; {_SAY_IT}")


def _by_file_name(name: str) -> str | None:
    own = os.path.basename(name.rstrip("/"))
    if own in _IMAGENET_TARS:
        return "imagenet"
    base, last = os.path.splitext(own)
    if last.lower() in COMPRESSIONS:
        base, last = os.path.splitext(base)
    if last.lower() in _BY_EXTENSION:
        return _BY_EXTENSION[last.lower()]
    # TensorFlow numbers its files behind the extension, and ImageNet's have none.
    is_numbered = "-of-" in own and (".tfrecord" in own or not last)
    return "tfrecord" if is_numbered else None


def _some_files(file_system: AbstractFileSystem, root: str) -> list[str]:
    """Return the first files below a folder, nearest first, until there are enough to tell."""
    found: list[str] = []
    ours: list[str] = []
    is_local = isinstance(file_system, LocalFileSystem)
    # The file system's own walk looks at every file; here their names are enough.
    walk = os.walk(root, followlinks=True) if is_local else file_system.walk(root)
    for folder, _, files in walk:
        if any(map(is_marker, files)):
            ours.append(f"{folder.rstrip('/')}/")
        if f"{folder.rstrip('/')}/".startswith(tuple(ours)):
            continue
        found += [name for name in files if not name.startswith(".") and name != _EXPORT_SUMMARY]
        if len(found) >= _LOOKED_AT:
            break
    return found
