"""Image folders on any fsspec URL: `SOURCE/[SPLIT/]CLASS/NAME.jpg`, or flat without classes.

Folders named like splits at the top are splits; the folders below them, or at the top, are class names. What
is no image by its extension is left out and counted.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, field
from typing import ClassVar

import pyarrow as pa

from datasvc.errors import ConfigError, NotFoundError
from datasvc.repository.storage import redact_url
from datasvc.shards.images import EXTENSIONS
from datasvc.shards.schema import IMAGE, KEY, LABEL, image_field
from datasvc.shards.sources.files import find_below
from datasvc.shards.sources.options import SourceOptions
from datasvc.shards.sources.source import ImageFile, ListedSource, printable
from datasvc.shards.sources.splits import DEFAULT_SPLIT, SPLIT_NAMES


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
        extensions = {name: _extension(name) for name in found}
        images = sorted(name for name, extension in extensions.items() if extension in EXTENSIONS)
        others = (extension for extension in extensions.values() if extension not in EXTENSIONS)
        ignored = Counter(printable(extension) or "(none)" for extension in others)
        if not images:
            raise NotFoundError(
                f"cannot ingest {redact_url(url)}: no images in it ({len(found)} other files); "
                f"looked for {', '.join(sorted(EXTENSIONS))}"
            )
        if options.split is None:
            _check_splits(images, url)
        placed = {name: _place(name, options.split) for name in images}
        classes = _classes(placed, url)
        labels = {name: number for number, name in enumerate(classes)}
        splits: dict[str, list[ImageFile]] = {}
        for name in images:
            split, class_name, key = placed[name]
            label = labels[class_name] if class_name is not None else None
            file = found[name]
            splits.setdefault(split, []).append(ImageFile(key, file.path, file.size_bytes, label, file.stamp))
        for files in splits.values():
            files.sort(key=lambda file: file.key)
        return cls(url, splits, classes, ignored)

    @property
    def schema(self) -> pa.Schema:
        """Columns of the samples."""
        label = [pa.field(LABEL, pa.int32(), nullable=False)] if self.classes else []
        return pa.schema([pa.field(KEY, pa.string(), nullable=False), image_field(IMAGE), *label])


def _extension(name: str) -> str:
    return os.path.splitext(name)[1].lower()


def _check_splits(images: list[str], url: str) -> None:
    """Refuse sources in which two files would get one key in one split."""
    tops = {name.partition("/")[0] if "/" in name else "" for name in images}
    spellings = [top for top in tops if top.lower() in SPLIT_NAMES]
    if spellings and (len(tops) > len(spellings) or len({top.lower() for top in spellings}) < len(spellings)):
        raise ConfigError(
            f"cannot ingest {redact_url(url)}: its top folders {sorted(tops)[:10]} mix splits with others, or spell "
            "a split in two ways; keep only split folders at the top, or none"
        )


def _place(name: str, only: str | None) -> tuple[str, str | None, str]:
    """Return split, class and key of a file from its path below the source; `only`: the split of all."""
    parts = name.split("/")
    if only is not None:
        split = only
    else:
        split = parts.pop(0) if len(parts) > 1 and parts[0].lower() in SPLIT_NAMES else DEFAULT_SPLIT
    return split.lower(), (parts[0] if len(parts) > 1 else None), "/".join(parts)


def _classes(placed: dict[str, tuple[str, str | None, str]], url: str) -> tuple[str, ...]:
    names = {class_name for _, class_name, _ in placed.values()}
    if None in names and len(names) > 1:
        flat = next(name for name, place in placed.items() if place[1] is None)
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
