"""Source of LMDB databases on a local disk: Caffe's databases, and plain keys and values.

In Caffe's databases, each value is a Datum: a message of one image or tensor and its label. An encoded image, or
bytes in 1 or 3 channels, gives the columns `image` and `label`; any other Datum gives the tensor `data` and `label`.
In other databases, the values give the column `image` if the first values are all images, else the column `value`.
Values are never unpickled, because unpickling can run code that the database contains.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import filterfalse, islice
from typing import Any, ClassVar, Final

import lmdb
import numpy as np
import pyarrow as pa

from datasvc.errors import BadSampleError, ConfigError, CorruptDataError, NotFoundError
from datasvc.printable import count_text
from datasvc.repository.store.redaction import redact_url
from datasvc.repository.store.retries import map_exceptions
from datasvc.shards.format.schema import IMAGE, KEY, LABEL, image_field
from datasvc.shards.sources.common.columns import looks_like_image, to_batches
from datasvc.shards.sources.common.file_checks import is_hidden_name
from datasvc.shards.sources.common.files import FileReader
from datasvc.shards.sources.common.listing import check_inside
from datasvc.shards.sources.common.options import SourceOptions, split_of_file
from datasvc.shards.sources.common.source import BATCH_BYTES, BATCH_SAMPLES, BadSample, FileSource, SourcePart
from datasvc.shards.sources.common.tensors import tensor_field
from datasvc.shards.sources.records.caffe import datum_image, datum_values, is_datum, parse_datum

DATA_FILE: Final = "data.mdb"
_VALUE, _DATA = "value", "data"
_EXTENSIONS: Final = (".lmdb", ".mdb")
_LOCK_FILE: Final = "lock.mdb"
# LMDB stores each named database as one record of the unnamed database; this is the size of such a record.
_NAMED_RECORD_BYTES: Final = 48
_FIRST_VALUES: Final = 8  # number of first values, which determine the columns
# Limits of one part.
_PART_BYTES: Final = 64 << 20
_PART_SAMPLES: Final = 1 << 14


_MAGIC: Final = (0xBEEFC0DE).to_bytes(4, "little")
_MAGIC_OFFSETS: Final = (16, 24)  # after the page header: 16 bytes in LMDB 0.9, 24 bytes in LMDB 1.0
_open_lock = threading.Lock()  # held while a database is open: a process may open a file only once at a time


@dataclass(frozen=True, kw_only=True)
class LmdbSource(FileSource):
    """One database, or a folder of several such as `ilsvrc12_train_lmdb`. Parts are ranges of keys."""

    kind: ClassVar[str] = "lmdb"

    @classmethod
    def list(cls, url: str, options: SourceOptions | None = None) -> LmdbSource:
        """List the source by one pass over its keys. For other errors, see `FileSource.list`.

        Raises:
            ConfigError: the source is remote, has named databases or several values of a key; or its columns differ.
        """
        options = options or SourceOptions()
        reader = FileReader(url)
        if not reader.is_local:
            raise ConfigError(
                f"cannot ingest {redact_url(url)}: LMDB maps its file into memory, which only a local disk allows; "
                "copy the database to this machine first"
            )
        paths = _find_databases(reader.root)
        splits = {name: split_of_file(name, options) for name in paths}
        num_in_split = Counter(splits.values())
        schema: pa.Schema | None = None
        parts: list[SourcePart] = []
        for name, path in paths.items():
            split = splits[name]
            # Databases of one split may hold equal keys, so the database's name becomes a prefix of the key.
            prefix = f"{name}/" if num_in_split[split] > 1 else ""
            first_values, database_parts = _list_parts(name, path, split, prefix)
            if not first_values:
                continue  # an empty database has no columns to compare
            database_schema = _schema_of(first_values)
            if schema is not None and not database_schema.equals(schema, check_metadata=True):
                raise ConfigError(
                    f"cannot ingest {redact_url(url)}: {name} has the columns {database_schema.names}, other "
                    f"databases {schema.names}, or their types differ; ingest them as separate data sets"
                )
            schema = database_schema
            parts += database_parts
        if schema is None:
            raise NotFoundError(f"cannot ingest {redact_url(url)}: the database is empty; expected at least one key")
        return cls(url=url, schema=schema, parts=parts)

    def read(self, part: SourcePart) -> Iterator[pa.RecordBatch | BadSample]:
        """Yield the samples of a range of keys; see `StreamedSource.read`."""
        return to_batches(self.schema, part, _read_range(part), self._sample)

    def _sample(self, key: str, value: bytes) -> dict[str, Any]:
        """Return a sample by column. Raise BadSampleError if the value is not like the first ones."""
        # Only Caffe's databases have labels. Any other database has one column beside the key: `image` or `value`.
        if LABEL not in self.schema.names:
            return {KEY: key, self.schema.names[1]: value}
        datum = parse_datum(value)
        if IMAGE in self.schema.names:
            return {KEY: key, IMAGE: datum_image(datum), LABEL: datum.label}
        expected = self.schema.field(_DATA)
        values = datum_values(datum)
        if not tensor_field(_DATA, values.dtype, datum.shape).equals(expected, check_metadata=True):
            raise BadSampleError(f"it is {values.dtype}{list(datum.shape)}; expected {expected.type} like the first")
        # For a single value, `tensor_field` makes a scalar column.
        return {KEY: key, _DATA: values if values.size > 1 else values.item(), LABEL: datum.label}


def _read_range(part: SourcePart) -> Iterator[tuple[str, bytes | BadSampleError]]:
    """Yield key and value of the samples of a part. Raise CorruptDataError if the database has fewer samples."""
    start = bytes.fromhex(part.where["start"])
    skip_first = False
    num_left = part.num_samples or 0
    while num_left:
        problem = "the database has fewer keys than when it was listed"
        try:
            pairs = read_pairs(part.where["path"], start, min(num_left, BATCH_SAMPLES), skip_first=skip_first)
        except CorruptDataError as error:
            pairs, problem = [], str(error)
        if not pairs:
            raise CorruptDataError(f"{count_text(num_left, 'sample')} cannot be read: {problem}")
        for key, value in pairs:
            if part.where["hex_keys"]:
                yield part.where["prefix"] + key.hex(), value
            elif _is_utf8(key):
                yield part.where["prefix"] + key.decode(), value
            else:
                reason = "its key is not UTF-8 (shown in hexadecimal), but the first key is"
                yield part.where["prefix"] + key.hex(), BadSampleError(reason)
        # The database is closed between two reads, so the next one starts at the last key and skips it.
        start, skip_first = pairs[-1][0], True
        num_left -= len(pairs)


def _find_databases(root: str) -> dict[str, str]:
    """Return the path of the data file of each database, by the name of its folder or file."""
    with map_exceptions("open", root):
        if os.path.isfile(os.path.join(root, DATA_FILE)):
            return {os.path.basename(root): os.path.join(root, DATA_FILE)}
        if not os.path.isdir(root):
            os.stat(root)  # raises the error of a path that does not exist
            return {os.path.basename(root): root}
        paths = {}
        for name in sorted(filterfalse(is_hidden_name, os.listdir(root))):
            path = os.path.join(root, name)
            if os.path.isfile(os.path.join(path, DATA_FILE)):
                paths[name] = os.path.join(path, DATA_FILE)
            elif os.path.isfile(path) and name.endswith(_EXTENSIONS) and name != _LOCK_FILE:
                paths[name] = path
    if not paths:
        raise NotFoundError(f"no LMDB database in {root}: expected {DATA_FILE} there or one folder below")
    check_inside(root, list(paths.values()))  # refuses links to files outside the source
    return paths


def _list_parts(name: str, path: str, split: str, prefix: str) -> tuple[list[bytes], list[SourcePart]]:
    """Return the first values of a database and its parts, by one pass over its keys; [] and [] if it is empty."""
    with open_lmdb(path) as env, env.begin(buffers=True) as txn:
        if env.open_db(None, txn=txn).flags(txn)["dupsort"]:  # type: ignore[call-arg]  # missing in its stub
            raise ConfigError(f"{path} has several values of one key (DUPSORT); write each under its own key")
        statistics = env.stat()
        num_samples = int(statistics["entries"])
        if not num_samples:
            return [], []
        # LMDB stores no sizes: assume that the pages are shared equally by the samples.
        num_pages = sum(statistics[count] for count in ("branch_pages", "leaf_pages", "overflow_pages"))
        sample_bytes = -(-num_pages * statistics["psize"] // num_samples)  # rounded up
        samples_per_part = max(1, min(_PART_SAMPLES, _PART_BYTES // sample_bytes))
        starts = _scan_keys(env, txn, samples_per_part, num_samples, path)
        first_pairs = [(bytes(key), bytes(value)) for key, value in islice(txn.cursor(), _FIRST_VALUES)]
        stamp = f"{os.stat(path).st_mtime_ns}-{env.info()['last_txnid']}"  # changes when the database is written
    # The first key decides for all keys: if it is not UTF-8, they become hexadecimal text.
    where = {"path": path, "prefix": prefix, "hex_keys": not _is_utf8(first_pairs[0][0])}
    parts = []
    for number, start in enumerate(starts):
        count = min(samples_per_part, num_samples - number * samples_per_part)
        part_where = {**where, "start": start.hex()}
        parts.append(SourcePart(split, f"{name}#{number}", count * sample_bytes, count, stamp, part_where))
    return [value for _, value in first_pairs], parts


def _scan_keys(
    env: lmdb.Environment, txn: lmdb.Transaction, samples_per_part: int, num_samples: int, path: str
) -> list[bytes]:
    """Return the first key of each part. Only the sizes of the values are read."""
    starts, count = [], 0
    for key, value in txn.cursor():
        # Only a record of this size can be a named database, so `_is_named_database` is called for few keys.
        if len(value) == _NAMED_RECORD_BYTES and _is_named_database(env, txn, bytes(key)):
            raise ConfigError(
                f"{path} holds named databases, such as {bytes(key)!r}; datasvc reads only the unnamed one: "
                "copy each of them into a separate database"
            )
        if count % samples_per_part == 0:
            starts.append(bytes(key))
        count += 1
    if count != num_samples:
        raise CorruptDataError(
            f"{path} declares {count_text(num_samples, 'key')} but has {count}; restore another copy"
        )
    return starts


def _is_named_database(env: lmdb.Environment, txn: lmdb.Transaction, key: bytes) -> bool:
    try:
        env.open_db(key, txn=txn, create=False)
    except lmdb.Error:
        return False
    return True


def _schema_of(values: list[bytes]) -> pa.Schema:
    """Return the columns of a database from its first values: Caffe's, `image` or `value`."""
    key = pa.field(KEY, pa.string(), nullable=False)
    if all(map(is_datum, values)):
        datum = parse_datum(values[0])
        label = pa.field(LABEL, pa.int32(), nullable=False)
        if datum.is_image:
            return pa.schema([key, image_field(IMAGE), label])
        dtype = np.float32 if len(datum.floats) else np.uint8
        return pa.schema([key, tensor_field(_DATA, dtype, datum.shape), label])
    if all(map(looks_like_image, values)):
        return pa.schema([key, image_field(IMAGE)])
    return pa.schema([key, pa.field(_VALUE, pa.large_binary(), nullable=False)])


def _is_utf8(key: bytes) -> bool:
    try:
        key.decode()
    except UnicodeDecodeError:
        return False
    return True


# A database is open only while one batch is read, for two reasons. A process may open a database only once at a time,
# but several threads may read parts of it. The pages of an open database count as memory of the process.


def read_pairs(path: str, start: bytes, count: int, *, skip_first: bool) -> list[tuple[bytes, bytes]]:
    """Return copies of up to `count` pairs of key and value, from the first key that is not below `start`.

    Stop earlier when the values reach `BATCH_BYTES`. With `skip_first`, leave out the key `start` itself.
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
