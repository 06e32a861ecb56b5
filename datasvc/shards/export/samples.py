"""Units of an export, and the samples in them.

A unit is a group of shards that one worker writes together. Every export format reads samples through `ExportUnit`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from datasvc.keyed_random import Integers
from datasvc.shards.format.digests import blob_views
from datasvc.shards.format.reader import python_values
from datasvc.shards.format.schema import is_blob
from datasvc.shards.versions.dataset import Split, open_listed_shard


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
            shard = open_listed_shard(self.split.origin, self.split.table, shard_number)
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
    """Return the samples of `batch` that are not deleted.

    `live_rows` has ascending rows of the shard; `batch` starts at row `start` of the shard.
    """
    first, stop = np.searchsorted(live_rows, [start, start + batch.num_rows])
    return batch.take(pa.array(live_rows[first:stop] - start))


def _with_schema(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Return a batch with the columns of `schema`, null where an older shard does not have a column."""
    columns = [
        batch.column(field.name) if field.name in batch.schema.names else pa.nulls(batch.num_rows, field.type)
        for field in schema
    ]
    return pa.RecordBatch.from_arrays(columns, schema=schema)
