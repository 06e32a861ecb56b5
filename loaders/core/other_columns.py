"""Columns that the argument `columns` of `ImageLoader` adds to a batch.

Numbers and booleans are delivered as arrays, everything else as lists of Python values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from datasvc.errors import ConfigError
from datasvc.loaders.core.batches import SampleBatch
from datasvc.loaders.core.mixture import Mixture, check_column, weighted_splits
from datasvc.shards import Split
from datasvc.shards.format.reader import python_value, text_errors


def is_array_column(data_type: pa.DataType) -> bool:
    """Return whether a column of this type is delivered as an array or tensor."""
    return any(is_kind(data_type) for is_kind in (pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean))


def divide_columns(samples: Split | Mixture, columns: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the columns that are delivered as arrays, and those that are delivered as lists.

    Raises:
        ConfigError: a split lacks a column; or a column has numbers or booleans in one split of a mixture, and
            another type in another split.
    """
    arrays = []
    for name in dict.fromkeys(columns):
        check_column(samples, name)
        types = {split.table.sample_schema.field(name).type for split in weighted_splits(samples)}
        if any(map(is_array_column, types)):
            if len(types) > 1:
                raise ConfigError(
                    f"column {name!r} of {samples!r} has several types, {sorted(map(str, types))}; ingest the splits "
                    "with one type, or leave the column out"
                )
            arrays.append(name)
    return arrays, [name for name in columns if name not in arrays]


def read_lists(batch: SampleBatch, columns: Sequence[str]) -> dict[str, list[Any]]:
    """Return columns of a batch as lists of Python values.

    A value is None if it is null, or if its shard lacks the column, which other shards of the split have.

    Raises:
        CorruptDataError: a text is not UTF-8.
    """
    lists: dict[str, list[Any]] = {name: [None] * len(batch.positions) for name in columns}
    for part in batch.parts:
        for name, values in lists.items():
            if name in part.shard.schema.names:
                stored = part.shard.column(name)
                with text_errors(part.shard.name):
                    for index, row in zip(part.indices.tolist(), part.rows.tolist(), strict=True):
                        values[index] = python_value(stored[row])
    return lists
