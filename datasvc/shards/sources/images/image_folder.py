"""Image folders on any fsspec URL: `SOURCE/[SPLIT/]CLASS/NAME.jpg`, or flat without classes.

Folders named like splits at the top are splits; the folders below them, or at the top, are class names. What
is no image by its extension is left out and counted.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import ClassVar, NamedTuple

import pyarrow as pa

from datasvc.errors import ConfigError, NotFoundError
from datasvc.repository.store.storage import redact_url
from datasvc.shards.format.schema import IMAGE, KEY, LABEL, image_field
from datasvc.shards.images.header import EXTENSIONS
from datasvc.shards.sources.common.files import SourceFile, find_below
from datasvc.shards.sources.common.options import SourceOptions
from datasvc.shards.sources.common.source import ImageFile, ListedSource, printable
from datasvc.shards.sources.common.splits import DEFAULT_SPLIT, SPLIT_NAMES


@dataclass(frozen=True)
class ImageFolder(ListedSource):
    """A listed image folder.

    Attributes:
        url: where it lies.
        splits: files of each split, ordered by key.
        classes: names of the labels; the same in all splits.
        ignored: how many files of each other extension were left out.
    """

    kind: ClassVar[str] = "image-folder"

    url: str
    splits: dict[str, list[ImageFile]]
    classes: tuple[str, ...]
    ignored: Counter[str] = field(default_factory=Counter)

    @classmethod
    def list(cls, url: str, options: SourceOptions | None = None) -> ImageFolder:
        """List the source.

        Raises:
            NotFoundError: nothing is there, or no image is.
            ConfigError: images lie both in class folders and beside them, or both in split folders and beside
                them; a link leads out of the source; or the URL has no driver.
            UnavailableError: the store does not answer.
        """
        options = options or SourceOptions()
        found, _ = find_below(url)
        folders, ignored = _by_folder(found.values())
        if not folders:
            raise NotFoundError(
                f"cannot ingest {redact_url(url)}: no images in it ({len(found)} other files); "
                f"looked for {', '.join(sorted(EXTENSIONS))}"
            )
        if options.split is None:
            _check_splits(folders, url)
        places = {folder: _place(folder, options.split) for folder in sorted(folders)}
        classes = _classes(places, folders, url)
        labels = {name: number for number, name in enumerate(classes)}
        splits: dict[str, list[ImageFile]] = {}
        for folder, (split, class_name, start) in places.items():
            label = labels[class_name] if class_name is not None else None
            files = [
                ImageFile(name[start:], path, size_bytes, label, stamp)
                for name, path, size_bytes, stamp in folders[folder]
            ]
            splits.setdefault(split, []).extend(files)
        for files in splits.values():
            files.sort(key=attrgetter("key"))
        return cls(url, splits, classes, ignored)

    @property
    def schema(self) -> pa.Schema:
        """Columns of the samples."""
        label = [pa.field(LABEL, pa.int32(), nullable=False)] if self.classes else []
        return pa.schema([pa.field(KEY, pa.string(), nullable=False), image_field(IMAGE), *label])


def _by_folder(found: Iterable[SourceFile]) -> tuple[dict[str, list[SourceFile]], Counter[str]]:
    """Return the images by their folder, "" or "a/b/", and how many other files there are of each extension."""
    folders: defaultdict[str, list[SourceFile]] = defaultdict(list)
    ignored: Counter[str] = Counter()
    for file in found:
        name = file.name
        extension = _extension(name)
        if extension in EXTENSIONS:
            folders[name[: name.rfind("/") + 1]].append(file)
        else:
            ignored[printable(extension) or "(none)"] += 1
    return dict(folders), ignored


def _extension(name: str) -> str:
    """Return the lower-case extension as `os.path.splitext` has it, which takes longer."""
    before, dot, last = name.rpartition(".")
    is_plain = dot and "/" not in last and before[-1:] not in ("", "/", ".")
    return f".{last.lower()}" if is_plain else os.path.splitext(name)[1].lower()


def _check_splits(folders: Iterable[str], url: str) -> None:
    """Refuse sources in which two files would get one key in one split."""
    tops = {folder.partition("/")[0] for folder in folders}
    spellings = [top for top in tops if top.lower() in SPLIT_NAMES]
    if spellings and (len(tops) > len(spellings) or len({top.lower() for top in spellings}) < len(spellings)):
        raise ConfigError(
            f"cannot ingest {redact_url(url)}: its top folders {sorted(tops)[:10]} mix splits with others, or spell "
            "a split in two ways; keep only split folders at the top, or none"
        )


class _FolderRole(NamedTuple):
    """What the files of a folder are.

    Attributes:
        split: that they belong to.
        class_name: their class, None without one.
        key_start: where the key begins in the path below the source.
    """

    split: str
    class_name: str | None
    key_start: int


def _place(folder: str, only: str | None) -> _FolderRole:
    """Return what the files in a folder below the source are; `only`: the split of all."""
    top, _, below = folder.partition("/")
    if only is None and top.lower() in SPLIT_NAMES:
        split, start = top, len(top) + 1
    else:
        split, start, below = DEFAULT_SPLIT if only is None else only, 0, folder
    return _FolderRole(split.lower(), below.partition("/")[0] or None, start)


def _classes(places: Mapping[str, _FolderRole], folders: Mapping[str, list[SourceFile]], url: str) -> tuple[str, ...]:
    names = {place.class_name for place in places.values()}
    if None in names and len(names) > 1:
        flat = min(
            file.name for folder, place in places.items() if place.class_name is None for file in folders[folder]
        )
        raise ConfigError(
            f"cannot ingest {redact_url(url)}: some images lie in class folders and some beside them, such as "
            f"{flat}; move these into a class folder or out of the source"
        )
    for name in names:
        if name is not None and printable(name) != name:
            raise ConfigError(
                f"cannot ingest {redact_url(url)}: the class folder {printable(name)} is not UTF-8; rename it"
            )
    return tuple(sorted(name for name in names if name is not None))
