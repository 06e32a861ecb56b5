"""Source of images listed in a manifest: a CSV, JSON lines or Parquet file that names files, labels and splits.

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
from datasvc.shards.sources.common.listing import find_below
from datasvc.shards.sources.common.options import DEFAULT_SPLIT, SPLIT_NAMES, SourceOptions
from datasvc.shards.sources.common.source import ImageFile, ListedSource
from datasvc.shards.sources.images.manifest_table import ManifestTable

_UNLISTED: Final = "not in the manifest"
_MAX_SHOWN_FILES: Final = 10


@dataclass(frozen=True)
class ManifestSource(ListedSource):
    """A listed image folder with a manifest.

    Attributes:
        url: URL of the folder of the images.
        schema: `key`, `image`, `label` if the manifest has one, and its other columns.
        classes: sorted class names; empty if labels are integers.
        ignored: number of files that are not in the manifest, all under one name.
        has_keys: whether a column of the manifest holds the keys.
    """

    # A manifest is only an option of an image folder, so log entries name the format of the folder.
    kind: ClassVar[str] = "image-folder"

    url: str
    schema: pa.Schema
    splits: dict[str, list[ImageFile]]
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
        files_by_split: dict[str, list[ImageFile]] = {}
        for name, key, split, label, *values in rows:
            source_file = files_below[name]
            file = ImageFile(key, source_file.path, source_file.size_bytes, label, source_file.stamp, tuple(values))
            files_by_split.setdefault(split, []).append(file)
        for files in files_by_split.values():
            files.sort(key=lambda file: file.key)
        _check_keys(files_by_split)
        ignored = _count_unlisted(files_below, names, root, options.manifest)
        return cls(url, manifest.schema(labels), files_by_split, classes, ignored, manifest.key is not None)


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
    """Return the names, those of missing files replaced by that of the file that has the same name in another form.

    A Mac stores "é" in the name of a file as two characters (NFD), while a manifest usually has one (NFC).
    """
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


def _check_keys(splits: Mapping[str, Sequence[ImageFile]]) -> None:
    """Raise ConfigError if two files of a split have the same key. The files must be sorted by key."""
    for split, files in splits.items():
        for previous, file in pairwise(files):
            if previous.key == file.key:
                raise ConfigError(
                    f"the key {file.key!r} occurs twice in split {split!r}; give each sample its own key"
                )


def _count_unlisted(files: Mapping[str, Any], names: Sequence[str], root: str, manifest_url: str) -> Counter[str]:
    """Count the files that are not in the manifest; the manifest itself is not counted."""
    unlisted = files.keys() - set(names)
    manifest_path = resolve_url(manifest_url)[1]
    count = sum(f"{root}/{name}" != manifest_path for name in unlisted)
    return Counter({_UNLISTED: count} if count else {})
