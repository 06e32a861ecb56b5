"""Which files below a source are its data: rules that hold for every source.

Hidden files belong to an operating system or a tool. The others would give wrong data without an error, so they are
refused: Parquet files of a table whose log tells which rows are valid, a folder in which a numbered file is missing,
an incomplete download, and a pointer or an error page in place of the data.
"""

from __future__ import annotations

import posixpath
import re
from collections import defaultdict
from collections.abc import Collection, Iterable
from typing import Final

from fsspec import AbstractFileSystem

from datasvc.errors import ConfigError
from datasvc.extras import how_to_install

# Names that macOS, Linux, Python, Spark, Synology, QNAP, Windows and tar give to files of their own, in lower case.
# Names with a dot at the start are hidden too.
_SYSTEM_NAMES: Final = frozenset(
    {
        *("__macosx", "icon\r", "lost+found", "__pycache__", "_temporary", "_success"),
        *("@eadir", "#recycle", "#snapshot", "@__thumb", "@recycle"),
        *("thumbs.db", "ehthumbs.db", "desktop.ini", "$recycle.bin", "system volume information"),
        *("paxheader", "paxheaders", "@paxheader"),
    }
)
_PAX_FOLDER: Final = re.compile(r"paxheaders?\.\d+", re.IGNORECASE)
_APPLE_DOUBLE: Final = "._"

_NUMBERED: Final = re.compile(r"(.*?)(\d+)[-_]of[-_](\d+)(?!\d)(.*)")
_HASH: Final = re.compile(r"^-[0-9a-f]{8,}")  # the Hub puts another hash in the name of each file
_UNFINISHED: Final = frozenset(
    {".part", ".partial", ".crdownload", ".download", ".opdownload", ".incomplete", ".filepart", ".aria2", ".tmp"}
)

HEAD_BYTES: Final = 512  # number of first bytes that `check_head` needs
_POINTERS: Final = (
    (b"version https://git-lfs.github.com/spec/", "a pointer of Git LFS; get the data with `git lfs pull`"),
    (b"version https://hawser.github.com/spec/", "a pointer of Git LFS; get the data with `git lfs pull`"),
    (b"# xet version", "a pointer of Xet; get the data with `git xet checkout` or `hf download`"),
    (b"/annex/objects/", "a pointer of git-annex; get the data with `git annex get`"),
)
_ERROR_XML: Final = re.compile(rb"(<\?xml[^>]*>\s*)?<Error>")  # the answer of an object store to a refused request
_HTML: Final = re.compile(
    rb"(<!--.{,200}?-->\s*|<\?xml[^>]*>\s*)?(<!doctype\s+html|<html[\s>])", re.IGNORECASE | re.DOTALL
)
_TEXT: Final = (".csv", ".tsv", ".json", ".jsonl", ".ndjson", ".txt")

# Pictures that a reader of image folders leaves out; phones, cameras and web pages write them.
_HEIC, _GIF = frozenset({".heic", ".heif"}), ".gif"
_UNREAD_PICTURES: Final = _HEIC | {_GIF, ".jxl", ".dng", ".cr2", ".nef", ".arw"}

_TABLE_LOGS: Final = {
    "_delta_log": ("a Delta table", "deltalake.DeltaTable(path).to_pyarrow_dataset()"),
    ".hoodie": ("a Hudi table", 'spark.read.format("hudi").load(path)'),
    "metadata": ("an Iceberg table", "pyiceberg.table.StaticTable.from_metadata(path).scan().to_arrow()"),
}
ICEBERG_METADATA: Final = (".metadata.json", ".metadata.json.gz", "version-hint.text")


def is_hidden_name(name: str) -> bool:
    """Return whether a file or folder of this name is hidden in each source."""
    if name.startswith("."):
        return name not in {".", ".."}
    return name.lower() in _SYSTEM_NAMES or _PAX_FOLDER.fullmatch(name) is not None


def hidden_part(path: str, *, underscores: bool = False) -> str | None:
    """Return the first hidden folder (with a slash at its end) or file in a path below the source's root, else None.

    `underscores`: names with an underscore at the start are hidden too, as in tables of Spark and Hive. In image
    folders they are data: cameras name their pictures `_DSC0001.jpg`.
    """
    names = path.split("/")
    for number, name in enumerate(names, start=1):
        if is_hidden_name(name) or (underscores and name.startswith("_")):
            return "/".join(names[:number]) + ("/" if number < len(names) else "")
    return None


def hidden_label(part: str) -> str:
    """Return the text under which `Source.ignored` counts a result of `hidden_part`."""
    name = part.rstrip("/").rpartition("/")[2]
    return "hidden ._*" if name.startswith(_APPLE_DOUBLE) else f"hidden {name}{'/' if part.endswith('/') else ''}"


def unread_pictures(extensions: Collection[str]) -> str:
    """Return what to do about pictures that are left out, as a clause; "" if there are none among `extensions`."""
    unread = sorted(_UNREAD_PICTURES.intersection(extensions))
    if not unread:
        return ""
    ways = [f"for HEIC, {how_to_install('heic')}"] if _HEIC.intersection(unread) else []
    ways += ["for the first frame of each GIF, --first-frame (first_frame=True)"] if _GIF in unread else []
    ways += ["convert them to PNG or JPEG"]
    return f"pictures in {' and '.join(unread)} are not read: {'; or '.join(ways)}"


def check_complete(used: Iterable[str], others: Iterable[str], hidden: Iterable[str]) -> None:
    """Raise ConfigError if names show that files of a folder are missing or incomplete.

    `used` are the files that hold the samples, `hidden` results of `hidden_part`.
    """
    numbers: defaultdict[tuple[str, int, str], set[int]] = defaultdict(set)
    examples: dict[tuple[str, int, str], str] = {}
    used, others = set(used), list(others)
    # A file without samples is not used, but it is not missing either.
    for name in [*used, *others]:
        folder, base = posixpath.split(name)
        match = _NUMBERED.fullmatch(base)
        if match:
            group = (f"{folder}/{match[1]}", int(match[3]), _HASH.sub("", match[4]))
            numbers[group].add(int(match[2]))
            if name in used:
                examples[group] = name
    for group, example in examples.items():
        total, found = group[1], numbers[group]
        # Most programs count from 0, some from 1.
        first = 0 if 0 in found or total not in found else 1
        missing = [number for number in range(first, first + min(total, 2 * len(found) + 10)) if number not in found]
        if total > len(found):
            raise ConfigError(
                f"the name of {example} announces {total} files, of which {total - len(found)} are missing, "
                f"such as number {missing[0]:05d}; copy or download them too, or name the files to ingest in braces, "
                f"such as {{{example},...}}"
            )
    extensions = {posixpath.splitext(name)[1].lower() for name in used}
    for name in others:
        stem, suffix = posixpath.splitext(name)
        if suffix.lower() in _UNFINISHED and posixpath.splitext(stem)[1].lower() in extensions:
            raise ConfigError(f"{name} is an unfinished download or copy; finish it, or remove the file")
    for part in hidden:
        if part.endswith("_temporary/"):
            raise ConfigError(
                f"{part} shows that a job of Spark has not finished writing; run it again, or remove it"
            )


def check_head(name: str, head: bytes) -> None:
    """Raise ConfigError if the first `HEAD_BYTES` of a file show that it does not hold the data of its name."""
    reason = foreign_content(head)
    extension = posixpath.splitext(name.lower())[1]
    # A page may be a document to train on, but never a table.
    if reason is None and extension != ".txt" and _HTML.match(head.lstrip(b"\xef\xbb\xbf \t\r\n")):
        reason = "a web page, such as that of a login or an error; download the file again"
    if reason is None and extension in _TEXT and head and not head.strip(b"\0"):
        reason = "full of zero bytes: a copy or download was interrupted; copy the file again"
    if reason is not None:
        raise ConfigError(f"{name} is {reason}")


def foreign_content(head: bytes) -> str | None:
    """Return what a file is whose first bytes are `head`, if it is a pointer or an error, and the way out."""
    for start, reason in _POINTERS:
        if head.startswith(start):
            return reason
    if _ERROR_XML.match(head.lstrip(b"\xef\xbb\xbf \t\r\n")):
        return "the error message of an object store; download the file again"
    return None


def check_no_table_log(file_system: AbstractFileSystem, root: str, paths: Iterable[str]) -> None:
    """Raise ConfigError if Parquet files belong to a table whose log says which files and rows are valid."""
    folders = {root} | {posixpath.dirname(path) for path in paths}
    # The log is in the folder of the table, above its partitions and above the folder `data` of Iceberg.
    seen: set[str] = set()
    while folders:
        folder = folders.pop()
        name = posixpath.basename(folder)
        above = folder != root or "=" in name or name == "data"
        if above and (parent := posixpath.dirname(folder)) not in seen | {"", folder}:
            folders.add(parent)
        if folder in seen or "=" in name:
            continue
        seen.add(folder)
        for log, (table, read) in _TABLE_LOGS.items():
            if not _is_folder(file_system, f"{folder}/{log}"):
                continue
            names = file_system.ls(f"{folder}/metadata", detail=False) if log == "metadata" else []
            if log != "metadata" or any(str(name).endswith(ICEBERG_METADATA) for name in names):
                raise ConfigError(
                    f"{folder} is {table}: its files hold rows that were deleted or replaced, and its {log} tells "
                    f"which. Read the current rows with {read}, write them as Parquet to another folder, ingest that"
                )


def _is_folder(file_system: AbstractFileSystem, path: str) -> bool:
    try:
        return bool(file_system.isdir(path))
    except ValueError:  # the driver of hf:// has names that no repository can have
        return False
