"""Detection of local objects whose bytes changed on the disk, before a writer references them again.

A writer that finds its object in the store references it instead of writing it (`Objects.reuse`). But the file may
have changed since it was stored, at the same size. So the writer hashes the file first, once per process; it reads at
most the bytes that it would otherwise write. A file that is damaged or unreadable is written again. For remote
objects only the size is compared, because hashing needs a download, and object stores check the bytes that they keep.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
from pathlib import Path
from typing import Final

from datasvc import durable
from datasvc.errors import ConfigError, UnavailableError
from datasvc.repository.store.retries import map_exceptions

logger = logging.getLogger(__name__)

QUARANTINE: Final = "quarantine"
# Maximum number of files in `_verified_ns`, some 50 MB. A full table is cleared, and files are hashed again.
_MAX_VERIFIED: Final = 1 << 19
# Errors that do not mean that the file is damaged: of the path, and of the resources of this machine.
_NOT_DAMAGE: Final = (FileNotFoundError, NotADirectoryError, PermissionError)
_RESOURCE_ERRNOS: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})

# For each file, by the hash of its path: its modification time when this process last wrote or hashed it.
# `refresh` only increases the time of a file, so an earlier time means that the file was replaced.
_verified_ns: dict[int, int] = {}
_DAMAGED_NS: Final = 1 << 63  # of a damaged or unknown file: later than the time of any file


def mark_intact(path: Path) -> None:
    """Remember that this process wrote or hashed the file. Does nothing if the file no longer exists."""
    try:
        changed_ns = path.stat().st_mtime_ns
    except OSError:
        return
    if len(_verified_ns) >= _MAX_VERIFIED:
        _verified_ns.clear()
    _verified_ns[hash(str(path))] = changed_ns


def is_known_intact(path: Path) -> bool:
    """Return whether this process wrote or hashed the file, and no file with an earlier time has replaced it."""
    try:
        return _verified_ns.get(hash(str(path)), _DAMAGED_NS) <= path.stat().st_mtime_ns
    except OSError:
        return False


def keep_aside(root: Path, path: Path) -> Path:
    """Link, or else move, the damaged file of an object into the repository's folder `quarantine`; return its path.

    Raises ConfigError or UnavailableError if that folder cannot be written; the object is unchanged.
    """
    kept = root / QUARANTINE / f"{path.name}.{secrets.token_hex(4)}"
    with map_exceptions("keep", str(kept)):
        durable.make_folder(kept.parent)
        try:
            os.link(path, kept)
        except PermissionError:  # the file system has no hard links, or `path` is a folder
            path.rename(kept)
        durable.fsync_folder(kept.parent)
    return kept


def is_damage(error: OSError) -> bool:
    """Return whether a read error means that the file is damaged, such as an error of a bad disk sector."""
    return not isinstance(error, _NOT_DAMAGE) and error.errno not in _RESOURCE_ERRNOS


def report_damage(root: Path, path: Path, failure: OSError | None = None) -> None:
    """Keep the bytes of a damaged object in the folder `quarantine`, and log a warning; once per object and process.

    The damaged file also keeps its name, so that nothing is lost if the caller fails to write the object again.
    `failure` is the error of the read; None if the bytes could be read, but do not match the digest.
    """
    # Only this function stores `_DAMAGED_NS`, so this value means that the object was reported before.
    if _verified_ns.get(hash(str(path))) == _DAMAGED_NS:
        return
    _verified_ns[hash(str(path))] = _DAMAGED_NS
    try:
        outcome = f"the bad bytes are kept at {keep_aside(root, path)}"
    except (ConfigError, UnavailableError) as error:
        outcome = f"the bad bytes are not kept: {error}"
    damage = "does not match its digest, although its size is right: its bytes changed on the disk"
    if failure is not None:
        damage = f"cannot be read ({failure}): the disk or its file system is damaged"
    logger.warning(
        "%s %s. It is replaced by the bytes that are stored now; %s. Run `verify`: other objects may be damaged too",
        path,
        damage,
        outcome,
    )
