"""Source of LMDB databases on a local disk: Caffe's (each value is a Datum), and plain keys and values.

Datums give `image` and `label`; Datums with floats or with other than 1 or 3 channels give the tensor `data` and
`label`. Other values give `image` if all of the first ones are images, else `value`. Values are never unpickled.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, ClassVar, Final

import lmdb
import numpy as np
import pyarrow as pa

from datasvc.errors import BadSampleError, ConfigError, CorruptDataError, NotFoundError
from datasvc.repository.store.retries import map_exceptions
from datasvc.repository.store.storage import redact_url
from datasvc.shards.format.schema import IMAGE, KEY, LABEL, image_field
from datasvc.shards.sources.common.columns import SampleBatcher, looks_like_image
from datasvc.shards.sources.common.files import FileReader
from datasvc.shards.sources.common.local_files import check_inside
from datasvc.shards.sources.common.options import SourceOptions
from datasvc.shards.sources.common.source import BATCH_SAMPLES, BadSample, SourcePart, StreamedSource
from datasvc.shards.sources.common.splits import split_of
from datasvc.shards.sources.common.tensors import tensor_field
from datasvc.shards.sources.records.caffe import datum_image, datum_values, is_datum, parse_datum
from datasvc.shards.sources.records.lmdb_file import open_lmdb, read_pairs

DATA_FILE: Final = "data.mdb"
_VALUE, _DATA = "value", "data"
_EXTENSIONS: Final = (".lmdb", ".mdb")
_LOCK_FILE: Final = "lock.mdb"
_NAMED_BYTES: Final = 48  # size of the record that the main database keeps for a named one
# Values that determine the columns.
_FIRST_VALUES: Final = 8
_PART_BYTES: Final = 64 << 20
_PART_SAMPLES: Final = 1 << 14


@dataclass(frozen=True)
class _Database:
    """One database of the source.

    Attributes:
        name: name of its folder or file.
        path: path of its data file.
    """

    name: str
    path: str


@dataclass(frozen=True)
class LmdbSource(StreamedSource):
    """One database, or a folder of several: `ilsvrc12_train_lmdb`, `ilsvrc12_val_lmdb`.

    Attributes:
        url: path on this machine.
        schema: `key`, and `image` or `data` with `label`, or `image`, or `value`.
        parts: ranges of keys.
    """

    kind: ClassVar[str] = "lmdb"

    url: str
    schema: pa.Schema
    parts: list[SourcePart]
    classes: tuple[str, ...] = ()
    ignored: Counter[str] = field(default_factory=Counter)

    @classmethod
    def list(cls, url: str, options: SourceOptions | None = None) -> LmdbSource:
        """List the source by one pass over its keys.

        Raises:
            NotFoundError: there is no database, or no sample in it.
            ConfigError: the source is remote or is not LMDB; it has named databases or several values of a key; or
                its databases differ in their columns.
            CorruptDataError: a file is truncated or damaged.
        """
        options = options or SourceOptions()
        reader = FileReader(url)
        if not reader.is_local:
            raise ConfigError(
                f"cannot ingest {redact_url(url)}: LMDB maps its file into memory, which only a local disk allows; "
                "copy the database to this machine first"
            )
        databases = _find(reader.root)
        splits = {database.name: (options.split or split_of(database.name)).lower() for database in databases}
        num_in_split = Counter(splits.values())
        schema: pa.Schema | None = None
        parts: list[SourcePart] = []
        for database in databases:
            split = splits[database.name]
            own_schema, own_parts = _list_parts(database, split, prefixed=num_in_split[split] > 1)
            if schema is not None and own_schema is not None and not own_schema.equals(schema, check_metadata=True):
                raise ConfigError(
                    f"cannot ingest {redact_url(url)}: {database.name} has the columns {own_schema.names}, other "
                    f"databases {schema.names}, or their types differ; ingest them as separate data sets"
                )
            schema = own_schema if schema is None else schema
            parts += own_parts
        if schema is None:
            raise NotFoundError(f"cannot ingest {redact_url(url)}: the database is empty; expected at least one key")
        return cls(url, schema, parts)

    def read(self, part: SourcePart) -> Iterator[pa.RecordBatch | BadSample]:
        """Yield the samples of a range of keys; see `StreamedSource.read`."""
        batcher = SampleBatcher(self.schema, part.split)
        start, num_missing, is_read = bytes.fromhex(part.where["start"]), part.num_samples or 0, False
        while num_missing:
            try:
                pairs = read_pairs(part.where["path"], start, min(num_missing, BATCH_SAMPLES), skip_first=is_read)
                problem = "the database has fewer keys than when it was listed"
            except CorruptDataError as error:
                pairs, problem = [], str(error)
            if not pairs:
                yield from batcher.flush()
                yield BadSample(part.split, part.name, f"{num_missing} samples cannot be read: {problem}")
                return
            for key, value in pairs:
                yield from self._add(batcher, part, key, value)
            start, num_missing, is_read = pairs[-1][0], num_missing - len(pairs), True
        yield from batcher.flush()

    def _add(
        self, batcher: SampleBatcher, part: SourcePart, key: bytes, value: bytes
    ) -> Iterator[pa.RecordBatch | BadSample]:
        name = part.where["prefix"] + key.hex()
        try:
            if not part.where["hex_keys"]:
                name = part.where["prefix"] + key.decode()
            sample = self._sample(value)
        except UnicodeDecodeError:
            yield BadSample(part.split, name, "its key is not UTF-8 (shown in hexadecimal), but the first key is")
        except BadSampleError as error:
            yield BadSample(part.split, name, str(error))
        else:
            yield from batcher.add({KEY: name, **sample})

    def _sample(self, value: bytes) -> dict[str, Any]:
        if LABEL not in self.schema.names:
            return {self.schema.names[1]: value}
        datum = parse_datum(value)
        if IMAGE in self.schema.names:
            return {IMAGE: datum_image(datum), LABEL: datum.label}
        expected = self.schema.field(_DATA)
        values = datum_values(datum)
        if not tensor_field(_DATA, values.dtype, datum.shape).equals(expected, check_metadata=True):
            raise BadSampleError(f"it is {values.dtype}{list(datum.shape)}; expected {expected.type} like the first")
        return {_DATA: values if values.size > 1 else values.item(), LABEL: datum.label}


def _find(root: str) -> list[_Database]:
    with map_exceptions("open", root):
        if os.path.isfile(os.path.join(root, DATA_FILE)):
            return [_Database(os.path.basename(root), os.path.join(root, DATA_FILE))]
        if not os.path.isdir(root):
            os.stat(root)
            return [_Database(os.path.basename(root), root)]
        with os.scandir(root) as entries:
            sorted_entries = sorted(entries, key=lambda entry: entry.name)
        databases = []
        for entry in sorted_entries:
            inner = os.path.join(entry.path, DATA_FILE)
            if entry.is_dir() and os.path.isfile(inner):
                databases.append(_Database(entry.name, inner))
            elif entry.is_file() and entry.name.endswith(_EXTENSIONS) and entry.name != _LOCK_FILE:
                databases.append(_Database(entry.name, entry.path))
    if not databases:
        raise NotFoundError(f"no LMDB database in {root}: expected {DATA_FILE} there or one folder below")
    check_inside(root, [database.path for database in databases])
    return databases


def _list_parts(database: _Database, split: str, *, prefixed: bool) -> tuple[pa.Schema | None, list[SourcePart]]:
    """Return the schema of a database (None if it is empty) and its parts, by one pass over its keys."""
    with open_lmdb(database.path) as env, env.begin(buffers=True) as txn:
        if env.open_db(None, txn=txn).flags(txn)["dupsort"]:  # type: ignore[call-arg]  # missing in its stub
            raise ConfigError(
                f"{database.path} has several values of one key (DUPSORT); write each under its own key"
            )
        statistics = env.stat()
        num_samples = int(statistics["entries"])
        if not num_samples:
            return None, []
        pages = sum(statistics[name] for name in ("branch_pages", "leaf_pages", "overflow_pages"))
        sample_bytes = -(-pages * statistics["psize"] // num_samples)
        per_part = max(1, min(_PART_SAMPLES, _PART_BYTES // sample_bytes))
        starts = _scan_keys(env, txn, per_part, num_samples, database.path)
        first = [(bytes(key), bytes(value)) for key, value in islice(txn.cursor(), _FIRST_VALUES)]
        stamp = f"{os.stat(database.path).st_mtime_ns}-{env.info()['last_txnid']}"
    # Two databases of one split may hold the same keys.
    prefix = f"{database.name}/" if prefixed else ""
    # The first key decides for all: keys that are not UTF-8 are stored in hexadecimal.
    where = {"path": database.path, "prefix": prefix, "hex_keys": not _is_text(first[0][0])}
    parts = []
    for number, start in enumerate(starts):
        count = min(per_part, num_samples - number * per_part)
        name = f"{database.name}#{number}"
        parts.append(SourcePart(split, name, count * sample_bytes, count, stamp, {**where, "start": start.hex()}))
    return _schema_of([value for _, value in first]), parts


def _scan_keys(
    env: lmdb.Environment, txn: lmdb.Transaction, per_part: int, num_samples: int, path: str
) -> list[bytes]:
    """Return every `per_part`-th key. Only the sizes of the values are read."""
    starts, count = [], 0
    for key, value in txn.cursor():
        # Only a record of this size can be a named database; opening is tried for these alone.
        if len(value) == _NAMED_BYTES and _is_named(env, txn, bytes(key)):
            raise ConfigError(
                f"{path} holds named databases, such as {bytes(key)!r}; datasvc reads only the unnamed one: "
                "copy each of them into a separate database"
            )
        if count % per_part == 0:
            starts.append(bytes(key))
        count += 1
    if count != num_samples:
        raise CorruptDataError(f"{path} declares {num_samples} keys but has {count}; restore another copy")
    return starts


def _is_named(env: lmdb.Environment, txn: lmdb.Transaction, key: bytes) -> bool:
    try:
        env.open_db(key, txn=txn, create=False)
    except lmdb.Error:
        return False
    return True


def _schema_of(values: list[bytes]) -> pa.Schema:
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


def _is_text(key: bytes) -> bool:
    try:
        key.decode()
    except UnicodeDecodeError:
        return False
    return True
