"""Open LMDB files for their source, so that a damaged or truncated file is an error, never a crash.

A database is open only while one batch is read, for two reasons. A process may open a database only once at a time,
but several threads may read parts of it. The pages of an open database count as memory of the process.
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
_MAGIC_OFFSETS: Final = (16, 24)  # after the page header: 16 bytes in LMDB 0.9, 24 bytes in LMDB 1.0
_open_lock = threading.Lock()  # held while a database is open: a process may open a file only once at a time


def read_pairs(path: str, start: bytes, count: int, *, skip_first: bool) -> list[tuple[bytes, bytes]]:
    """Return copies of up to `count` pairs of key and value, from the first key that is not below `start`.

    Stop earlier when the values reach `BATCH_BYTES`. With `skip_first`, leave out the key `start` itself. For errors,
    see `open_lmdb`.
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
    """Open a database for reading. Other threads wait until it is closed; the same thread must not open a second one.

    Raises:
        ConfigError: the file is not LMDB, or this process has it open elsewhere.
        CorruptDataError: the file is truncated or damaged.
    """
    with map_exceptions("open", path), open(path, "rb") as opened:
        head = opened.read(64)
    if not any(head[offset : offset + 4] == _MAGIC for offset in _MAGIC_OFFSETS):
        raise ConfigError(f"{path} is not LMDB: it starts with {head[:24]!r}; expected a data file of a database")
    with _open_lock:
        try:
            # `max_dbs` is 1 so that `lmdb_database` can test whether a record is a named database.
            with lmdb.open(path, subdir=False, readonly=True, lock=False, readahead=False, max_dbs=1) as env:
                _check_size(env, path)
                yield env
        except (lmdb.CorruptedError, lmdb.PageNotFoundError, lmdb.PanicError) as error:
            raise CorruptDataError(f"{path} is damaged: {error}; restore another copy") from error
        except lmdb.Error as error:
            raise ConfigError(
                f"cannot open {path}: {error}; expected a readable LMDB that this process has not open"
            ) from error


def _check_size(env: lmdb.Environment, path: str) -> None:
    # LMDB maps the file into memory, and the kernel kills a process (SIGBUS) that reads beyond the end of the file.
    expected = (env.info()["last_pgno"] + 1) * env.stat()["psize"]  # number of pages * bytes of a page
    actual = os.path.getsize(path)
    if actual < expected:
        raise CorruptDataError(f"{path} is truncated: it has {actual} bytes of {expected}; restore another copy")
