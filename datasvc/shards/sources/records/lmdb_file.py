"""An LMDB file, opened to be read without trusting it.

LMDB maps files into memory and dies (SIGBUS) where a file is shorter than it says, so its size is checked before
each use. A database is open while a batch is read and no longer: one process may open it once only, parts are read
side by side, and pages that stay mapped would count as the worker's memory.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import lmdb

from datasvc.errors import ConfigError, CorruptDataError
from datasvc.repository.store.retries import map_exceptions
from datasvc.shards.sources.common.source import BATCH_BYTES

_MAGIC: Final = (0xBEEFC0DE).to_bytes(4, "little")
_MAGIC_OFFSETS: Final = (16, 24)  # behind the page header of LMDB 0.9, of 1.0
# py-lmdb refuses to open a file twice in one process.
_open_once = threading.Lock()


def read_pairs(path: str, start: bytes, count: int, *, skip_first: bool) -> list[tuple[bytes, bytes]]:
    """Return up to `count` keys and values, copied, from the first key that is not below `start`.

    They take up to `BATCH_BYTES`, or are one.
    """
    pairs: list[tuple[bytes, bytes]] = []
    size_bytes = 0
    with open_lmdb(path) as env, env.begin(buffers=True) as txn, txn.cursor() as cursor:
        is_found = cursor.set_range(start)
        if is_found and skip_first and bytes(cursor.key()) == start:
            is_found = cursor.next()
        while is_found and len(pairs) < count and size_bytes < BATCH_BYTES:
            pairs.append((bytes(cursor.key()), bytes(cursor.value())))
            size_bytes += len(pairs[-1][1])
            is_found = cursor.next()
    return pairs


@contextmanager
def open_lmdb(path: str) -> Iterator[lmdb.Environment]:
    """Open a database for reading.

    Raises:
        ConfigError: it is no LMDB, or this process has it open elsewhere.
        CorruptDataError: it is cut off or damaged.
    """
    with map_exceptions("open", path), open(path, "rb") as opened:
        head = opened.read(64)
    if not any(head[offset : offset + 4] == _MAGIC for offset in _MAGIC_OFFSETS):
        raise ConfigError(f"{path} is no LMDB: it starts with {head[:24]!r}; expected a data file of a database")
    with _open_once:
        try:
            with lmdb.open(path, subdir=False, readonly=True, lock=False, readahead=False, max_dbs=1) as env:
                _check_size(env, path)
                yield env
        except (lmdb.CorruptedError, lmdb.PageNotFoundError, lmdb.PanicError) as error:
            raise CorruptDataError(f"{path} is damaged: {error}; restore another copy") from error
        except lmdb.Error as error:
            raise ConfigError(f"cannot open {path}: {error}") from error


def _check_size(env: lmdb.Environment, path: str) -> None:
    expected = (env.info()["last_pgno"] + 1) * env.stat()["psize"]
    found = os.path.getsize(path)
    if found < expected:
        raise CorruptDataError(f"{path} is cut off: it has {found} bytes of {expected}; restore another copy")
