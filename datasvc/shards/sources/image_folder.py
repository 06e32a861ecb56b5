"""Image folders on any fsspec URL: `SOURCE/[SPLIT/]CLASS/NAME.jpg`, or flat without classes.

Folders named like splits at the top are splits; the folders below them, or at the top, are class names. What
is no image by its extension is left out and counted.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, field
from typing import Final

from datasvc.errors import ConfigError, NotFoundError
from datasvc.repository.storage import redact_url, resolve_url, translated
from datasvc.shards.images import EXTENSIONS

SPLIT_NAMES: Final = frozenset({"train", "val", "valid", "validation", "test"})


@dataclass(frozen=True)
class ImageFile:
    """One file of a source.

    Attributes:
        key: its path inside its split, unique there.
        path: where it lies on the source's file system.
        size_bytes: as listed.
        label: index of its class, None in a flat folder.
    """

    key: str
    path: str
    size_bytes: int
    label: int | None


@dataclass(frozen=True)
class ImageFolder:
    """A listed image folder.

    Attributes:
        url: where it lies.
        splits: files of each split, ordered by key.
        classes: names of the labels; the same in all splits.
        ignored: how many files of each other extension were left out.
    """

    url: str
    splits: dict[str, list[ImageFile]]
    classes: tuple[str, ...]
    ignored: Counter[str] = field(default_factory=Counter)

    @classmethod
    def list(cls, url: str) -> ImageFolder:
        """List the source.

        Raises:
            NotFoundError: nothing is there, or no image is.
            ConfigError: images lie both in class folders and beside them, or both in split folders and beside
                them; or the URL has no driver.
            UnavailableError: the store does not answer.
        """
        file_system, root = resolve_url(url)
        with translated("list", redact_url(url)):
            if not file_system.isdir(root):
                raise NotFoundError(f"cannot ingest {redact_url(url)}: there is no such folder")
            found = file_system.find(root, detail=True)
        sizes = {path[len(root) :].lstrip("/"): int(info["size"]) for path, info in found.items()}
        images = sorted(name for name in sizes if _extension(name) in EXTENSIONS)
        ignored = Counter(_extension(name) or "(none)" for name in sizes if _extension(name) not in EXTENSIONS)
        if not images:
            raise NotFoundError(
                f"cannot ingest {redact_url(url)}: no images in it ({len(sizes)} other files); "
                f"looked for {', '.join(sorted(EXTENSIONS))}"
            )
        _check_splits(images, url)
        placed = {name: _place(name) for name in images}
        classes = _classes(placed, url)
        labels = {name: number for number, name in enumerate(classes)}
        splits: dict[str, list[ImageFile]] = {}
        for name in images:
            split, class_name, key = placed[name]
            label = labels[class_name] if class_name is not None else None
            splits.setdefault(split, []).append(ImageFile(key, f"{root}/{name}", sizes[name], label))
        for files in splits.values():
            files.sort(key=lambda file: file.key)
        return cls(url, splits, classes, ignored)

    @property
    def num_samples(self) -> int:
        """Images over all splits."""
        return sum(map(len, self.splits.values()))

    @property
    def size_bytes(self) -> int:
        """Bytes of all images, as listed."""
        return sum(file.size_bytes for files in self.splits.values() for file in files)


class FileReader:
    """Reads the files of one source; local ones without going through fsspec, which takes longer than the read.

    Args:
        url: of the source.
    """

    def __init__(self, url: str) -> None:
        self._fs, _ = resolve_url(url)
        self._is_local = "file" in self._fs.protocol

    def read(self, file: ImageFile) -> bytes:
        """Return the whole file. Raises NotFoundError, UnavailableError."""
        with translated("read", file.path):
            if not self._is_local:
                return bytes(self._fs.cat_file(file.path))
            with open(file.path, "rb", buffering=0) as opened:
                return opened.read()


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


def _place(name: str) -> tuple[str, str | None, str]:
    """Return split, class and key of a file from its path below the source."""
    parts = name.split("/")
    split = parts.pop(0) if len(parts) > 1 and parts[0].lower() in SPLIT_NAMES else "train"
    return split.lower(), (parts[0] if len(parts) > 1 else None), "/".join(parts)


def _classes(placed: dict[str, tuple[str, str | None, str]], url: str) -> tuple[str, ...]:
    names = {class_name for _, class_name, _ in placed.values()}
    if None in names and len(names) > 1:
        flat = next(name for name, place in placed.items() if place[1] is None)
        raise ConfigError(
            f"cannot ingest {redact_url(url)}: some images lie in class folders and some beside them, such as "
            f"{flat}; move these into a class folder or out of the source"
        )
    return tuple(sorted(name for name in names if name is not None))
