"""Export format of LMDB as Caffe reads it: one database per split.

Each sample is a Datum (Caffe's message of an image and its label) under the key `00000000_KEY`. Images are unchanged.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, Final

import lmdb

from datasvc import durable
from datasvc.errors import ConfigError, UnavailableError
from datasvc.repository.store.retries import map_exceptions
from datasvc.shards.export.destination import Destination, safe_part
from datasvc.shards.export.export_format import (
    ExportFormat,
    ExportUnit,
    WrittenFiles,
    check_images,
    given_columns,
    is_label,
    refused_column,
    refused_null,
)
from datasvc.shards.format.schema import IMAGE, KEY, LABEL
from datasvc.shards.sources.common.protobuf import bytes_field, varint_field
from datasvc.shards.versions.dataset import Split

_DATA, _LABEL, _ENCODED = 4, 5, 7  # fields of Datum in caffe.proto
_MAX_KEY_BYTES: Final = 511  # limit of LMDB
_PAGE_BYTES: Final = 4096
_SUPPORTED_BY: Final = "webdataset, parquet, mds, tfrecord"
_TRANSACTION_BYTES: Final = 64 << 20


class LmdbExport(ExportFormat):
    """Writes each split as one database, `SPLIT/data.mdb`; see the module docstring."""

    name: ClassVar[str] = "lmdb"
    is_local_only: ClassVar[bool] = True
    is_one_per_split: ClassVar[bool] = True

    def check(self, split: Split) -> None:
        """Raise ConfigError for columns other than images and integer labels."""
        schema = split.table.sample_schema
        check_images(self.name, split)
        for column in given_columns(schema):
            if column.name != IMAGE and not is_label(column):
                raise refused_column(self.name, column, _SUPPORTED_BY)

    def write(self, unit: ExportUnit, destination: Destination) -> WrittenFiles:
        """Write the database of a split. For errors, see `ExportFormat.write`."""
        target = destination.folder / safe_part(unit.split.name)
        table = unit.split.table
        # LMDB needs an upper bound of the size: a sample takes at most its bytes, the unused rest of a page, and an
        # index entry. LMDB allocates only the pages that it uses.
        map_bytes = table.size_bytes + unit.num_samples * 3 * _PAGE_BYTES + (64 << 20)
        digits = max(8, len(str(unit.num_samples)))
        with _replacing_folder(target) as folder, _open_database(folder, map_bytes) as database:
            samples = enumerate(unit.samples())
            has_more = True
            # LMDB keeps the pages of an open transaction in memory, so use several transactions.
            while has_more:
                with database.begin(write=True) as transaction:
                    has_more = _fill(transaction, samples, digits)
        return WrittenFiles(unit.num_samples, 1, (target / "data.mdb").stat().st_size)


def _fill(transaction: Any, samples: Iterator[tuple[int, dict[str, Any]]], digits: int) -> bool:
    """Write samples until about `_TRANSACTION_BYTES` are written or none is left; return whether some may remain."""
    size_bytes = 0
    for number, sample in samples:
        name = f"{number:0{digits}d}_{sample[KEY]}".encode()
        if len(name) > _MAX_KEY_BYTES:
            raise ConfigError(
                f"lmdb keys have at most {_MAX_KEY_BYTES} bytes, but {name[:60]!r}... has {len(name)}; "
                f"formats that can: {_SUPPORTED_BY}"
            )
        datum = _datum(sample)
        transaction.put(name, datum, append=True)  # faster: keys start with the sample's number, so they ascend
        size_bytes += len(datum)
        if size_bytes >= _TRANSACTION_BYTES:
            return True
    return False


def _datum(sample: dict[str, Any]) -> bytes:
    """Return a sample as an encoded Datum. Raise ConfigError for a null."""
    if sample[IMAGE] is None:
        raise refused_null("lmdb", IMAGE, sample[KEY], _SUPPORTED_BY)
    label = b""
    if LABEL in sample:
        if sample[LABEL] is None:
            raise refused_null("lmdb", LABEL, sample[KEY], _SUPPORTED_BY)  # Caffe reads a missing label as 0
        label = varint_field(_LABEL, sample[LABEL])
    return b"".join([bytes_field(_DATA, sample[IMAGE]), label, varint_field(_ENCODED, 1)])


@contextmanager
def _open_database(folder: Path, map_bytes: int) -> Iterator[Any]:
    """Open a new database, and sync it once at the end of the block. Raises UnavailableError: LMDB cannot write."""
    try:
        # The folder has a temporary name until it is complete, so it needs no lock file, and no sync before the end.
        with lmdb.open(str(folder), map_size=map_bytes, lock=False, sync=False, metasync=False) as database:
            yield database
            database.sync(True)
    except lmdb.Error as error:
        # LMDB reports a full disk as an input/output error.
        free_bytes = shutil.disk_usage(folder).free
        raise UnavailableError(f"cannot write {folder}: {error}; {free_bytes} bytes are free on its disk") from error


@contextmanager
def _replacing_folder(target: Path) -> Iterator[Path]:
    """Create a folder that becomes `target` if the `with` block succeeds. For errors, see `Destination.writing`."""
    temporary = target.with_name(f"{durable.TEMPORARY_PREFIX}{secrets.token_hex(8)}")
    with map_exceptions("write", str(target)):
        try:
            durable.make_folder(temporary)
            yield temporary
            # If `target` exists, an earlier run completed it, but was interrupted before it recorded the unit.
            if target.is_dir():
                shutil.rmtree(target)
            durable.fsync_folder(temporary)
            os.rename(temporary, target)
            durable.fsync_folder(target.parent)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
