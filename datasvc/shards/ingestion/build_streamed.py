"""Builds one ingest unit from a streamed source: reads its parts in turn; checks, permutes and writes the samples.

Up to `PARTS_AT_ONCE` parts, such as tars, are open. A few samples are taken from each in turn, so that parts sorted
by class are mixed; with `keep_order` or `limit`, parts are read one after another. The samples of a full shard are
permuted, unless `keep_order` is set, and written. A worker's memory holds one shard, a second one for held-out
samples, and one batch of each open part.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from typing import Any, Final

import numpy as np
import pyarrow as pa

from datasvc.errors import BadSampleError
from datasvc.keyed_random import Integers
from datasvc.progress import Progress
from datasvc.repository import Repository
from datasvc.shards.format.digests import DIGEST_BYTES, BlobViews, blob_views, digest_batch, value_offsets
from datasvc.shards.format.schema import IMAGE, KEY, LABEL, added_columns, is_gathered, is_list, is_media, is_text
from datasvc.shards.ingestion.build import EarlierShards, IngestWork, ShardFinisher, ShardOutput, UnitResult
from datasvc.shards.ingestion.media_check import CheckedMedia, check_media
from datasvc.shards.ingestion.plan import PARTS_AT_ONCE, IngestUnit, is_held_out, permute_in_shard
from datasvc.shards.sources.common.options import DEFAULT_SPLIT, HELD_OUT_SPLIT
from datasvc.shards.sources.common.source import BadSample, SourcePart, StreamedSource

# Assumed size of a value whose type has no fixed width, or whose size cannot be computed.
_DEFAULT_VALUE_BYTES = 8


@dataclass(frozen=True)
class CheckedBatch:
    """The good samples of a batch of the source.

    Attributes:
        columns: all columns of the shards.
        kinds: image format of each sample's `image`; "" for a sample without one.
    """

    columns: pa.RecordBatch
    kinds: Sequence[str]

    @property
    def num_samples(self) -> int:
        """Number of samples."""
        return int(self.columns.num_rows)

    def take(self, rows: Integers) -> CheckedBatch:
        """Return the samples at `rows`, copied."""
        return CheckedBatch(self.columns.take(pa.array(rows)), [self.kinds[row] for row in rows.tolist()])

    @property
    def keys(self) -> pa.Array:
        """Key of each sample: `string[num_samples]`."""
        return self.columns.column(KEY)

    @cached_property
    def sizes_bytes(self) -> Integers:
        """Approximate size of each sample in bytes: `int64[num_samples]`."""
        return sum((value_bytes(column) for column in self.columns.columns), np.zeros(self.num_samples, np.int64))

    @cached_property
    def stops_bytes(self) -> Integers:
        """Cumulative sizes in bytes, up to the end of each sample: `int64[num_samples]`."""
        return np.cumsum(self.sizes_bytes)

    @cached_property
    def digests(self) -> tuple[pa.Array, pa.Array]:
        """Sample digests and payload digests, see `format/digests.py`: `fixed_size_binary(16)[num_samples]`."""
        samples, payloads = digest_batch(self.columns)
        return pa.array(samples, pa.binary(DIGEST_BYTES)), pa.array(payloads, pa.binary(DIGEST_BYTES))


def check_batch(work: IngestWork, batch: pa.RecordBatch, split: str, bad: list[BadSample]) -> CheckedBatch:
    """Return the good samples of a source's batch with the columns of the shards; add the others to `bad`.

    Images, sounds and videos are checked and measured, images re-encoded if the options require it. Labels get their
    stored numbers.
    """
    reasons: dict[int, str] = {}
    columns = {name: batch.column(name) for name in batch.schema.names}
    kinds = [""] * batch.num_rows
    for declared in batch.schema:
        if not is_media(declared):
            continue
        checked_files, columns[declared.name] = _check_files(work, declared, batch.column(declared.name), reasons)
        for number, (name, data_type) in enumerate(added_columns(declared).items()):
            # A null or bad file has the sizes 0, and empty texts and lists.
            empty: Any = [] if is_list(data_type) else "" if is_text(data_type) else 0
            columns[name] = pa.array([each.measured[number] if each else empty for each in checked_files], data_type)
        if declared.name == IMAGE:
            kinds = [each.kind if each else "" for each in checked_files]
    # A column `label` of another type is treated as an ordinary column.
    if LABEL in columns and pa.types.is_integer(columns[LABEL].type):
        columns[LABEL] = _relabel(work, columns[LABEL], reasons)
    checked = pa.RecordBatch.from_arrays([columns[field.name] for field in work.schema], schema=work.schema)
    if reasons:  # otherwise the batch is used without a copy
        keys = batch.column(KEY)
        bad += [BadSample(split, keys[row].as_py(), reason) for row, reason in sorted(reasons.items())]
        good = [row for row in range(batch.num_rows) if row not in reasons]
        checked, kinds = checked.take(pa.array(good, pa.int64())), [kinds[row] for row in good]
    return CheckedBatch(checked, kinds)


def value_bytes(column: pa.Array) -> Integers:
    """Return the approximate size of each value of a column in bytes: `int64[n]`.

    The size depends on the value alone, except in fixed-size lists: one null makes all sizes of the column estimates.
    """
    data_type = column.type
    if is_gathered(data_type):
        return np.diff(value_offsets(column)).astype(np.int64)
    if pa.types.is_map(data_type) or pa.types.is_list(data_type) or pa.types.is_large_list(data_type):
        is_map = pa.types.is_map(data_type)
        items = value_bytes(column.keys) + value_bytes(column.items) if is_map else value_bytes(column.values)
        stops = np.concatenate([[0], np.cumsum(items)])
        return np.asarray(np.diff(stops[value_offsets(column)]), np.int64)
    if pa.types.is_fixed_size_list(data_type):
        # `flatten` leaves out the values of null lists, so its values cannot be assigned to rows: estimate the sizes.
        if column.null_count or not len(column) or not data_type.list_size:
            return np.full(len(column), data_type.list_size * _DEFAULT_VALUE_BYTES)
        return np.asarray(value_bytes(column.flatten()).reshape(len(column), -1).sum(axis=1), np.int64)
    if pa.types.is_struct(data_type):
        fields = [value_bytes(column.field(number)) for number in range(data_type.num_fields)]
        return sum(fields, np.zeros(len(column), np.int64))
    try:
        width_bytes = max(1, data_type.bit_width // 8)
    except ValueError:
        width_bytes = _DEFAULT_VALUE_BYTES
    return np.full(len(column), width_bytes, np.int64)


def _check_files(
    work: IngestWork, field: pa.Field, column: pa.Array, reasons: dict[int, str]
) -> tuple[list[CheckedMedia | None], pa.Array]:
    """Return what is known of the encoded files, and those to store; add to `reasons` why one is bad, by row."""
    options = work.options
    checked_files: list[CheckedMedia | None] = []
    reencoded: dict[int, bytes] = {}
    for row, view in enumerate(blob_views(column)):
        checked = None
        try:
            if view is None and not field.nullable:
                raise BadSampleError(f"has no {field.name}")  # noqa: TRY301 - one place turns errors into reasons
            if view is not None:
                checked = check_media(field, view, options.reencoding, decode=options.decode_check)
                if checked.encoded is not None:
                    reencoded[row] = checked.encoded
        except BadSampleError as error:
            reasons[row] = str(error)
        checked_files.append(checked)
    if reencoded:
        column = pa.array([reencoded.get(row, column[row].as_py()) for row in range(len(column))], column.type)
    return checked_files, column


def _relabel(work: IngestWork, column: pa.Array, reasons: dict[int, str]) -> pa.Array:
    """Return the stored labels. Null and negative labels (no class, as in test sets) stay unchanged."""
    num_classes = len(work.source.classes)
    if not num_classes:
        return column
    labels = np.array(column.fill_null(-1).to_numpy(zero_copy_only=False), np.int64)
    for row in np.flatnonzero(labels >= num_classes).tolist():
        reasons.setdefault(row, f"its label {labels[row]} has no class: expected labels below {num_classes}")
        labels[row] = -1  # `work.labels` below has no such index; the caller leaves the sample out
    if work.labels is None:
        return column
    # A negative label selects a wrong stored label, which `where` then discards.
    stored = np.where(labels < 0, labels, np.asarray(work.labels, np.int64)[labels])
    return pa.array(stored, column.type, mask=~column.is_valid().to_numpy(zero_copy_only=False))


# Number of turns, over all open parts, that fill one shard.
_TURNS_PER_SHARD: Final = 256

BatchRows = tuple[CheckedBatch, Integers]
"""A batch, and the rows that one turn takes from it."""


def build_streamed(
    work: IngestWork, unit: IngestUnit, repository: Repository, progress: Progress, earlier: EarlierShards
) -> UnitResult:
    """Store the shards of `unit` and return the result.

    The samples of `earlier` shards are read again, to find where the next shard starts, but not written again.

    Raises:
        ConfigError, NotFoundError, UnavailableError: the source or the repository failed.
    """
    bad: list[BadSample] = []
    with ShardFinisher(work, unit, repository) as finisher:
        fill_shards(work, unit, finisher, progress, earlier, bad)
        result = finisher.finish(bad)
    progress.advance(0, num_shards=len(result.shards))
    return result


def fill_shards(
    work: IngestWork,
    unit: IngestUnit,
    finisher: ShardFinisher,
    progress: Progress,
    earlier: EarlierShards,
    bad: list[BadSample],
) -> None:
    """Read the samples of `unit`, and add its shards to `finisher` and its bad samples to `bad`."""
    # A unit has one split, and fills a second one if samples are held out.
    builders: dict[str, _ShardBuilder] = {}
    for batch, rows in _take_turns(work, unit, bad, progress):
        for split, split_batch, split_rows in _hold_out(batch, rows, unit.split, work.options.val_fraction):
            if split not in builders:
                builders[split] = _ShardBuilder(work, unit.number, split, finisher, earlier)
            builders[split].add(split_batch, split_rows)
    for builder in builders.values():
        builder.close()


def _take_turns(work: IngestWork, unit: IngestUnit, bad: list[BadSample], progress: Progress) -> Iterator[BatchRows]:
    """Take samples from the unit's parts in turn; yield the `BatchRows` of each turn."""
    # A limit selects the first samples of the source, so its parts are read one after the other.
    in_order = work.options.keep_order or work.options.in_place or work.options.limit is not None
    turn_bytes = None if in_order else work.options.shard_bytes // _TURNS_PER_SHARD
    limit = _SampleLimit(work.options.limit)
    unopened_parts = (_read_part(work, part, turn_bytes, limit, bad, progress) for part in unit.parts)
    open_parts = deque(islice(unopened_parts, 1 if in_order else PARTS_AT_ONCE))
    while open_parts:
        part = open_parts.popleft()
        turn = next(part, None)
        if turn is None:
            open_parts.extend(islice(unopened_parts, 1))
        else:
            yield turn
            open_parts.append(part)


class _SampleLimit:
    """Limits the number of samples that are read, bad samples included. None means no limit.

    All parts of a unit share this object. With a limit, a unit has all parts of its split (`plan_units`), so the
    limit applies to the split.
    """

    def __init__(self, limit: int | None) -> None:
        self._remaining = limit

    def truncate(self, item: pa.RecordBatch | BadSample) -> pa.RecordBatch | BadSample | None:
        """Return the part of `item` that may still be read; None if nothing may be read any more."""
        if self._remaining is None:
            return item
        if not self._remaining:
            return None
        kept = item if isinstance(item, BadSample) else item.slice(0, self._remaining)
        self._remaining -= 1 if isinstance(kept, BadSample) else kept.num_rows
        return kept


def _read_part(
    work: IngestWork,
    part: SourcePart,
    turn_bytes: int | None,
    limit: _SampleLimit,
    bad: list[BadSample],
    progress: Progress,
) -> Iterator[BatchRows]:
    """Yield the samples of one part in turns of about `turn_bytes`; None: one turn for each batch of the source."""
    assert isinstance(work.source, StreamedSource)
    for item in work.source.read_prefixed(part):
        kept = limit.truncate(item)
        if kept is None:
            return
        if isinstance(kept, BadSample):
            bad.append(kept)
            continue
        progress.advance(kept.nbytes, num_samples=kept.num_rows)
        batch = check_batch(work, kept, part.split, bad)
        # Release the source's batch, so that only the checked samples stay in memory between turns.
        del item, kept
        start, stop = 0, batch.num_samples
        while start < batch.num_samples:
            if turn_bytes is not None:
                start_bytes = int(batch.stops_bytes[start - 1]) if start else 0
                turn_stop = int(np.searchsorted(batch.stops_bytes, start_bytes + turn_bytes))
                # The sample that reaches `turn_bytes` is included, so that a turn is never empty. `turn_stop` may be
                # below `start`, because `turn_bytes` is 0 for very small shards.
                stop = min(batch.num_samples, max(start, turn_stop) + 1)
            yield batch, np.arange(start, stop)
            start = stop


def _hold_out(
    batch: CheckedBatch, rows: Integers, split: str, fraction: float
) -> Iterator[tuple[str, CheckedBatch, Integers]]:
    """Yield split, batch and rows: first of the samples that stay in `split`, then of those that are held out."""
    if not fraction or split != DEFAULT_SPLIT:
        yield split, batch, rows
        return
    keys = batch.columns.column(KEY).take(pa.array(rows)).to_pylist()
    held_out = np.array([is_held_out(key, fraction) for key in keys], np.bool_)
    if not held_out.all():
        yield split, batch, rows[~held_out]
    if held_out.any():
        # The samples are copied, because a view would keep the batch in memory until the held-out shard is full.
        copied = batch.take(rows[held_out])
        yield HELD_OUT_SPLIT, copied, np.arange(copied.num_samples)


@dataclass(eq=False)
class _ShardBuilder:
    """Collects samples of one split until a shard is full, and writes the shard.

    Attributes:
        work: description of the ingest.
        unit: number of the unit.
        split: split of the samples.
        finisher: stores the shards.
        earlier: shards that an interrupted run stored, which are not written again.
    """

    work: IngestWork
    unit: int
    split: str
    finisher: ShardFinisher
    earlier: EarlierShards
    _ordinal: int = 0  # number of the next shard of this split
    _collected: list[BatchRows] = field(default_factory=list)
    _size_bytes: int = 0  # of the collected samples

    def add(self, batch: CheckedBatch, rows: Integers) -> None:
        """Add samples, and write every shard that they fill."""
        while len(rows):
            stops = np.cumsum(batch.sizes_bytes[rows])
            free_bytes = self.work.options.full_bytes - self._size_bytes
            # The sample that reaches the limit is included, so a shard is never empty.
            count = min(len(rows), int(np.searchsorted(stops, free_bytes)) + 1)
            self._collected.append((batch, rows[:count]))
            self._size_bytes += int(stops[count - 1])
            rows = rows[count:]
            if self._size_bytes >= self.work.options.full_bytes:
                self._flush()

    def close(self) -> None:
        """Write the last shard."""
        if self._collected:
            self._flush()

    def _flush(self) -> None:
        collected, self._collected, self._size_bytes = self._collected, [], 0
        ordinal, self._ordinal = self._ordinal, self._ordinal + 1
        if (self.split, ordinal) in self.earlier:
            self.finisher.keep(self.earlier[self.split, ordinal])
            return
        count = sum(len(rows) for _, rows in collected)
        options = self.work.options
        order = (
            np.arange(count)
            if options.keep_order or options.in_place
            else permute_in_shard(count, options.seed, self.unit, ordinal)
        )
        output = self.finisher.open()
        ordered = _OrderedSamples(collected, order)
        output.writer.append_columns(*ordered.columns(self.work.schema))
        if self.finisher.needs_index:
            self._set_index(output, ordered, collected)
        output.image_kinds.update(kind for kind in ordered.pick([batch.kinds for batch, _ in collected]) if kind)
        self.finisher.add(self.split, ordinal, output)
        # Otherwise the allocator would keep this shard's memory while the next shard takes memory of its own.
        del ordered, collected
        pa.default_memory_pool().release_unused()

    @staticmethod
    def _set_index(output: ShardOutput, ordered: _OrderedSamples, collected: list[BatchRows]) -> None:
        output.keys = ordered.pick_array([batch.keys for batch, _ in collected])
        digests = [batch.digests for batch, _ in collected]
        output.samples = ordered.pick_array([sample_digests for sample_digests, _ in digests])
        output.payloads = ordered.pick_array([payload_digests for _, payload_digests in digests])


class _OrderedSamples:
    """Collected samples in the order in which a shard has them.

    Args:
        collected: batches, and the rows taken from each.
        order: `int64[n]`, for each position in the new order, the position among the collected samples.
    """

    def __init__(self, collected: list[BatchRows], order: Integers) -> None:
        self._collected = collected
        self._order = order
        batch_numbers = np.repeat(np.arange(len(collected)), [len(rows) for _, rows in collected])
        # Batch and row of each sample in the new order. Iterating over a `memoryview` gives Python ints one by one.
        self._batches = batch_numbers[order].data
        self._rows = np.concatenate([rows for _, rows in collected])[order].data

    def columns(self, schema: pa.Schema) -> tuple[dict[str, Iterator[Any]], pa.RecordBatch]:
        """Return blobs and texts (`is_gathered`) as a lazy iterator per column, and the others as a record batch."""
        gathered = {field.name: self._views(field.name) for field in schema if is_gathered(field.type)}
        others = [field.name for field in schema if field.name not in gathered]
        if not others:
            # Empty structs give a record batch that has a number of samples, but no columns.
            return gathered, pa.RecordBatch.from_struct_array(pa.array([{}] * len(self._order), pa.struct([])))
        batches = [batch.columns.select(others).take(pa.array(rows)) for batch, rows in self._collected]
        return gathered, pa.concat_batches(batches).take(pa.array(self._order))

    def pick(self, values: list[Any]) -> list[Any]:
        """Return the value of each sample; `values` has one sequence of values per batch."""
        return [values[batch][row] for batch, row in zip(self._batches, self._rows, strict=True)]

    def pick_array(self, values: list[pa.Array]) -> pa.Array:
        """Like `pick`, but the values of each batch are an Arrow array, and so is the result."""
        arrays = [array.take(pa.array(rows)) for array, (_, rows) in zip(values, self._collected, strict=True)]
        return pa.concat_arrays(arrays).take(pa.array(self._order))

    def _views(self, column: str) -> Iterator[Any]:
        columns = [BlobViews(batch.columns.column(column)) for batch, _ in self._collected]
        return (columns[batch].view(row) for batch, row in zip(self._batches, self._rows, strict=True))
