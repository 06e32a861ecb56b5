"""Samples with the same content and different labels, such as an image that was appended under another class.

An ingest reports them before it ends, and `verify` at any time. They are found by the payload digests in the sample
indexes. Labels are read only from shards with repeated content. Memory holds an 8-byte hash per sample.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa

from datasvc.keyed_random import Integers
from datasvc.printable import count_text
from datasvc.repository import Objects
from datasvc.shards.format.overlaid_shard import read_values
from datasvc.shards.format.schema import KEY, LABEL
from datasvc.shards.format.shard_table import ShardTable
from datasvc.shards.versions.keys import ShardValues, Side, hash_values, match_values, take_keys
from datasvc.shards.versions.labels import label_text
from datasvc.shards.versions.split_overlap import has_blobs, new_shards, payload_side

_MAX_LISTED: Final = 10
_SEPARATOR: Final = "\0"  # between a label and a key


class LabelConflict(NamedTuple):
    """A sample whose label differs from that of the first sample with the same content.

    Attributes:
        split: split of the sample.
        key: key of the sample.
        label: its class, or its label as text if classes have no names.
        other_split: split of the first sample with this content.
        other_key: key of that sample.
        other_label: its class or label.
    """

    split: str
    key: str
    label: str
    other_split: str
    other_key: str
    other_label: str

    def __str__(self) -> str:
        return (
            f"{self.split}/{self.key} has the label {self.label!r}, and {self.other_split}/{self.other_key} with the "
            f"same content {self.other_label!r}"
        )


def find_label_conflicts(
    objects: Objects, tables: Mapping[str, ShardTable], *, checked: Mapping[str, ShardTable] | None = None
) -> list[LabelConflict]:
    """Return the samples whose label contradicts an earlier sample with the same blobs, in all splits together.

    Samples without a label or blobs, and shards without a sample index, are not compared.

    Args:
        objects: objects of the repository.
        tables: shard tables by split.
        checked: tables, by split, that were searched before; only conflicts of other samples are returned.

    Raises:
        CorruptDataError, NotFoundError, UnavailableError: a sample index or a shard cannot be read.
    """
    labelled = {
        split: table for split, table in tables.items() if LABEL in table.sample_schema.names and has_blobs(table)
    }
    names = list(labelled)
    # Shards of all splits are numbered one after the other, so that one search covers them.
    first_numbers = np.cumsum([0, *(table.num_shards for table in labelled.values())])

    def read() -> Iterator[ShardValues]:
        for first, table in zip(first_numbers.tolist(), labelled.values(), strict=False):
            for values in payload_side(objects, table, None).read():
                describe = partial(_labels_and_keys, objects, table, values)
                yield values._replace(shard=first + values.shard, read_attached=describe)

    hashes = np.sort(np.concatenate([np.empty(0, np.int64), *(hash_values(values.values) for values in read())]))
    repeated = np.unique(hashes[1:][hashes[1:] == hashes[:-1]])
    if not len(repeated):
        return []
    side = Side(len(hashes), lambda: filter(None, (_only(values, repeated) for values in read())))
    matches = match_values(side, side)
    is_new = np.ones(len(matches), np.bool_)
    if checked is not None:
        added = np.concatenate(
            [
                first + new_shards(objects, table, checked.get(split))
                for first, (split, table) in zip(first_numbers.tolist(), labelled.items(), strict=False)
            ]
        )
        is_new = np.isin(matches.a.shards, added) | np.isin(matches.b.shards, added)
    conflicts = []
    for number in np.flatnonzero(is_new).tolist():
        other_label, _, other_key = matches.attached_a[number].as_py().partition(_SEPARATOR)
        label, _, key = matches.attached_b[number].as_py().partition(_SEPARATOR)
        if label and other_label and label != other_label:
            shards = [int(rows.shards[number]) for rows in (matches.b, matches.a)]
            split, other_split = (names[np.searchsorted(first_numbers, shard, side="right") - 1] for shard in shards)
            conflicts.append(LabelConflict(split, key, label, other_split, other_key, other_label))
    return conflicts


def describe_conflicts(conflicts: Sequence[LabelConflict]) -> str:
    """Return the number of conflicts and the first of them as text; "" without any."""
    if not conflicts:
        return ""
    more = f" and {len(conflicts) - _MAX_LISTED} more" if len(conflicts) > _MAX_LISTED else ""
    return (
        f"{count_text(len(conflicts), 'sample contradicts', 'samples contradict')} the label of an equal one: "
        f"{'; '.join(map(str, conflicts[:_MAX_LISTED]))}{more}. Correct the wrong ones with "
        "`datasvc label`, or delete them with `datasvc delete --keys`"
    )


def _only(values: ShardValues, hashes: Integers) -> ShardValues | None:
    """Return the samples of a shard with one of the ascending `hashes`; None without any."""
    chosen = np.flatnonzero(np.isin(hash_values(values.values), hashes))
    if not len(chosen):
        return None
    return values._replace(
        rows=values.rows[chosen],
        values=values.values.take(pa.array(chosen)),
        read_attached=lambda: values.read_attached().take(pa.array(chosen)),
    )


def _labels_and_keys(objects: Objects, table: ShardTable, values: ShardValues) -> pa.Array:
    """Return label and key of the samples of a shard, joined by `_SEPARATOR`; the label is "" without a class."""
    keys_and_labels = read_values(objects, table, values.shard, [KEY, LABEL])
    keys, labels = (take_keys(column, values.rows).to_pylist() for column in keys_and_labels.columns)
    texts = [label_text(label, table.classes) for label in labels]
    return pa.array([f"{text}{_SEPARATOR}{key}" for text, key in zip(texts, keys, strict=True)], pa.large_string())
