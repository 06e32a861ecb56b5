"""A unit of a streamed source to its shards: read its parts side by side, check, permute within each shard, write.

Samples of up to `PARTS_AT_ONCE` parts are taken in turn, some at a time, so that sorted parts are mixed; then they
are collected until a shard is full, permuted in it and written. So a worker holds one shard (and one more where a
share is held out) and a small piece of each part that it reads.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy as np
import pyarrow as pa

from datasvc.keyed_random import Integers
from datasvc.repository import Repository
from datasvc.repository.logs.journal import Journal
from datasvc.shards.format.digests import BlobParts
from datasvc.shards.format.schema import KEY
from datasvc.shards.format.writer import is_gathered
from datasvc.shards.ingestion.build import BuiltShard, IngestProgress, IngestWork, Report, ShardFinisher, UnitResult
from datasvc.shards.ingestion.plan import PARTS_AT_ONCE, IngestUnit, is_held_out, permute_in_shard
from datasvc.shards.ingestion.validate import CheckedBatch, check_batch
from datasvc.shards.sources.common.source import BadSample, SourcePart, StreamedSource
from datasvc.shards.sources.common.splits import DEFAULT_SPLIT, HELD_OUT_SPLIT

# A shard is made of so many turns of the parts that are read side by side.
_TURNS_PER_SHARD: Final = 256

Earlier = Mapping[tuple[str, int], BuiltShard]


def build_streamed(
    work: IngestWork, unit: IngestUnit, repository: Repository, journal: Journal, report: Report, earlier: Earlier
) -> UnitResult:
    """Store the shards of `unit`; returns what came of it.

    Args:
        work: what is done.
        unit: parts of `work.source`.
        repository: where shards go.
        journal: of the ingest.
        report: told what was read.
        earlier: shards that an interrupted run has stored already, by split and ordinal; they are read again, so
            that the others begin where they must, and not made again.

    Raises:
        ConfigError, NotFoundError, UnavailableError: the source or the repository failed.
    """
    bad: list[BadSample] = []
    with ShardFinisher(work, unit.number, repository, journal, records_shards=True) as finisher:
        makers: dict[str, _ShardMaker] = {}
        for batch, rows in _take_turns(work, unit, bad, report):
            for split, part, chosen in _hold_out(batch, rows, unit.split, work.options.val_fraction):
                if split not in makers:
                    makers[split] = _ShardMaker(work, unit.number, split, finisher, earlier)
                makers[split].add(part, chosen)
        for maker in makers.values():
            maker.close()
        result = finisher.finish(bad)
    report(IngestProgress(num_shards=len(result.shards)))
    return result


def _take_turns(
    work: IngestWork, unit: IngestUnit, bad: list[BadSample], report: Report
) -> Iterator[tuple[CheckedBatch, Integers]]:
    """Yield samples of the unit's parts in turn: checked batches, and which of their samples this turn takes."""
    # With a limit the first samples of the source are meant: its parts are read one after the other.
    in_order = work.options.keep_order or work.options.limit is not None
    limit = _Limit(work.options.limit)
    turn_bytes = work.options.shard_bytes // _TURNS_PER_SHARD
    waiting = deque(unit.parts)
    reading: deque[_OpenPart] = deque()
    while waiting or reading:
        while waiting and len(reading) < (1 if in_order else PARTS_AT_ONCE):
            reading.append(_OpenPart(work, waiting.popleft(), bad, report, limit))
        part = reading.popleft()
        turn = part.take(None if in_order else turn_bytes)
        if turn is not None:
            yield turn
            # Read in order, a part is read to its end before the next one is opened.
            reading.appendleft(part) if in_order else reading.append(part)


class _Limit:
    """How many samples may still be read, bad ones included; None: all."""

    def __init__(self, limit: int | None) -> None:
        self._left = limit

    def cut(self, piece: pa.RecordBatch | BadSample) -> pa.RecordBatch | BadSample | None:
        """Return what of `piece` may still be read, None for nothing."""
        if self._left is None:
            return piece
        if not self._left:
            return None
        kept = piece if isinstance(piece, BadSample) else piece.slice(0, self._left)
        self._left -= 1 if isinstance(kept, BadSample) else kept.num_rows
        return kept


class _OpenPart:
    """A part being read: hands out its samples some bytes at a time."""

    def __init__(
        self, work: IngestWork, part: SourcePart, bad: list[BadSample], report: Report, limit: _Limit
    ) -> None:
        assert isinstance(work.source, StreamedSource)
        self._work = work
        self._split = part.split
        self._bad = bad
        self._report = report
        self._limit = limit
        self._pieces = work.source.read(part)
        self._batch: CheckedBatch | None = None
        self._next = 0

    def take(self, size_bytes: int | None) -> tuple[CheckedBatch, Integers] | None:
        """Return samples of some `size_bytes`, at least one; of a whole batch for None. None at the end."""
        if self._batch is None or self._next == self._batch.num_samples:
            self._batch, self._next = self._read(), 0
            if self._batch is None:
                return None
        start, stop = self._next, self._batch.num_samples
        if size_bytes is not None:
            stops = self._batch.stops_bytes
            before = int(stops[start - 1]) if start else 0
            stop = min(stop, max(start, int(np.searchsorted(stops, before + size_bytes))) + 1)
        self._next = stop
        return self._batch, np.arange(start, stop)

    def _read(self) -> CheckedBatch | None:
        for read in self._pieces:
            piece = self._limit.cut(read)
            if piece is None:
                return None
            if isinstance(piece, BadSample):
                self._bad.append(piece)
                continue
            self._report(IngestProgress(piece.num_rows, piece.nbytes))
            batch = check_batch(self._work, piece, self._split, self._bad)
            if batch.num_samples:
                return batch
        return None


def _hold_out(
    batch: CheckedBatch, rows: Integers, split: str, fraction: float
) -> Iterator[tuple[str, CheckedBatch, Integers]]:
    """Yield which samples go to which split."""
    if not fraction or split != DEFAULT_SPLIT:
        yield split, batch, rows
        return
    keys = batch.columns.column(KEY).take(pa.array(rows)).to_pylist()
    held_out = np.array([is_held_out(key, fraction) for key in keys], np.bool_)
    if not held_out.all():
        yield split, batch, rows[~held_out]
    if held_out.any():
        # Copied: a few samples that wait for a shard to fill must not keep whole batches in memory.
        copied = batch.take(rows[held_out])
        yield HELD_OUT_SPLIT, copied, np.arange(copied.num_samples)


class _ShardMaker:
    """Collects samples of one split until a shard is full, and writes it."""

    def __init__(self, work: IngestWork, unit: int, split: str, finisher: ShardFinisher, earlier: Earlier) -> None:
        self._work = work
        self._unit = unit
        self._split = split
        self._finisher = finisher
        self._earlier = earlier
        self._ordinal = 0
        self._collected: list[tuple[CheckedBatch, Integers]] = []
        self._size_bytes = 0

    def add(self, batch: CheckedBatch, rows: Integers) -> None:
        """Take samples; writes every shard that they fill."""
        while len(rows):
            stops = np.cumsum(batch.sizes_bytes[rows])
            room = self._work.options.shard_bytes - self._size_bytes
            count = min(len(rows), int(np.searchsorted(stops, room)) + 1)
            self._collected.append((batch, rows[:count]))
            self._size_bytes += int(stops[count - 1])
            rows = rows[count:]
            if self._size_bytes >= self._work.options.shard_bytes:
                self._flush()

    def close(self) -> None:
        """Write the last shard."""
        if self._collected:
            self._flush()

    def _flush(self) -> None:
        collected, self._collected, self._size_bytes = self._collected, [], 0
        ordinal, self._ordinal = self._ordinal, self._ordinal + 1
        if (self._split, ordinal) in self._earlier:
            self._finisher.keep(self._earlier[self._split, ordinal])
            return
        count = sum(len(rows) for _, rows in collected)
        options = self._work.options
        order = np.arange(count) if options.keep_order else permute_in_shard(count, options.seed, self._unit, ordinal)
        output = self._finisher.open()
        line = _Line(collected, order)
        output.writer.append_columns(*line.columns(self._work.schema))
        output.keys = line.pick_array([batch.keys for batch, _ in collected])
        output.samples = line.pick_array([batch.digests[0] for batch, _ in collected])
        output.payloads = line.pick_array([batch.digests[1] for batch, _ in collected])
        output.image_kinds.update(kind for kind in line.pick([batch.kinds for batch, _ in collected]) if kind)
        self._finisher.add(self._split, ordinal, output)
        # What the allocator keeps of this shard would come on top of the next one.
        del line, collected
        pa.default_memory_pool().release_unused()


class _Line:
    """Collected samples in their new order.

    Args:
        collected: batches, and which of their samples are meant.
        order: `int64[n]`, the number of each sample among the collected ones.
    """

    def __init__(self, collected: list[tuple[CheckedBatch, Integers]], order: Integers) -> None:
        self._collected = collected
        self._order = order
        numbers = np.repeat(np.arange(len(collected)), [len(rows) for _, rows in collected])
        self._batches = numbers[order].data
        self._rows = np.concatenate([rows for _, rows in collected])[order].data

    def columns(self, schema: pa.Schema) -> tuple[dict[str, Iterator[Any]], pa.RecordBatch]:
        """Return the bytes of what is gathered, sample by sample and made as they are asked for; and all else."""
        gathered = {field.name: self._views(field.name) for field in schema if is_gathered(field.type)}
        others = [field.name for field in schema if field.name not in gathered]
        if not others:
            return gathered, pa.RecordBatch.from_struct_array(pa.array([{}] * len(self._order), pa.struct([])))
        parts = [batch.columns.select(others).take(pa.array(rows)) for batch, rows in self._collected]
        return gathered, pa.concat_batches(parts).take(pa.array(self._order))

    def pick(self, values: list[Any]) -> list[Any]:
        """Return a value of each sample; `values` has those of each batch."""
        return [values[batch][row] for batch, row in zip(self._batches, self._rows, strict=True)]

    def pick_array(self, values: list[pa.Array]) -> pa.Array:
        """Return what `pick` would, of Arrow arrays and as one."""
        parts = [part.take(pa.array(rows)) for part, (_, rows) in zip(values, self._collected, strict=True)]
        return pa.concat_arrays(parts).take(pa.array(self._order))

    def _views(self, column: str) -> Iterator[Any]:
        parts = [BlobParts(batch.columns.column(column)) for batch, _ in self._collected]
        return (parts[batch].view(row) for batch, row in zip(self._batches, self._rows, strict=True))
