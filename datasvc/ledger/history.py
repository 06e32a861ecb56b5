"""Derives the history of a run from its ledger files: the positions that the final weights were trained on.

A killed job has served positions after its last saved state. When it resumes from this state, it serves these
positions again. Only the second time counts, because the weights of the first time are lost. A cursor is a pair
(epoch, position). The rules:

1. The files of a folder are ordered by number. Several folders are merged by start time; the order within a folder
   does not change. Files without records are ignored.
2. Consecutive files with the same first cursor and the same number of ranks are one *attempt*: ranks that started
   together. If a rank has several files in an attempt, the last one counts. The others belong to its model-parallel
   peers, or to an earlier start from the same state. All ranks have equally many peers and restarts, so all ranks
   with files must have equally many files. If a rank has fewer, its last file may belong to an earlier restart and
   prove nothing about the last one, so `audit` reports a disagreement. (A rank that was killed before its first batch
   has the same effect.) A rank without files is not a disagreement, because `audit` reports its positions as missing.
3. An attempt continues the latest earlier attempt that could save a state at its first cursor: one that began at this
   cursor, or reached it with whole batches. If no earlier attempt could, it continues the latest one that began at or
   before this cursor.
4. The history is the last attempt and the chain of attempts that it continues. Each attempt counts from its first
   cursor to its limit, the first cursor of the next attempt in the chain. All other positions do not count, because
   the weights trained on them were lost.

A round of averaged weights that is continued without a lost replica begins an attempt at its start. What the other
replicas had applied of it is in CARRIED records of that attempt; these positions count, and are not served again.

The rules require what every launcher ensures: all ranks of an attempt exit before the next attempt starts to serve.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, count, groupby, repeat

from datasvc.ledger.file import LedgerFile, LedgerRecord, RecordKind
from datasvc.ledger.strided_range import StridedRange, contiguous

Cursor = tuple[int, int]
"""Epoch and position."""

# Limit of the last attempt: a cursor after all positions of any run.
END: Cursor = (1 << 62, 0)


@dataclass(frozen=True)
class Attempt:
    """An attempt, see rule 2 of this module: the ledger files of ranks that started together.

    Attributes:
        begin: first cursor of the attempt.
        limit: cursor before which the served positions count; equal to `begin` if no positions count.
        world_size: number of data ranks.
        files: for each data rank, the file that counts; ranks without records are missing.
        copies: other files of these ranks, which do not count.
    """

    begin: Cursor
    limit: Cursor
    world_size: int
    files: dict[int, LedgerFile]
    copies: list[LedgerFile]

    @property
    def num_files(self) -> dict[int, int]:
        """Number of files of each rank in `files`, including copies."""
        return dict(Counter(file.header.data_rank for file in (*self.files.values(), *self.copies)))

    @property
    def missing_ranks(self) -> list[int]:
        """Data ranks that are missing in `files`."""
        return sorted(set(range(self.world_size)) - set(self.files))

    def range_in(self, epoch: int, num_samples: int) -> tuple[int, int]:
        """Return the positions [start, stop) of an epoch that count in this attempt; start == stop if none count."""
        (first, start), (last, stop) = self.begin, self.limit
        if not first <= epoch <= last:
            return 0, 0
        start = start if epoch == first else 0
        stop = stop if epoch == last else num_samples
        return start, max(start, stop)

    def could_save_at(self, cursor: Cursor) -> bool:
        """Return whether this attempt can have saved a state at a cursor."""
        if cursor == self.begin:
            return True
        # Any rank's header will do: if ranks differ in batch size, the audit reports a disagreement.
        header = next(iter(self.files.values())).header
        epoch, position = cursor
        start = self.begin[1] if epoch == self.begin[0] else 0
        # A round that was continued without a replica ends where it was planned to, with other ranks. Within it,
        # no state is saved.
        if (rest := self.find_rest(epoch)) is not None:
            if position < rest.stop:
                return False
            start = rest.stop
        global_batch_size = header.batch_size * self.world_size
        # A state is saved only between global batches, or at the end of an epoch, after a batch of any size.
        is_whole = position == header.num_samples or (position - start) % global_batch_size == 0
        return is_whole and self.begin < cursor <= max(self._reached(header.num_samples))

    def find_rest(self, epoch: int) -> StridedRange | None:
        """Return the positions of the broken round that this attempt begins with; None: it begins with none."""
        rounds = (
            record.strided
            for file in self.files.values()
            for record in file.records
            if (record.kind, record.epoch, record.count) == (RecordKind.CARRIED, epoch, 0)
        )
        return next((contiguous(window.start, window.stop) for window in rounds), None)

    def _reached(self, num_samples: int) -> Iterator[Cursor]:
        """Yield the first cursor of the attempt, and the cursor after each record."""
        yield self.begin
        for record in (record for file in self.files.values() for record in file.records):
            if record.kind in {RecordKind.SERVED, RecordKind.DROPPED}:
                stop = record.strided.stop
                yield (record.epoch + 1, 0) if stop >= num_samples else (record.epoch, stop)

    def counted(self, record: LedgerRecord, num_samples: int) -> StridedRange:
        """Return the positions of a record that count in the history."""
        if record.kind is RecordKind.PADDED:
            # Padding samples may have any positions, so their positions cannot be compared with the limit. Only the
            # last step of an epoch is padded: padding counts if the attempt counts up to the end of the epoch.
            is_end_counted = self.limit >= (record.epoch, num_samples)
            return record.strided if is_end_counted else record.strided.clip(0, 0)
        return record.strided.clip(*self.range_in(record.epoch, num_samples))


def order_files(folders: Sequence[Sequence[LedgerFile]]) -> Iterator[LedgerFile]:
    """Yield the files of several folders, each sorted by number, in the order of rule 1."""

    def with_sort_keys(folder: int, files: Sequence[LedgerFile]) -> Iterator[tuple[float, int, int, LedgerFile]]:
        """Yield (time, folder, index in the folder, file); the first three are the sort key."""
        # Use the latest start time so far, which never decreases: the files of a folder keep the order of their
        # numbers, even if a clock was set back.
        latest = accumulate((file.header.started for file in files), max)
        yield from zip(latest, repeat(folder), count(), files)

    keyed = (with_sort_keys(folder, files) for folder, files in enumerate(folders))
    merged = heapq.merge(*keyed, key=lambda item: item[:3])
    return (file for *_, file in merged)


def split_into_attempts(files: Iterator[LedgerFile]) -> list[Attempt]:
    """Return the attempts of ordered files, with their limits, by the rules of this module."""
    non_empty = (file for file in files if file.records or file.damage)
    attempts = []
    starts = groupby(non_empty, lambda file: ((file.header.epoch, file.header.position), file.header.data_world_size))
    for (begin, world_size), group in starts:
        files_by_rank: dict[int, list[LedgerFile]] = {}
        for file in group:
            files_by_rank.setdefault(file.header.data_rank, []).append(file)
        last = {rank: rank_files[-1] for rank, rank_files in files_by_rank.items()}
        copies = [file for rank_files in files_by_rank.values() for file in rank_files[:-1]]
        # With `begin` as limit, no positions count. `_set_limits` sets the limits of the attempts that count.
        attempts.append(Attempt(begin, begin, world_size, last, copies))
    return _set_limits(attempts)


def _set_limits(attempts: list[Attempt]) -> list[Attempt]:
    """Set the limits of the attempts in the history, by rule 4; return all attempts."""
    # Iterate backwards, because the first cursor of an attempt is the limit of the attempt that it continues.
    limited = list(attempts)
    limit, index = END, len(attempts) - 1
    while index >= 0:
        limited[index] = replace(attempts[index], limit=limit)
        limit = attempts[index].begin
        index = _continued_by(attempts[:index], limit)
    return limited


def _continued_by(earlier: Sequence[Attempt], begin: Cursor) -> int:
    """Return the index of the attempt that an attempt beginning at `begin` continues, by rule 3; -1 for none."""
    with_state = [index for index, attempt in enumerate(earlier) if attempt.could_save_at(begin)]
    begun_before = [index for index, attempt in enumerate(earlier) if attempt.begin <= begin]
    return max(with_state or begun_before, default=-1)
