"""Images named by a manifest: a CSV, JSON lines or Parquet file of files, labels, splits and more columns.

The manifest decides what is ingested. Every file that it names must lie below the source; what it does not name is
counted and left out.
"""

from __future__ import annotations

import posixpath
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar, Final

import pyarrow as pa

from datasvc.errors import ConfigError, NotFoundError
from datasvc.repository.store.storage import redact_url, resolve_url
from datasvc.shards.sources.common.files import find_below
from datasvc.shards.sources.common.options import SourceOptions
from datasvc.shards.sources.common.source import ImageFile, ListedSource
from datasvc.shards.sources.common.splits import DEFAULT_SPLIT, SPLIT_NAMES
from datasvc.shards.sources.images.manifest_table import ManifestTable

_NOT_NAMED: Final = "not in the manifest"
_NAMED: Final = 10


@dataclass(frozen=True)
class Manifest(ListedSource):
    """A listed image folder with a manifest.

    Attributes:
        url: where the images lie.
        schema: `key`, `image`, `label` where the manifest has one, and its other columns.
        splits: files of each split, ordered by key.
        classes: names of the labels, sorted; empty where labels are integers.
        ignored: how many files the manifest does not name.
    """

    kind: ClassVar[str] = "image-folder"

    url: str
    schema: pa.Schema
    splits: dict[str, list[ImageFile]]
    classes: tuple[str, ...]
    ignored: Counter[str]

    @classmethod
    def list(cls, url: str, options: SourceOptions | None = None) -> Manifest:
        """List the source; `options.manifest` is needed.

        Raises:
            NotFoundError: the folder, the manifest, or files that it names are not there; names some and counts
                them.
            ConfigError: the manifest has no column of files, a line of it does not parse, names a file twice or
                outside the source; labels mix names and integers; or a link leads out of the source.
            UnavailableError: the store does not answer.
        """
        options = options or SourceOptions()
        if options.manifest is None:
            raise ConfigError("no manifest is given; expected the URL of a CSV, JSON lines or Parquet file")
        manifest = ManifestTable.read(options.manifest, options.key)
        found, root = find_below(url)
        names = _file_names(manifest)
        _check_there(names, found, url)
        labels, classes = manifest.labels()
        keys = names if manifest.key is None else manifest.texts(manifest.key)
        splits = _splits(names, manifest, options)
        extras = [manifest.values(name) for name in manifest.extras]
        rows = zip(names, keys, splits, labels, *extras, strict=True)
        files: dict[str, list[ImageFile]] = {}
        for name, key, split, label, *values in rows:
            there = found[name]
            file = ImageFile(key, there.path, there.size_bytes, label, there.stamp, tuple(values))
            files.setdefault(split, []).append(file)
        for of_split in files.values():
            of_split.sort(key=lambda file: file.key)
        _check_keys(files)
        ignored = _unnamed(found, names, root, options.manifest)
        return cls(url, manifest.schema(labels), files, classes, ignored)


def _file_names(manifest: ManifestTable) -> list[str]:
    """Return the paths that the manifest names, below the source, each once."""
    names: dict[str, int] = {}
    for index, path in enumerate(manifest.texts(manifest.file)):
        name = posixpath.normpath(path)
        if path.startswith("/") or "://" in path or ".." in path.split("/"):
            raise ConfigError(
                f"{manifest.line(index)} names {path!r}; expected a path below the source, without '..'"
            )
        if name in names:
            raise ConfigError(
                f"{manifest.line(index)} names {name!r} again, after {manifest.line(names[name])}; remove one of them"
            )
        names[name] = index
    return [*names]


def _check_there(names: Sequence[str], found: Mapping[str, Any], url: str) -> None:
    lacking = [name for name in names if name not in found]
    if lacking:
        more = f" and {len(lacking) - _NAMED} more" if len(lacking) > _NAMED else ""
        raise NotFoundError(
            f"{len(lacking)} of {len(names)} files that the manifest names are not below {redact_url(url)}: "
            f"{', '.join(lacking[:_NAMED])}{more}"
        )


def _splits(names: Sequence[str], manifest: ManifestTable, options: SourceOptions) -> list[str]:
    if options.split is not None:
        return [options.split.lower()] * len(names)
    if manifest.split is not None:
        return [split.lower() for split in manifest.texts(manifest.split)]
    tops = [name.partition("/")[0].lower() if "/" in name else "" for name in names]
    return [top if top in SPLIT_NAMES else DEFAULT_SPLIT for top in tops]


def _check_keys(splits: Mapping[str, Sequence[ImageFile]]) -> None:
    for split, files in splits.items():
        for one, other in pairwise(files):
            if one.key == other.key:
                raise ConfigError(f"the key {one.key!r} is there twice in split {split!r}; keys must be unique")


def _unnamed(found: Mapping[str, Any], names: Sequence[str], root: str, manifest: str) -> Counter[str]:
    left = found.keys() - set(names)
    own = resolve_url(manifest)[1]
    count = sum(f"{root}/{name}" != own for name in left)
    return Counter({_NOT_NAMED: count} if count else {})
