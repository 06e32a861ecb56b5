"""Interface of an export format, such as Parquet, the units that it writes, and checks that formats share.

An export consists of units, usually one for each shard. `write` writes the files of one unit, and `join` writes the
files that describe a whole split.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

import numpy as np
import pyarrow as pa

from datasvc.errors import ConfigError
from datasvc.keyed_random import Integers
from datasvc.shards.export.destination import Destination
from datasvc.shards.format.digests import blob_views
from datasvc.shards.format.reader import python_values
from datasvc.shards.format.schema import IMAGE, KEY, LABEL, is_blob, is_list, measured_among
from datasvc.shards.format.shard_stores import open_listed_shard
from datasvc.shards.versions.dataset import Split

# Types whose values are JSON scalars.
_PLAIN_JSON: Final = (
    pa.types.is_null,
    pa.types.is_boolean,
    pa.types.is_integer,
    pa.types.is_floating,
    pa.types.is_string,
    pa.types.is_large_string,
)


@dataclass(frozen=True)
class WrittenFiles:
    """Counts and size of the files that one call of `ExportFormat.write` or `ExportFormat.join` wrote.

    Attributes:
        num_samples: number of samples in the files.
        num_files: number of files.
        size_bytes: total size of the files.
        about: JSON values about a unit, which `write` returns, the records of the export keep, and `join` reads.
    """

    num_samples: int
    num_files: int
    size_bytes: int
    about: Mapping[str, Any] = field(default_factory=dict)


class ExportFormat(ABC):
    """A format of exports. It has no state, so that each worker process can use its own instance.

    Attributes:
        name: name for `--format`.
        is_local_only: whether the destination must be a local folder.
        is_one_per_split: whether a split is one unit; otherwise each shard is a unit.
    """

    name: ClassVar[str]
    is_local_only: ClassVar[bool] = False
    is_one_per_split: ClassVar[bool] = False

    @abstractmethod
    def check(self, split: Split) -> None:
        """Raise ConfigError, with the name of the column, if the format cannot hold the samples of `split`."""

    @abstractmethod
    def write(self, unit: ExportUnit, destination: Destination) -> WrittenFiles:
        """Write the files of a unit. Each call writes the same bytes, and replaces files of an interrupted export.

        Raises:
            ConfigError: the format cannot hold a value; the message names the sample.
            CorruptDataError: a shard of the unit is damaged.
            NotFoundError: a shard of the unit is missing.
            UnavailableError: a store failed, or the disk is full.
        """

    def join(self, split: Split, written: Sequence[WrittenFiles], destination: Destination) -> WrittenFiles:
        """Write the files that describe a split as a whole, such as an index; the default writes none.

        `written` are the results of `write` for the units of the split, in order.

        Raises:
            ConfigError: the format cannot hold the units together.
            UnavailableError: a store failed, or the disk is full.
        """
        del split, written, destination
        return WrittenFiles(0, 0, 0)


@dataclass(frozen=True)
class ExportUnit:
    """The shards that one worker writes together, usually to one file.

    Attributes:
        split: split of the shards.
        shards: numbers of the shards in the table of the split.
        number: index of this unit among those of the split.
        num_units: number of units of the split.
    """

    split: Split
    shards: tuple[int, ...]
    number: int
    num_units: int

    @property
    def num_samples(self) -> int:
        """Number of samples, without the deleted ones."""
        return self._sum_of_shards(self.split.table.samples_per_shard)

    @property
    def stored_bytes(self) -> int:
        """Size in bytes of the stored shards, including deleted samples."""
        return self._sum_of_shards(self.split.table.bytes_per_shard)

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Yield the samples that are not deleted, in order, as batches of a few megabytes with the sample schema.

        Raises:
            CorruptDataError, NotFoundError, UnavailableError: see `OriginShards.open_shard`.
        """
        schema = self.split.table.sample_schema
        for shard_number in self.shards:
            shard = open_listed_shard(
                self.split.origin, self.split.repository.objects, self.split.table, shard_number
            )
            shard.check_texts()
            live_rows = _live_rows(self.split, shard_number)
            start = 0  # row of the shard at which the batch starts
            for batch in shard.batches:
                live = batch if live_rows is None else _take(batch, live_rows, start)
                start += batch.num_rows
                if live.num_rows:
                    yield _with_schema(live, schema)

    def samples(self) -> Iterator[dict[str, Any]]:
        """Yield the samples that are not deleted, in order; see `samples_of`."""
        for batch in self.batches():
            yield from samples_of(batch)

    def _sum_of_shards(self, per_shard: Integers) -> int:
        return int(per_shard[np.array(self.shards, np.int64)].sum())


def samples_of(batch: pa.RecordBatch) -> Iterator[dict[str, Any]]:
    """Yield the samples of a batch: blobs as views of the shard, other values as Python values."""
    columns = [blob_views(column) if is_blob(column.type) else python_values(column) for column in batch.columns]
    for values in zip(*columns, strict=True):
        yield dict(zip(batch.schema.names, values, strict=True))


def _live_rows(split: Split, shard: int) -> Integers | None:
    """Return the rows of the live (not deleted) samples of a shard, `int64[n]`, ascending; None if all are live."""
    # For None, the caller yields the batches unchanged, without a copy.
    if not split.table.deleted_per_shard[shard]:
        return None
    return split.stored_rows(shard, np.arange(split.table.samples_per_shard[shard]))


def _take(batch: pa.RecordBatch, live_rows: Integers, start: int) -> pa.RecordBatch:
    """Return the samples of `batch`, which starts at row `start` of its shard, that are in `live_rows`."""
    first, stop = np.searchsorted(live_rows, [start, start + batch.num_rows])
    return batch.take(pa.array(live_rows[first:stop] - start))


def _with_schema(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Return a batch with the columns of `schema`, null where an older shard does not have a column."""
    columns = [
        batch.column(field.name) if field.name in batch.schema.names else pa.nulls(batch.num_rows, field.type)
        for field in schema
    ]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def given_columns(schema: pa.Schema) -> list[pa.Field]:
    """Return the columns that an export must hold: all except the key, and what was measured of images and sounds.

    Each format stores the key in a way of its own. A reader can measure images and sounds again.
    """
    measured = measured_among(schema, schema.names)
    return [field for field in schema if field.name != KEY and field.name not in measured]


def is_label(column: pa.Field) -> bool:
    """Return whether a column holds class indices."""
    return bool(column.name == LABEL and pa.types.is_integer(column.type))


def has_label(schema: pa.Schema) -> bool:
    """Return whether there is a column of class indices."""
    return any(is_label(column) for column in schema)


def check_images(export_format: str, split: Split) -> None:
    """Raise ConfigError if a split has no column of encoded images; for formats that hold only images."""
    schema = split.table.sample_schema
    if IMAGE not in schema.names or not is_blob(schema.field(IMAGE).type):
        raise ConfigError(
            f"{export_format} holds images, but {split} has no column {IMAGE!r} of images; formats that can: "
            "webdataset, parquet, mds, tfrecord"
        )


def is_json(data_type: pa.DataType) -> bool:
    """Return whether JSON stores values of this type without loss."""
    if pa.types.is_dictionary(data_type) or is_list(data_type):
        return is_json(data_type.value_type)
    if pa.types.is_struct(data_type):
        return all(is_json(field.type) for field in data_type.fields)
    if pa.types.is_map(data_type):
        return is_json(data_type.key_type) and is_json(data_type.item_type)
    return any(check(data_type) for check in _PLAIN_JSON)


def encode_json(value: Any, key: str) -> bytes:
    """Return `value` as compact JSON. Raise ConfigError, with the sample's `key`, for NaN or an infinity."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
    except ValueError as error:
        raise ConfigError(
            f"sample {key!r} holds NaN or an infinity in {value!r}, which JSON cannot represent; export it as parquet"
        ) from error


def refused_column(export_format: str, column: pa.Field, supported_by: str = "parquet") -> ConfigError:
    """Return the error for a column that a format cannot hold; `supported_by` lists formats that can."""
    return ConfigError(
        f"{export_format} cannot hold the column {column.name!r} of {column.type}; formats that can: {supported_by}"
    )


def refused_null(export_format: str, column: str, key: str, supported_by: str) -> ConfigError:
    """Return the error for a null that a format cannot hold; `supported_by` lists formats that can."""
    return ConfigError(
        f"{export_format} cannot hold a null: sample {key!r} has no {column!r}; formats that can: {supported_by}"
    )
