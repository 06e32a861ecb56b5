"""Derives the shard table of a view from that of a split: the same shards, with the samples left out as deleted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from datasvc.errors import ConfigError
from datasvc.keyed_random import Integers
from datasvc.shards.format.schema import LABEL, is_blob
from datasvc.shards.format.shard_table import ShardTable
from datasvc.shards.format.view_table import ViewOrigin
from datasvc.shards.packing.pack_objects import PackWriter
from datasvc.shards.query.histogram import quoted
from datasvc.shards.query.query import open_query
from datasvc.shards.versions.dataset import Split
from datasvc.shards.versions.deletions import Deletions
from datasvc.shards.versions.labels import with_class

NUMBER: Final = "number"
"""Column of `read_groups`: the number of each sample, as in `split[number]`."""
_SAMPLES_AT_ONCE: Final = 4 << 20


def read_groups(
    split: Split, expressions: Sequence[str] = (), *, where: str | None = None, text: str = ""
) -> Iterator[pa.Table]:
    """Yield the live samples of a split that satisfy a condition, some shards at a time, in the order of the table.

    Purged samples are left out: their values are empty, so none of them is one of a class, a group or a weight.

    Args:
        split: the split.
        expressions: SQL expressions to compute for each sample.
        where: SQL condition; None: all samples.
        text: what the user gave, for messages.

    Yields:
        Tables with the columns `number`, `label` if the labels of the split are counted, and `value0`, `value1`, ...

    Raises:
        ConfigError: an expression is not valid, or fails for a sample.
        CorruptDataError, NotFoundError, UnavailableError: a shard cannot be read.
    """
    labels = [f'"{LABEL}"'] if split.table.label_counts else []
    values = [f"({expression}) AS value{index}" for index, expression in enumerate(expressions)]
    for shards in _groups(split.table.samples_per_shard):
        with open_query(split, shards) as samples:
            if where is not None:
                samples.where(where)
            columns = ", ".join([f"{samples.number} AS {NUMBER}", *labels, *values])
            samples.apply(text, lambda: samples.relation.project(columns))  # noqa: B023 - called at once
            group = samples.fetch(text, lambda relation: relation.to_arrow_table())
        if split.table.redacted:
            purged = pa.array(np.concatenate([np.empty(0, np.int64), *_purged_numbers(split, shards)]))
            group = group.filter(pc.invert(pc.is_in(group.column(NUMBER), purged)))
        # DuckDB evaluates in parallel and does not guarantee an order.
        yield group.combine_chunks().sort_by(NUMBER)


def _purged_numbers(split: Split, shards: Sequence[int]) -> Iterator[Integers]:
    """Yield the numbers of the purged samples of each shard that has any."""
    counts = split.table.samples_per_shard
    starts = np.cumsum(counts) - counts
    for shard in shards:
        purged = split.table.redacted_rows(shard)
        if len(purged):
            yield starts[shard] + np.flatnonzero(np.isin(split.stored_rows(shard, np.arange(counts[shard])), purged))


def value_of(split: Split, column: str) -> str:
    """Return the SQL of a column with one value per sample, or of `class`, the name of the label's class.

    Raises:
        ConfigError: there is no such column, or it has lists, structs or blobs, which are not compared.
    """
    schema = with_class(split.table.sample_schema, split.classes)
    if column not in schema.names:
        raise ConfigError(f"{split.title} has no column {column!r}; its columns are {', '.join(schema.names)}")
    kind = schema.field(column).type
    if pa.types.is_nested(kind) or is_blob(kind):
        raise ConfigError(f"the column {column!r} is {kind}; expected text, numbers, Booleans or times")
    return quoted(column, schema.names)


def check_boolean(split: Split, sql: str, text: str) -> None:
    """Raise ConfigError if a condition names a column that does not exist, or is not Boolean."""
    with open_query(split, []) as samples:
        samples.apply(text, lambda: samples.relation.project(f"({sql})"))
        types = [str(each) for each in samples.relation.types]
    if types != ["BOOLEAN"]:
        raise ConfigError(f"the condition {text!r} has the type {types[0]}, expected BOOLEAN, such as label = 3")


def put_view(split: Split, table: ShardTable, step: str) -> Split:
    """Store the table of the view that `step` makes of a split, and return the view."""
    origin = split.table.view or ViewOrigin(split.digest, split.dataset, split.name, ())
    view = replace(table, view=replace(origin, steps=(*origin.steps, step)))
    digest = split.repository.objects.put(view.encode()).digest
    return Split(split.name, split.dataset, split.repository, digest)


class ViewBuilder:
    """Builds one view from the chosen samples of a split, which are added in the order of the table.

    Args:
        split: the split; it may be a view.
        step: how the samples are chosen, for the origin of the view.
    """

    def __init__(self, split: Split, step: str) -> None:
        if split.packs is not None or split.table.grouping is not None:
            state, verb = ("packed", "pack") if split.packs is not None else ("grouped by aspect", "group")
            raise ConfigError(
                f"{split.title} is {state}; choose or weigh the samples first, and then {verb} the view"
            )
        self._split = split
        self._step = step
        counts = split.table.samples_per_shard
        self._stops = np.cumsum(counts)
        self._starts = self._stops - counts
        self._stored = split.table.stored_per_shard
        self._num_deleted = self._stored.copy()  # by shard
        self._bitmaps: dict[int, bytes] = {}
        self._labels: Counter[int] = Counter()
        self._packs = PackWriter(split.repository.objects, "weights")
        self._sums: list[int] = []  # of the weights, by shard with samples

    def add(self, group: pa.Table, weights: Integers | None = None) -> None:
        """Add samples: a table of `read_groups`, or a part of one, and their weights, `int64[n]`.

        Without `weights`, the samples have those of the split, if it has any.
        """
        numbers = group.column(NUMBER).to_numpy()
        if LABEL in group.schema.names:
            counted = pc.value_counts(group.column(LABEL).drop_null()).to_pylist()
            self._labels.update({int(each["values"]): int(each["counts"]) for each in counted})
        shards = np.searchsorted(self._stops, numbers, side="right")
        cuts = np.flatnonzero(np.diff(shards)) + 1
        for start, stop in pairwise([0, *cuts.tolist(), len(numbers)] if len(numbers) else []):
            shard = int(shards[start])
            rows = numbers[start:stop] - self._starts[shard]
            self._keep(shard, self._split.stored_rows(shard, rows))
            if weights is not None:
                self._weigh(weights[start:stop])
            elif self._split.weights is not None:
                self._weigh(self._split.weights.of(shard)[rows])

    def finish(self) -> Split:
        """Store the view and return it as a split. Raise ConfigError if it has no samples."""
        split, table = self._split, self._split.table
        kept = np.flatnonzero(self._num_deleted < self._stored)
        if not len(kept):
            raise ConfigError(f"{self._step} selects no sample of {split.title}")
        objects = split.repository.objects
        new_numbers = [number for number, shard in enumerate(kept.tolist()) if shard in self._bitmaps]
        with_deletions = kept[new_numbers].tolist()
        bitmaps = [self._bitmaps[shard] for shard in with_deletions]
        deletions = Deletions.of_bitmaps(new_numbers, self._stored[with_deletions].tolist(), bitmaps)
        all_shards = table.with_column("deleted", self._num_deleted)
        view = replace(
            all_shards,
            rows=all_shards.rows.take(kept),
            label_counts=dict(sorted(self._labels.items())),
            deletions=objects.put(deletions.encode()).digest if bitmaps else None,
        )
        if self._sums:
            view = replace(view.with_column("weight", self._sums), weights=self._packs.finish())
        return put_view(split, view, self._step)

    def _weigh(self, weights: Integers) -> None:
        """Give the kept samples of the next shard their weights."""
        self._packs.add(weights)
        self._sums.append(int(weights.sum()))

    def _keep(self, shard: int, rows: Integers) -> None:
        """Keep these stored rows of a shard, and no others."""
        self._num_deleted[shard] -= len(rows)
        if self._num_deleted[shard]:
            deleted = np.ones(int(self._stored[shard]), np.bool_)
            deleted[rows] = False
            self._bitmaps[shard] = np.packbits(deleted, bitorder="little").tobytes()


def _groups(counts: Integers) -> Iterator[list[int]]:
    """Yield runs of consecutive shards with up to `_SAMPLES_AT_ONCE` samples, or one larger shard."""
    group: list[int] = []
    num_samples = 0
    for shard, count in enumerate(counts.tolist()):
        if group and num_samples + count > _SAMPLES_AT_ONCE:
            yield group
            group, num_samples = [], 0
        group.append(shard)
        num_samples += count
    if group:
        yield group
