"""Previews of a split's first samples, with values, blob sizes and images.

`datasvc head` and the contact sheet show the previews.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import pyarrow as pa

from datasvc.errors import ConfigError
from datasvc.printable import count_text
from datasvc.shards.format.schema import KEY, is_blob
from datasvc.shards.query.sample_page import find_numbers
from datasvc.shards.versions.dataset import Split
from datasvc.shards.versions.samples import Sample


@dataclass(frozen=True)
class Preview:
    """One sample for display.

    Attributes:
        split: name of its split.
        key: its key.
        class_name: class name of its label; None if the label has none.
        values: values by column, without `key` and blobs; a null blob is shown here as None.
        blob_bytes: size of each blob by column.
        images: encoded images by column, in column order.
    """

    split: str
    key: str
    class_name: str | None
    values: Mapping[str, Any]
    blob_bytes: Mapping[str, int]
    images: Mapping[str, bytes]


def preview_samples(split: Split, num_samples: int, where: str | None = None) -> Iterator[Preview]:
    """Yield the first live (not deleted) samples of a split that satisfy a condition, in their stored order.

    Raises:
        ConfigError: `num_samples` is negative, or DuckDB rejects the condition.
        CorruptDataError, NotFoundError, UnavailableError: a shard cannot be read.
    """
    if num_samples < 0:
        raise ConfigError(f"cannot show {count_text(num_samples, 'sample')}; expected 0 or more")
    schema = split.table.sample_schema
    samples: Iterator[Sample] = islice(split, num_samples)
    if where is not None:
        samples = (split[number] for number in find_numbers(split, where, num_samples))
    return (_preview(split, schema, sample) for sample in samples)


def _preview(split: Split, schema: pa.Schema, sample: Sample) -> Preview:
    blobs = {field.name: sample[field.name] for field in schema if is_blob(field.type)}
    # A null blob has no size, so it is shown among the values.
    present = {name: blob for name, blob in blobs.items() if blob is not None}
    return Preview(
        split.name,
        sample[KEY],
        sample.class_name,
        {name: value for name, value in sample.items() if name != KEY and name not in present},
        {name: len(blob) for name, blob in present.items()},
        {name: present[name] for name in sample.images if name in present},
    )
