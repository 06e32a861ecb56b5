"""Choose the source class for the URL of an ingest: by `--format`, or else by the names of the files there.

An ingest and its dry run read the source that `open_source` returns.
"""

from __future__ import annotations

import importlib
import os
import re
from collections import Counter
from itertools import filterfalse
from typing import Any, Final, cast

from fsspec import AbstractFileSystem
from fsspec.implementations.local import LocalFileSystem

from datasvc.errors import ConfigError, NotFoundError
from datasvc.repository.store.redaction import redact_url
from datasvc.repository.store.retries import map_exceptions
from datasvc.repository.store.storage import resolve_url
from datasvc.shards.audio.audio_file import EXTENSIONS as SOUNDS
from datasvc.shards.images.header import EXTENSIONS as IMAGES
from datasvc.shards.sources.common.file_checks import ICEBERG_METADATA, hidden_part, is_hidden_name
from datasvc.shards.sources.common.listing import expand_braces, is_marker
from datasvc.shards.sources.common.options import SourceOptions
from datasvc.shards.sources.common.source import Source
from datasvc.shards.sources.common.streams import COMPRESSIONS
from datasvc.shards.sources.common.tables import TableSource, name_table_labels
from datasvc.shards.video.video_file import EXTENSIONS as VIDEOS

# Source classes by format, as paths below `datasvc.shards.sources`. A class is imported only when it is chosen, so
# that an image folder needs neither tokenizers nor lmdb.
_CLASSES: Final = {
    "image-folder": "images.image_folder.ImageFolderSource",
    "audio-folder": "images.image_folder.AudioFolderSource",
    "video-folder": "images.image_folder.VideoFolderSource",
    "manifest": "images.manifest.ManifestSource",
    "imagenet": "images.imagenet.ImageNetSource",
    "coco": "images.coco.CocoSource",
    "yolo": "images.yolo.YoloSource",
    "voc": "images.voc.VocSource",
    "webdataset": "tar.webdataset.WebDatasetSource",
    "parquet": "tabular.parquet.ParquetSource",
    "arrow": "tabular.arrow_files.ArrowSource",
    "csv": "tabular.csv_files.CsvSource",
    "json-lines": "tabular.json_lines.JsonLinesSource",
    "huggingface": "tabular.huggingface.HuggingFaceSource",
    "lmdb": "records.lmdb_database.LmdbSource",
    "tfrecord": "records.tfrecord.TfRecordSource",
    "mxnet": "records.mxnet.MxnetSource",
    "mds": "mds.mds.MdsSource",
    "numpy": "arrays.numpy_files.NumpySource",
    "tokens": "text.tokens.TokenSource",
    "chats": "text.chat.ChatSource",
}
FORMATS: Final = tuple(_CLASSES)
_FORMAT_HINT: Final = f"choose it with --format: {', '.join(FORMATS)}"
_EXTENSIONS: Final = {
    "webdataset": (".tar", ".tgz"),
    "parquet": (".parquet", ".pq"),
    "arrow": (".arrow", ".arrows", ".feather", ".ipc"),
    "csv": (".csv", ".tsv"),
    "json-lines": (".jsonl", ".ndjson", ".json"),
    "lmdb": (".mdb", ".lmdb"),
    "tfrecord": (".tfrecord", ".tfrecords"),
    "mxnet": (".rec",),
    "numpy": (".npy", ".npz"),
    "tokens": (".txt",),
    # Also pictures that are read with an option or a package only: the source says with which.
    "image-folder": (*IMAGES, ".heic", ".heif"),
    "audio-folder": tuple(SOUNDS),
    "video-folder": tuple(VIDEOS),
}
_FORMAT_OF_EXTENSION: Final = {
    extension: format_name for format_name, extensions in _EXTENSIONS.items() for extension in extensions
}
_FOLDERS: Final = ("image-folder", "audio-folder", "video-folder")
# Files that identify the format of a folder, whatever other files it contains.
_FORMAT_OF_NAME: Final = {
    "dataset_dict.json": "huggingface",
    "state.json": "huggingface",
    "dataset_info.json": "huggingface",
    "data.mdb": "lmdb",
    "index.json": "mds",
}
# Files of boxes, which tell a folder of images with boxes from one of classes: by their names, or by an image of the
# same name in the folder beside them. Lists and notes in a folder of such a name are no boxes.
_COCO: Final = re.compile(r"(^|/)annotations/(instances|person_keypoints)_[^/]*\.json$")
_ANNOTATIONS: Final = {"voc": ("/Annotations/", ".xml", "/JPEGImages/"), "yolo": ("/labels/", ".txt", "/images/")}
# Formats that use an option of `SourceOptions`. All formats use those that are not listed.
_FORMATS_OF_OPTION: Final = {
    "key": ("parquet", "arrow", "csv", "json-lines", "tfrecord", "mds", "numpy", "huggingface", "manifest", "python"),
    "label": ("parquet", "arrow", "csv", "json-lines", "huggingface", "manifest", "python"),
    "as_text": ("parquet", "arrow", "csv", "json-lines", "huggingface", "manifest", "python"),
    "as_bytes": ("webdataset",),
    "manifest": ("manifest",),
    "ground_truth": ("imagenet",),
    "synsets": ("imagenet",),
    "tokenizer": ("tokens",),
    "chat_template": ("chats",),
    "block_tokens": ("tokens",),
    "text": ("tokens",),
    "first_frame": ("image-folder",),
}
_FLAGS: Final = {"label": "label-column"}  # where the flag has another name than the option
# Tars that are not WebDataset: the training tar holds other tars, the validation tar has no labels.
_IMAGENET_TARS: Final = frozenset({"ILSVRC2012_img_train.tar", "ILSVRC2012_img_val.tar"})
# The summary that `datasvc export` writes into the folder of the exported files.
_EXPORT_SUMMARY: Final = "datasvc-export.json"
# This many names are enough to detect the format; a folder may hold millions.
_MAX_SCANNED_FILES: Final = 1000


def open_source(url: str, options: SourceOptions | None = None) -> Source:
    """Return the source at `url`, with its files listed.

    Raises:
        ConfigError: the format is unknown or cannot be detected.
        NotFoundError: there are no files at `url`.
        UnavailableError: the store does not respond.
        DatasvcError: any error of the `list` method of the source class.
    """
    options = options or SourceOptions()
    format_name = options.format or choose_format(url, options)
    # An option may select another reader of the same files.
    if format_name in _FOLDERS and options.manifest is not None:
        format_name = "manifest"
    if format_name == "json-lines" and options.chat_template is not None:
        format_name = "chats"
    if format_name == "json-lines" and options.tokenizer is not None:
        format_name = "tokens"
    if format_name not in _CLASSES:
        raise ConfigError(f"format {format_name!r} is unknown; expected one of {', '.join(FORMATS)}")
    check_options(options, format_name, url)
    module, _, name = _CLASSES[format_name].rpartition(".")
    source_class: Any = getattr(importlib.import_module(f"datasvc.shards.sources.{module}"), name)
    source = cast("Source", source_class.list(url, options))
    if isinstance(source, TableSource):
        source = name_table_labels(source, options)
    return source.with_key_prefix(options.key_prefix) if options.key_prefix else source


def check_options(options: SourceOptions, format_name: str, url: str) -> None:
    """Raise ConfigError if an option is set that the format of the source at `url` does not use."""
    defaults = SourceOptions()
    for name, formats in _FORMATS_OF_OPTION.items():
        if getattr(options, name) != getattr(defaults, name) and format_name not in formats:
            flag = f"--{_FLAGS.get(name, name.replace('_', '-'))}"
            raise ConfigError(
                f"{flag} ({name}=) is for {' and '.join(formats)}, but {redact_url(url)} has the format "
                f"{format_name}, which does not use it; leave out {flag}, or choose another format with --format"
            )


def choose_format(url: str, options: SourceOptions) -> str:
    """Return the format of the files at `url`. For errors, see `open_source`."""
    if options.manifest is not None:
        return "manifest"
    # Brace notation names several files or folders; the first one decides.
    first = expand_braces(url)[0]
    format_name = _format_of_file_name(first)
    if format_name is not None:
        return format_name
    file_system, root = resolve_url(first)
    with map_exceptions("list", redact_url(url)):
        if file_system.isfile(root):
            raise ConfigError(f"cannot detect the format of {redact_url(url)} from its name; {_FORMAT_HINT}")
        names = _scan_names(file_system, root)
        # Only for the message: a folder without files is empty or does not exist.
        is_folder = bool(names) or file_system.isdir(root)
    if not names:
        problem = "it is empty" if is_folder else "there is no file or folder of this name"
        raise NotFoundError(f"cannot ingest {redact_url(url)}: {problem}")
    if options.first_frame:
        return "image-folder"
    return _format_of_folder(names, url)


def _format_of_folder(paths: list[str], url: str) -> str:
    """Return the format of a folder that holds files at these paths. Raise ConfigError if the format is unclear."""
    names = [path.rpartition("/")[2] for path in paths]
    unique_names = set(names)
    if unique_names & _IMAGENET_TARS:
        return "imagenet"
    # TensorFlow Datasets writes a description of the name that Hugging Face uses beside its TFRecord files.
    if "dataset_info.json" in unique_names and any("tfrecord" in name for name in names):
        return "tfrecord"
    for name, format_name in _FORMAT_OF_NAME.items():
        if name in unique_names:
            return format_name
    num_files = Counter(format_name for format_name in map(_format_of_file_name, names) if format_name is not None)
    # Such folders often hold notes and lists too, so a single image decides, then a single sound, and then a video.
    if "image-folder" in num_files:
        if any(map(_COCO.search, paths)):
            return "coco"
        stems = {f"/{os.path.splitext(path)[0]}" for path in paths if _format_of_file_name(path) == "image-folder"}
        for format_name, (folder, extension, images) in _ANNOTATIONS.items():
            lists = (f"/{path}".removesuffix(extension) for path in paths if path.endswith(extension))
            if any(folder in name and name.replace(folder, images) in stems for name in lists):
                return format_name
    for format_name in _FOLDERS:
        if format_name in num_files:
            return format_name
    if len(num_files) == 1:
        return next(iter(num_files))
    counts = ", ".join(f"{count} of {name}" for name, count in num_files.most_common()) or "of no supported format"
    raise ConfigError(f"cannot detect the format of {redact_url(url)}: its files are {counts}; {_FORMAT_HINT}")


def _format_of_file_name(name: str) -> str | None:
    """Return the format that the name of a file indicates; None if it indicates none."""
    file_name = os.path.basename(name.rstrip("/"))
    if file_name in _IMAGENET_TARS:
        return "imagenet"
    if file_name.endswith(ICEBERG_METADATA):
        return None  # of a table whose Parquet files cannot be read without it, see `check_no_table_log`
    base, last = os.path.splitext(file_name)
    if last.lower() in COMPRESSIONS:
        base, last = os.path.splitext(base)
    if last.lower() in _FORMAT_OF_EXTENSION:
        return _FORMAT_OF_EXTENSION[last.lower()]
    # In TensorFlow's names, the number follows the extension (`pets.tfrecord-00000-of-00004`); those of its ImageNet
    # files have no extension (`train-00000-of-01024`).
    is_numbered = "-of-" in file_name and (".tfrecord" in file_name or not last)
    return "tfrecord" if is_numbered else None


def _scan_names(file_system: AbstractFileSystem, root: str) -> list[str]:
    """Return the paths of files below a folder, those in parent folders first."""
    names: list[str] = []
    repositories: list[str] = []  # paths of the repositories below `root`, each with a slash at its end
    is_local = isinstance(file_system, LocalFileSystem)
    linked = {os.path.realpath(root)}
    # fsspec's own walk of local files reads the attributes of each file; only the names are needed here.
    walk = os.walk(root, followlinks=True) if is_local else file_system.walk(root)
    for folder, folders, files in walk:
        if is_local:
            # Follow one link to each folder: with two links each to their own folder, there are 2 ** 40 paths.
            links = {
                name: os.path.realpath(f"{folder}/{name}") for name in folders if os.path.islink(f"{folder}/{name}")
            }
            folders[:] = [name for name in folders if links.get(name) not in linked]
            linked.update(links.values())
        # The files of a datasvc repository are not part of a source.
        if any(map(is_marker, files)):
            repositories.append(f"{folder.rstrip('/')}/")
        if f"{folder.rstrip('/')}/".startswith(tuple(repositories)):
            continue
        # Not descended into: a hidden folder may have more files than the data.
        # Annotations first: there may be too many images to see both.
        folders[:] = sorted(filterfalse(is_hidden_name, folders), key=lambda name: name != "annotations")
        prefix = f"{folder[len(root) :].strip('/')}/".lstrip("/")
        for name in files:
            is_media = _format_of_file_name(name) in _FOLDERS
            if hidden_part(prefix + name, underscores=not is_media) is None and name != _EXPORT_SUMMARY:
                names.append(prefix + name)
        if len(names) >= _MAX_SCANNED_FILES:
            break
    return names
