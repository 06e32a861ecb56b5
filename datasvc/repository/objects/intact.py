"""Which local objects this process wrote or hashed: a file that it did not may have rotted at the same size.

A writer that comes upon an object names it again instead of writing it, and it has the right bytes in hand. So it
hashes the file first, once per process: at most it reads what it would have written otherwise. A file that the disk
cannot read is written anew too. Object stores check
the bytes that they keep by themselves; of a remote object the size alone is compared, as its bytes are a download.
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
# Some 50 MB. Beyond it objects are hashed once more.
_MAX_KNOWN: Final = 1 << 19
# They say nothing of the file: it may be whole.
_NOT_THE_FILE: Final = (FileNotFoundError, NotADirectoryError, PermissionError)
_LACKS_OF_THIS_PROCESS: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})

# When a file had last changed as it was known to be good, in nanoseconds, by a hash of its path. A file that was made
# young since then is later; one that is earlier is another file.
_known: dict[int, int] = {}
_NEVER_NS: Final = 1 << 63


def mark_intact(path: Path) -> None:
    """Remember that this process wrote or hashed the file. One that is gone by now is nothing to remember."""
    try:
        changed_ns = path.stat().st_mtime_ns
    except OSError:
        return
    if len(_known) >= _MAX_KNOWN:
        _known.clear()
    _known[hash(str(path))] = changed_ns


def is_known_intact(path: Path) -> bool:
    """Return whether this process wrote or hashed the file, and nobody has put an older one in its place."""
    try:
        return _known.get(hash(str(path)), _NEVER_NS) <= path.stat().st_mtime_ns
    except OSError:
        return False


def keep_aside(root: Path, path: Path) -> Path:
    """Give the bad bytes of an object a second name, in the quarantine of the repository; returns that.

    Raises ConfigError, UnavailableError: the folder cannot be written; the object is as it was.
    """
    kept = root / QUARANTINE / f"{path.name}.{secrets.token_hex(4)}"
    with map_exceptions("keep", str(kept)):
        durable.make_folder(kept.parent)
        try:
            os.link(path, kept)
        except PermissionError:  # no second names on this file system, or none for what is no file
            path.rename(kept)
        durable.fsync_folder(kept.parent)
    return kept


def is_damage(error: OSError) -> bool:
    """Return whether a file that cannot be read is at fault itself, as one with a failing sector is."""
    return not isinstance(error, _NOT_THE_FILE) and error.errno not in _LACKS_OF_THIS_PROCESS


def report_rot(root: Path, path: Path, failure: OSError | None = None) -> None:
    """Keep the bytes of an object that are not those of its name, and log that it is written anew; each once.

    Args:
        root: of the repository.
        path: the object. It keeps its name until the new file replaces it, so a write that fails removes nothing.
        failure: with which it could not be read; None: its bytes are wrong.
    """
    if _known.get(hash(str(path))) == _NEVER_NS:
        return
    _known[hash(str(path))] = _NEVER_NS
    try:
        kept = f"the bad bytes are kept at {keep_aside(root, path)}"
    except (ConfigError, UnavailableError) as error:
        kept = f"the bad bytes are not kept: {error}"
    what = "has other bytes than its name says, though as many: they changed on the disk"
    if failure is not None:
        what = f"cannot be read ({failure}): the disk or its file system is damaged"
    logger.warning(
        "%s %s. It is written anew from the bytes that are stored now; %s. Run `verify`: other objects may have "
        "changed too",
        path,
        what,
        kept,
    )
