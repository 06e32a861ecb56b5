"""Sources of folders of images or sounds on any fsspec URL: `SOURCE/[SPLIT/]CLASS/NAME.jpg`, or without classes.

A top folder with the name of a split is a split, and the folders in it are classes. If there are no split folders,
the top folders are the classes. Files without such an extension and hidden files (`file_checks`) are left out and
counted.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import ClassVar, NamedTuple

import pyarrow as pa

from datasvc.errors import ConfigError, NotFoundError
from datasvc.printable import count_text
from datasvc.repository.store.redaction import redact_url
from datasvc.shards.audio.audio_file import EXTENSIONS as AUDIO_EXTENSIONS
from datasvc.shards.format.schema import AUDIO, IMAGE, KEY, LABEL, VIDEO, audio_field, image_field, video_field
from datasvc.shards.images.header import EXTENSIONS
from datasvc.shards.sources.common.file_checks import unread_pictures
from datasvc.shards.sources.common.listing import SourceFile, find_below
from datasvc.shards.sources.common.options import DEFAULT_SPLIT, SPLIT_NAMES, SourceOptions
from datasvc.shards.sources.common.source import ListedFile, ListedSource, printable
from datasvc.shards.video.video_file import EXTENSIONS as VIDEO_EXTENSIONS


@dataclass(frozen=True)
class ImageFolderSource(ListedSource):
    """A listed image folder. Its classes are the same in all splits."""

    kind: ClassVar[str] = "image-folder"
    noun: ClassVar[str] = "images"

    url: str
    splits: dict[str, list[ListedFile]]
    classes: tuple[str, ...]
    ignored: Counter[str] = field(default_factory=Counter)

    @classmethod
    def list(cls, url: str, options: SourceOptions | None = None) -> ImageFolderSource:
        """List the source.

        Raises:
            NotFoundError: there is no folder, or no image in it.
            ConfigError: only some files are in class folders, or only some in split folders; a link leads out of
                the source; or no driver for the URL is installed.
            UnavailableError: the store does not respond.
        """
        options = options or SourceOptions()
        files_below, _, hidden = find_below(url)
        extensions = cls.extensions(options)
        folders, ignored = _by_folder(files_below.values(), extensions)
        ignored += hidden
        if not folders:
            raise NotFoundError(
                f"cannot ingest {redact_url(url)}: no {cls.noun} among its {count_text(len(files_below), 'file')}; "
                f"{unread_pictures(ignored) or 'expected ' + ', '.join(sorted(extensions))}"
            )
        # If the options give the split of all files, every top folder is a class folder, even one called "train".
        if options.split is None:
            _check_splits(folders, url)
        roles = {folder: _role(folder, options.split) for folder in sorted(folders)}
        classes = _classes(roles, folders, url, cls.noun)
        # One order of classes for all splits, so that a label means the same class in each of them.
        labels = {name: number for number, name in enumerate(classes)}
        splits: dict[str, list[ListedFile]] = {}
        for folder, (split, class_name, key_start) in roles.items():
            label = labels[class_name] if class_name is not None else None
            files = [
                ListedFile(name[key_start:], path, size_bytes, label, stamp)
                for name, path, size_bytes, stamp in folders[folder]
            ]
            splits.setdefault(split, []).extend(files)
        for files in splits.values():
            files.sort(key=attrgetter("key"))
        return cls(url, splits, classes, ignored)

    @staticmethod
    def extensions(options: SourceOptions) -> Collection[str]:
        """Return the extensions of the files that are samples."""
        return EXTENSIONS | {".gif"} if options.first_frame else EXTENSIONS

    @property
    def media(self) -> pa.Field:
        """The column that has the content of the files."""
        return image_field(IMAGE)

    @property
    def schema(self) -> pa.Schema:
        """Columns of the samples."""
        label = [pa.field(LABEL, pa.int32(), nullable=False)] if self.classes else []
        return pa.schema([pa.field(KEY, pa.string(), nullable=False), self.media, *label])


@dataclass(frozen=True)
class AudioFolderSource(ImageFolderSource):
    """A listed folder of sounds, with the folders of `ImageFolderSource`."""

    kind: ClassVar[str] = "audio-folder"
    noun: ClassVar[str] = "sounds"

    @staticmethod
    def extensions(options: SourceOptions) -> Collection[str]:  # noqa: ARG004 - those of images depend on them
        """Return the extensions of the files that are samples."""
        return AUDIO_EXTENSIONS

    @property
    def media(self) -> pa.Field:
        """The column that has the content of the files."""
        return audio_field(AUDIO)


@dataclass(frozen=True)
class VideoFolderSource(ImageFolderSource):
    """A listed folder of videos, with the folders of `ImageFolderSource`."""

    kind: ClassVar[str] = "video-folder"
    noun: ClassVar[str] = "videos"

    @staticmethod
    def extensions(options: SourceOptions) -> Collection[str]:  # noqa: ARG004 - those of images depend on them
        """Return the extensions of the files that are samples."""
        return VIDEO_EXTENSIONS

    @property
    def media(self) -> pa.Field:
        """The column that has the content of the files."""
        return video_field(VIDEO)


def _by_folder(
    files: Iterable[SourceFile], extensions: Collection[str]
) -> tuple[dict[str, list[SourceFile]], Counter[str]]:
    """Return the files with `extensions` by folder ("" or "a/b/"), and the number of other files by extension."""
    folders: defaultdict[str, list[SourceFile]] = defaultdict(list)
    ignored: Counter[str] = Counter()
    for file in files:
        name = file.name
        extension = _extension(name)
        if extension in extensions:
            folders[name[: name.rfind("/") + 1]].append(file)
        else:
            ignored[printable(extension) or "(none)"] += 1
    return dict(folders), ignored


def _extension(name: str) -> str:
    """Return the lower-case extension, like `os.path.splitext`, but faster for ordinary names."""
    base, dot, last = name.rpartition(".")
    # Not ordinary: the only dot is in the name of a folder, or the dots are at the start of the file name.
    # Leave these to `splitext`.
    is_ordinary = dot and "/" not in last and base[-1:] not in ("", "/", ".")
    return f".{last.lower()}" if is_ordinary else os.path.splitext(name)[1].lower()


def _check_splits(folders: Iterable[str], url: str) -> None:
    """Raise ConfigError if the top folders could give two files of one split the same key."""
    top_folders = {folder.partition("/")[0] for folder in folders}  # "" for files at the top
    split_folders = [top for top in top_folders if top.lower() in SPLIT_NAMES]
    has_other_folders = len(top_folders) > len(split_folders)
    has_split_twice = len({top.lower() for top in split_folders}) < len(split_folders)
    # "train/1.jpg", "Train/1.jpg" and "1.jpg" would have the same key in the same split.
    if split_folders and (has_other_folders or has_split_twice):
        raise ConfigError(
            f"cannot ingest {redact_url(url)}: its top folders {sorted(top_folders)[:10]} mix splits with other "
            "folders, or spell one split in two ways; keep only split folders at the top, or none"
        )


class _FolderRole(NamedTuple):
    """Split and class of the files in a folder; the key of a file is its name from the character `key_start` on."""

    split: str
    class_name: str | None
    key_start: int


def _role(folder: str, only_split: str | None) -> _FolderRole:
    """Return the role of a folder ("" or "a/b/"); `only_split` is the split of all files, if the options give it."""
    top, _, below = folder.partition("/")
    if only_split is None and top.lower() in SPLIT_NAMES:
        split, key_start = top, len(top) + 1
    else:
        split, key_start = DEFAULT_SPLIT if only_split is None else only_split, 0
        below = folder
    return _FolderRole(split.lower(), below.partition("/")[0] or None, key_start)


def _classes(
    roles: Mapping[str, _FolderRole], folders: Mapping[str, list[SourceFile]], url: str, noun: str
) -> tuple[str, ...]:
    """Return the sorted class names. Raise ConfigError if only some files have a class, or a name is not UTF-8."""
    names = {role.class_name for role in roles.values()}
    if None in names and len(names) > 1:
        flat_folders = [folder for folder, role in roles.items() if role.class_name is None]
        first_file = min(file.name for folder in flat_folders for file in folders[folder])
        raise ConfigError(
            f"cannot ingest {redact_url(url)}: some {noun} are in class folders and some are not, such as "
            f"{first_file}; move these into a class folder or out of the source"
        )
    for name in names:
        if name is not None and printable(name) != name:
            raise ConfigError(
                f"cannot ingest {redact_url(url)}: the class folder {printable(name)} is not UTF-8; rename it"
            )
    return tuple(sorted(name for name in names if name is not None))
