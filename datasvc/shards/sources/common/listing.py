"""Lists the files of a source on any fsspec URL.

A link that leads out of the source is an error: an ingest reads no file outside the folder that its user named.
Hidden files are left out and counted; `file_checks` says what is hidden.
"""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from fsspec import AbstractFileSystem
from fsspec.implementations.local import LocalFileSystem

from datasvc.durable import target_outside
from datasvc.errors import ConfigError, NotFoundError
from datasvc.repository.marker import MARKER
from datasvc.repository.store.redaction import redact_url
from datasvc.repository.store.retries import map_exceptions
from datasvc.repository.store.urls import resolve_url, split_existing
from datasvc.shards.sources.common.file_checks import check_complete, hidden_label, hidden_part, is_hidden_name
from datasvc.shards.sources.common.streams import COMPRESSIONS

_BRACES = re.compile(r"\{([^{}]*)\}")
_MAX_DIGITS = 18  # of a number in a range
_RANGE = re.compile(r"(\d+)\.\.(\d+)")
_MAX_EXPANDED = 1_000_000
# Names that stores give to a value that changes with the content of a file.
_STAMPS = ("ETag", "etag", "md5Hash", "mtime", "LastModified", "last_modified", "created", "blob_id", "xet_hash")


class SourceFile(NamedTuple):
    """A file of a source, as listed.

    Attributes:
        name: path below the source's root, with forward slashes; the file name for a single file.
        path: path on the source's file system.
        stamp: modification time or entity tag; another value means that the file may have changed.
    """

    # A tuple and not a dataclass, to save memory: a listing may have millions of files.

    name: str
    path: str
    size_bytes: int
    stamp: str

    @property
    def extension(self) -> str:
        """The lower-case extension without that of a compression: ".tar" for "a.TAR.gz"."""
        return extension_of(self.name)

    @property
    def is_compressed(self) -> bool:
        """Whether the file is compressed as a whole, by its name."""
        return self.name.lower().endswith(tuple(COMPRESSIONS))


def extension_of(name: str) -> str:
    """Return the lower-case extension of a file name without that of a compression."""
    base, last = os.path.splitext(name.lower())
    return os.path.splitext(base)[1] if last in COMPRESSIONS else last


class Listing(list[SourceFile]):
    """The files of a source, ordered by name, without hidden ones.

    Attributes:
        hidden: hidden files and folders that were left out, as results of `hidden_part`.
        is_whole: whether the URL names all files of a folder or pattern, and not a choice of them.
    """

    def __init__(self, files: Iterable[SourceFile], hidden: Iterable[str] = (), *, is_whole: bool = True) -> None:
        super().__init__(files)
        self.hidden = set(hidden)
        self.is_whole = is_whole

    def unused(self, used: Iterable[SourceFile]) -> Counter[str]:
        """Return the number of files that are not in `used`, for `Source.ignored`.

        Raise ConfigError if names show that a file is missing or incomplete, see `check_complete`.
        """
        used_files = set(used)
        others = [file for file in self if file not in used_files]
        if self.is_whole:
            check_complete([file.name for file in used_files], [file.name for file in others], self.hidden)
        return Counter(file.extension or "(none)" for file in others) + Counter(map(hidden_label, self.hidden))


def list_files(url: str) -> Listing:
    """Return the files at `url`: a file, a folder, a `*` pattern, or brace notation. What exists is taken as written.

    Hidden files and folders, and those whose names start with an underscore, are left out unless `url` names them.

    Raises:
        NotFoundError: there is no file at `url`, or a file that brace notation names is missing.
        ConfigError: a link is not valid, see `find_files`; a range in braces is not valid; or the URL has no driver.
        UnavailableError: the store does not respond.
    """
    expanded = expand_braces(url)
    if len(expanded) == 1:
        return _list_one(expanded[0])
    listings = [_list_one(single_url) for single_url in expanded]
    files = _named_from_one_root([file for listing in listings for file in listing])
    hidden = {part for listing in listings for part in listing.hidden}
    return Listing(files, hidden, is_whole=all(listing.is_whole for listing in listings))


def expand_braces(text: str) -> list[str]:
    """Expand brace notation: `a-{00..02}.tar` gives three texts, `{x,y}` two, in this order.

    Braces in the names of existing local files and folders are not expanded. Raise ConfigError if a range runs
    backwards, or if there are more than a million texts.
    """
    existing, pattern = split_existing(text)
    return [existing + expanded for expanded in _expand(pattern)]


def _expand(text: str) -> list[str]:
    """Expand brace notation; for errors, see `expand_braces`."""
    groups = [(match.span(), _choices(match[1])) for match in _BRACES.finditer(text)]
    # Count first: a list of all texts could need more memory than the machine has.
    num_texts = math.prod(len(choices) for _, choices in groups)
    if num_texts > _MAX_EXPANDED:
        raise ConfigError(
            f"{redact_url(text)} names {num_texts} files; expected at most {_MAX_EXPANDED}; use smaller ranges"
        )
    expanded, stop = [""], 0
    for (start, end), choices in groups:
        expanded = [f"{prefix}{text[stop:start]}{choice}" for prefix in expanded for choice in choices]
        stop = end
    texts = [f"{prefix}{text[stop:]}" for prefix in expanded]
    if not groups:
        return texts
    # Only the innermost braces are expanded yet, so expand those around them.
    return [complete for partly in texts for complete in _expand(partly)]


def _list_one(url: str) -> Listing:
    """Return the files at a URL without braces, ordered by name. For errors, see `list_files`."""
    file_system, root = resolve_url(url)
    is_local = isinstance(file_system, LocalFileSystem)
    # In each case, names are relative to a folder: `base` for files and patterns, `root` for a folder.
    with map_exceptions("list", redact_url(url)):
        # Test for a file and a folder before a pattern, because their names may have the signs of a pattern, and a
        # question mark may start the query of a web address.
        if file_system.isfile(root):
            base, infos = root.rpartition("/")[0], {root: file_system.info(root)}
        elif file_system.isdir(root):
            found, hidden = find_files(file_system, root, underscores=True)
            return Listing(sorted(found, key=lambda file: file.name), hidden)
        elif any(sign in root for sign in "*?["):
            # The names begin after the last folder without a pattern.
            existing, pattern = split_existing(root) if is_local else ("", root)
            base = (existing + re.split(r"[*?\[]", pattern, maxsplit=1)[0]).rpartition("/")[0]
            escaped = re.sub(r"([*?\[])", r"[\1]", existing)
            matched = file_system.glob(escaped + pattern, detail=True)
            # A local link has a type of its own, and is not silently left out.
            infos = {
                path: info
                for path, info in matched.items()
                if info["type"] == "file" or (is_local and os.path.islink(path) and not os.path.isdir(path))
            }
            if not infos:
                raise NotFoundError(f"no file matches {redact_url(url)}; check the pattern")
        else:
            raise NotFoundError(f"there is no file or folder at {redact_url(url)}; check the URL")
    # A pattern that names hidden files, such as `.cache/*.tar`, finds them.
    is_named = root in infos or hidden_part(root[len(base) :].lstrip("/"), underscores=True)
    hidden_parts = {
        path: None if is_named else hidden_part(path[len(base) :].lstrip("/"), underscores=True) for path in infos
    }
    visible = [path for path, part in hidden_parts.items() if part is None]
    # A file that the URL itself names may be a link out of its folder, but not one that a pattern finds.
    if is_local and [*infos] != [root]:
        check_inside(base, visible)
    files = []
    for path in visible:
        name = path[len(base) :].lstrip("/")
        if is_local:
            status = os.stat(path)  # of the target of a link, since the target is what is read
            files.append(SourceFile(name, path, status.st_size, str(status.st_mtime_ns)))
        else:
            # Without the query of a web address, which may contain a secret.
            name, info = name.partition("?")[0] or name, infos[path]
            files.append(SourceFile(name, path, int(info["size"]), _stamp_of(info)))
    found_parts = {part for part in hidden_parts.values() if part is not None}
    return Listing(sorted(files, key=lambda file: file.name), found_parts, is_whole="*" in root[len(base) :])


def stat_file(file_system: AbstractFileSystem, path: str, location: str) -> tuple[int, str]:
    """Return the present size and stamp of a file; `location` names it in messages.

    Raises NotFoundError or UnavailableError.
    """
    with map_exceptions("read", location):
        if isinstance(file_system, LocalFileSystem):
            status = os.stat(path)
            return status.st_size, str(status.st_mtime_ns)
        file_system.invalidate_cache()  # a driver would answer from its last listing
        info = file_system.info(path)
        return int(info["size"]), _stamp_of(info)


def find_files(
    file_system: AbstractFileSystem, root: str, *, underscores: bool = False, with_hidden: bool = False
) -> tuple[list[SourceFile], set[str]]:
    """Return every file below the folder `root`, unordered, and the hidden files and folders that were left out.

    The files of a datasvc repository are left out too. `underscores`: see `hidden_part`. `with_hidden`: return hidden
    files as well, except invalid links.

    Raises:
        ConfigError: a link leads out of the folder, to a missing file, or back to a parent folder.
        OSError: the folder cannot be listed; the caller maps it.
    """
    hidden: set[str] = set()
    if isinstance(file_system, LocalFileSystem):
        files = list(_find_local(root, hidden, underscores=underscores, with_hidden=with_hidden))
    else:
        files = []
        for path, info in file_system.find(root, detail=True).items():
            name = path[len(root) :].lstrip("/")
            part = None if with_hidden else hidden_part(name, underscores=underscores)
            if part is None:
                files.append(SourceFile(name, path, int(info["size"]), _stamp_of(info)))
            else:
                hidden.add(part)
    # `endswith` first: it is cheaper than splitting the name, and false for nearly all files.
    markers = [file.name for file in files if file.name.endswith(MARKER) and is_marker(file.name)]
    if not markers:
        return files, hidden
    repository_folders = tuple(marker.removesuffix(MARKER) for marker in markers)  # "" is the root
    return [file for file in files if not file.name.startswith(repository_folders)], hidden


def _find_local(root: str, hidden: set[str], *, underscores: bool, with_hidden: bool) -> Iterator[SourceFile]:
    """Yield every file below a local folder, about ten times faster than fsspec; add hidden names to `hidden`."""
    real_root = os.path.realpath(root)
    # Folders to list: path, prefix of the names in it, whether it is hidden, and the real paths from the root down to
    # the folder.
    pending: list[tuple[str, str, bool, tuple[str, ...]]] = [(root, "", False, (real_root,))]
    while pending:
        folder, prefix, in_hidden, parents = pending.pop()
        with os.scandir(folder) as entries:
            for entry in entries:
                # This test comes before those of links: it needs no other system call.
                is_plain_file = entry.is_file(follow_symlinks=False)
                is_hidden = is_hidden_name(entry.name) or (underscores and entry.name.startswith("_"))
                if is_hidden and not with_hidden:
                    # Not followed: a link in a hidden folder may lead anywhere, and must not stop an ingest.
                    hidden.add(f"{prefix}{entry.name}{'' if is_plain_file or entry.is_file() else '/'}")
                    continue
                is_hidden = is_hidden or in_hidden
                try:
                    if not is_plain_file and entry.is_symlink():
                        check_inside(real_root, [entry.path])
                    if is_plain_file or entry.is_file():
                        status = entry.stat()  # of the target of a link, since the target is what is read
                        yield SourceFile(prefix + entry.name, entry.path, status.st_size, str(status.st_mtime_ns))
                    elif entry.is_dir():
                        real = os.path.realpath(entry.path) if entry.is_symlink() else f"{parents[-1]}/{entry.name}"
                        if real in parents:
                            raise ConfigError(  # noqa: TRY301
                                f"{entry.path} is a link to one of its parent folders; remove this link"
                            )
                        pending.append((entry.path, f"{prefix}{entry.name}/", is_hidden, (*parents, real)))
                except ConfigError:
                    if not is_hidden:
                        raise


def check_inside(root: str, paths: Sequence[str]) -> None:
    """Raise ConfigError if the target of one of the local `paths` is outside `root` or does not exist."""
    for path in paths:
        if (target := target_outside(root, path)) is not None:
            raise ConfigError(
                f"{path} is a link out of the source, to {target}; copy it into the source, or ingest that folder too"
            )
        if not os.path.exists(path):
            raise ConfigError(f"{path} is a link to {os.path.realpath(path)}, which does not exist; remove the link")


def is_marker(name: str) -> bool:
    """Return whether the file `name` marks its folder as a repository, whose files are not part of a source."""
    return name.rpartition("/")[2] == MARKER


def find_below(url: str, *, with_hidden: bool = False) -> tuple[dict[str, SourceFile], str, Counter[str]]:
    """Return all files below the folder `url` by relative path, the folder's path, and the number of hidden files.

    If `url` is a file, a pattern or brace notation, return the result of `list_files` by name, and its folder. For
    `with_hidden`, see `find_files`.

    Raises:
        NotFoundError: there is no file or folder at `url`.
        ConfigError: see `list_files`.
        UnavailableError: the store does not respond.
    """
    file_system, root = resolve_url(url)
    with map_exceptions("list", redact_url(url)):
        if file_system.isdir(root):
            found, hidden = find_files(file_system, root, with_hidden=with_hidden)
            return {file.name: file for file in found}, root, Counter(map(hidden_label, hidden))
    files = list_files(url)
    # The names of all files are relative to the same folder, so take it from the first file.
    folder = files[0].path.removesuffix(files[0].name).rstrip("/") if files else root
    return {file.name: file for file in files}, folder, Counter(map(hidden_label, files.hidden))


def _named_from_one_root(files: list[SourceFile]) -> list[SourceFile]:
    """Return the files with names below their common folder: `{train,val}/0.tar` gives two different names."""
    # The common prefix is cut at a folder; `commonpath` would turn "http://" into "http:/".
    root = os.path.commonprefix([file.path for file in files]).rpartition("/")[0]  # noqa: RUF071
    return [file._replace(name=file.path[len(root) :].lstrip("/")) for file in files]


def _stamp_of(info: dict[str, Any]) -> str:
    """Return a value from a store's listing that differs if the content of the file differs; "" if there is none."""
    return next((str(info[name]) for name in _STAMPS if info.get(name) is not None), "")


def _choices(inner: str) -> Sequence[str]:
    """Return the texts that `inner`, the text between two braces, stands for."""
    match = _RANGE.fullmatch(inner)
    if match is None:
        return inner.split(",")
    first, last = match.groups()
    if max(len(first), len(last)) > _MAX_DIGITS:  # Python refuses to convert thousands of digits
        raise ConfigError(f"the range {{{inner[:40]}...}} has numbers of more than {_MAX_DIGITS} digits")
    if int(first) > int(last):
        raise ConfigError(f"the range {{{inner}}} runs backwards; write the smaller number first")
    if int(last) - int(first) >= _MAX_EXPANDED:
        raise ConfigError(f"the range {{{inner}}} has more than {_MAX_EXPANDED} numbers; use smaller ranges")
    return [f"{number:0{len(first)}d}" for number in range(int(first), int(last) + 1)]
