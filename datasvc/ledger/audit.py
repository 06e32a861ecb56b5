"""Audits a ledger, for `datasvc audit`: did a run lose a sample, or serve one twice, over all ranks and restarts?

The audit is a pure function of the files. `history` groups the files into attempts, one for each start of the job,
and determines which positions of each attempt count: those that the final weights were trained on. Positions are
compared as strided ranges, so the cost depends on the number of restarts and ranks, not on the number of samples.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Final

from datasvc.errors import CorruptDataError, NotFoundError
from datasvc.ledger.file import SUFFIX, Header, LedgerFile, LedgerRecord, RecordKind, read_ledger
from datasvc.ledger.history import Attempt, Cursor, order_files, split_into_attempts
from datasvc.ledger.strided_range import StridedRange, Uneven, contiguous, cover
from datasvc.mix_schedule import stem_of
from datasvc.printable import count_text
from datasvc.shown import Shown

_MAX_NAMED_RANKS = 8  # number of ranks that one description lists


_MAX_DEPTH: Final = 4
_MAX_FOLDERS: Final = 10_000


@dataclass(frozen=True)
class EpochAudit:
    """How often the samples of one epoch were served to the training of the final weights.

    Attributes:
        epoch: epoch, counted from 0.
        num_samples: samples of the epoch.
        reached: number of positions that every rank has passed; all positions if the epoch is finished.
        is_finished: whether the run has passed the end of the epoch.
        served: number of positions served once, with a sample that is not masked.
        masked: number of positions served once, with a masked sample because the original did not decode.
        dropped: number of positions dropped at the end of the epoch by tail="drop".
        padded: number of padding samples: masked repetitions that fill a batch.
        never: positions before `reached` that no rank served or dropped.
        repeated: positions served more than once.
        again: number of positions served after the state that a restart resumed from; they were to be served again.
        copies: number of positions in files of a rank that repeat its counted file, see rule 2 of `history`.
        reasons: descriptions of ranks with a gap, a repetition or no file, if `never` or `repeated` is not empty.
        disagreements: descriptions of differences between ranks in the attempts that count for the epoch.
        left_out: number of positions served once, with a sample that the run masks, see `Masked`.
        returned: number of positions that a lost rank served without an effect on the weights, and another one again.
        carried: number of positions that were served before a replica was lost, whose weights the others continued.
    """

    epoch: int
    num_samples: int
    reached: int
    is_finished: bool
    served: int
    masked: int
    dropped: int
    padded: int
    never: Uneven
    repeated: Uneven
    again: int
    copies: int
    reasons: Sequence[str]
    disagreements: Sequence[str] = ()
    left_out: int = 0
    returned: int = 0
    carried: int = 0

    @property
    def is_faultless(self) -> bool:
        """Whether no error was found in the positions before `reached`."""
        return not (self.never.count or self.repeated.count or self.disagreements)

    @property
    def is_proven(self) -> bool:
        """Whether the epoch is finished, and each sample was served, masked or dropped once."""
        return self.is_finished and self.is_faultless


@dataclass(frozen=True)
class Audit(Shown):
    """Result of an audit.

    Attributes:
        header: header of the first file, with the data and the order.
        num_files: number of files read.
        world_sizes: number of ranks of each attempt.
        epochs: audited epochs.
        disagreements: descriptions of files with other data or another access order than the first file; and, in the
            audited epochs, of ranks that differ in batch size, tail or number of files.
        damage: descriptions of damaged records and files.
        torn: paths of files whose end was cut off by a crash.
    """

    header: Header
    num_files: int
    world_sizes: Sequence[int]
    epochs: Sequence[EpochAudit]
    disagreements: Sequence[str]
    damage: Sequence[str]
    torn: Sequence[str] = ()

    @property
    def is_proven(self) -> bool:
        """Whether at least one audited epoch is finished, and no audited epoch has an error."""
        is_sound = not (self.disagreements or self.damage)
        is_any_finished = any(epoch.is_finished for epoch in self.epochs)
        return is_sound and is_any_finished and all(epoch.is_faultless for epoch in self.epochs)


def audit(folders: Sequence[Sequence[LedgerFile]], *, epoch: int | None = None, damage: Sequence[str] = ()) -> Audit:
    """Audit the files of a run.

    Args:
        folders: files of each folder, sorted by number; one folder if all ranks share it.
        epoch: epoch to audit; None: all epochs in the files.
        damage: descriptions of files that could not be read.

    Raises:
        NotFoundError: there are no files, or the files have no records, or no records of `epoch`.
    """
    files = list(order_files(folders))
    if not files:
        raise NotFoundError("the ledger has no readable file; give the folder that a loader got as ledger=")
    header = files[0].header
    comparable, disagreements = _same_order(files, header)
    attempts = split_into_attempts(comparable)
    # Epochs without records between two others are audited too: all their positions are missing.
    # All records of an attempt may be damaged, so its first epoch counts too.
    recorded = sorted(
        {attempt.begin[0] for attempt in attempts}
        | {record.epoch for attempt in attempts for file in attempt.files.values() for record in file.records}
    )
    if not recorded:
        raise NotFoundError("the ledger has no records: no rank has served a batch")
    epochs = range(recorded[0], recorded[-1] + 1)
    if epoch is not None and epoch not in epochs:
        raise NotFoundError(f"the ledger has no epoch {epoch}; it has epochs {recorded[0]} to {recorded[-1]}")
    history = _History(attempts, header.num_samples)
    audits = [history.audit(number) for number in (epochs if epoch is None else [epoch])]
    # The disagreements of an attempt are in the result of each of its epochs: list them once.
    rank_disagreements = dict.fromkeys(chain.from_iterable(result.disagreements for result in audits))
    return Audit(
        header,
        len(files),
        [attempt.world_size for attempt in attempts],
        audits,
        [*disagreements, *rank_disagreements],
        [*damage, *chain.from_iterable(file.damage for file in files)],
        [str(file.path) for file in files if file.torn],
    )


def _same_order(files: Sequence[LedgerFile], header: Header) -> tuple[Iterator[LedgerFile], list[str]]:
    """Return the files with the access order of `header`, and descriptions of the other files."""
    expected = (stem_of(header.order), header.num_samples)
    # In another order, a position means another sample. So files with another order are only reported. But the later
    # weights of a mixture may change at a resume, and what was served before then does not.
    others = [file.header for file in files if (stem_of(file.header.order), file.header.num_samples) != expected]
    descriptions = dict.fromkeys(
        f"rank {other.data_rank} read {other.source}, {count_text(other.num_samples, 'sample')}, with "
        f"{other.order}; the first "
        f"file is of {header.source}, {count_text(header.num_samples, 'sample')}, with {header.order}"
        for other in others
    )
    same = (file for file in files if (stem_of(file.header.order), file.header.num_samples) == expected)
    return same, list(descriptions)


def _differences(attempt: Attempt) -> Iterator[str]:
    """Yield descriptions of the differences between the ranks of an attempt."""
    for name in ("batch_size", "tail", "order"):
        ranks_by_value = defaultdict(list)
        for rank, file in sorted(attempt.files.items()):
            ranks_by_value[str(getattr(file.header, name))].append(rank)
        if len(ranks_by_value) > 1:
            values = "; ".join(f"{value} on ranks {_ranks_text(ranks)}" for value, ranks in ranks_by_value.items())
            yield f"from {_cursor_text(attempt.begin)} on ranks differ in {name}: {values}"
    # Each start of the job leaves equally many files on all ranks, see rule 2 of `history`.
    max_files = max(attempt.num_files.values())
    ranks_by_num_files = defaultdict(list)
    for rank, num_files in sorted(attempt.num_files.items()):
        if num_files < max_files:
            ranks_by_num_files[num_files].append(rank)
    for num_files, ranks in sorted(ranks_by_num_files.items()):
        yield (
            f"from {_cursor_text(attempt.begin)} on rank {_ranks_text(ranks)} left {num_files} "
            f"{'file' if num_files == 1 else 'files'} where others left {max_files}: its last file may be of an "
            "earlier restart"
        )


class _History:
    """Records of all attempts, by epoch. Positions of an attempt count up to its limit, where the next one began."""

    def __init__(self, attempts: Sequence[Attempt], num_samples: int) -> None:
        self._attempts = attempts
        self._num_samples = num_samples
        # By epoch: records with their attempt and rank, and the number of positions in files that do not count.
        self._records: dict[int, list[tuple[Attempt, int, LedgerRecord]]] = defaultdict(list)
        self._copies: dict[int, int] = defaultdict(int)
        for attempt in attempts:
            for rank, file in attempt.files.items():
                for record in file.records:
                    self._records[record.epoch].append((attempt, rank, record))
            for record in (record for file in attempt.copies for record in file.records):
                if record.kind is RecordKind.SERVED:
                    self._copies[record.epoch] += record.count
        self._end = max(self._ends(), default=(0, 0))

    def audit(self, epoch: int) -> EpochAudit:
        """Audit one epoch."""
        counted: dict[RecordKind, list[StridedRange]] = {kind: [] for kind in RecordKind}  # positions that count
        # Windows of the records of served positions, by attempt (its id, because it is not hashable) and rank.
        passed: dict[tuple[int, int], list[StridedRange]] = defaultdict(list)
        num_recorded = num_returned = 0
        returned = self._returned(epoch)
        for attempt, rank, record in self._records[epoch]:
            strided = attempt.counted(record, self._num_samples)
            # What a lost rank served of these has had no effect. It may have served none of it.
            kept = list(_without(strided, returned[id(attempt), rank]))
            counted[record.kind] += kept
            if record.kind is RecordKind.SERVED:
                num_recorded += record.count
                num_returned += strided.size - sum(part.size for part in kept)
                passed[id(attempt), rank].append(contiguous(strided.start, strided.stop))
        # In an unfinished epoch, only positions that every rank has passed count as missing: the run may go on.
        is_finished = self._end >= (epoch, self._num_samples)
        reached = self._num_samples if is_finished else self._reached(epoch, passed)
        # Every rank records all dropped positions, so their ranges overlap.
        dropped = _union(counted[RecordKind.DROPPED], self._num_samples)
        carried = counted[RecordKind.CARRIED]
        coverage = cover([*counted[RecordKind.SERVED], *carried, *dropped], 0, reached)
        num_carried = sum(strided.size for strided in carried)
        num_dropped = _num_below(reached, dropped)
        num_masked, num_left_out = (
            # Carried positions were masked where they were served.
            _num_below(reached, counted[kind]) + num_carried - self._num_missing(carried, epoch, kind)
            for kind in (RecordKind.MASKED, RecordKind.LEFT_OUT)
        )
        # This includes dropped positions, and masked ones, because these are recorded as served too.
        num_once = reached - coverage.never.count - coverage.repeated.count
        is_uneven = bool(coverage.never.count or coverage.repeated.count)
        return EpochAudit(
            epoch,
            self._num_samples,
            reached,
            is_finished,
            # Negative if masked positions are repeated, because these are not in `num_once`.
            served=max(0, num_once - num_dropped - num_masked - num_left_out),
            masked=num_masked,
            dropped=num_dropped,
            padded=sum(strided.size for strided in counted[RecordKind.PADDED]),
            never=coverage.never,
            repeated=coverage.repeated,
            # Carried positions may be in files that are copies.
            again=max(
                0, num_recorded - num_returned - num_carried - sum(each.size for each in counted[RecordKind.SERVED])
            ),
            copies=self._copies[epoch],
            reasons=list(self._reasons(epoch, reached, passed)) if is_uneven else [],
            disagreements=[*self._disagreements(epoch), *self._unserved(carried, epoch)],
            left_out=num_left_out,
            returned=num_returned,
            carried=num_carried,
        )

    def _returned(self, epoch: int) -> dict[tuple[int, int], list[StridedRange]]:
        """Return what was returned of each rank, by attempt (its id) and rank."""
        returned: dict[tuple[int, int], list[StridedRange]] = defaultdict(list)
        for attempt, _, record in self._records[epoch]:
            if record.kind is RecordKind.RETURNED:
                returned[id(attempt), record.lost_rank].append(attempt.counted(record, self._num_samples))
        return returned

    def _unserved(self, carried: Sequence[StridedRange], epoch: int) -> Iterator[str]:
        """Yield a description if positions are recorded as applied in an earlier attempt, and no file has them."""
        if num_missing := self._num_missing(carried, epoch, RecordKind.SERVED):
            yield f"epoch {epoch} carries {count_text(num_missing, 'sample')} over that no file has served"

    def _num_missing(self, carried: Sequence[StridedRange], epoch: int, kind: RecordKind) -> int:
        """Return the number of positions that no record of a kind has, in whatever attempt."""
        files = chain.from_iterable((*attempt.files.values(), *attempt.copies) for attempt in self._attempts)
        found = [
            record.strided
            for file in files
            for record in file.records
            if record.kind is kind and record.epoch == epoch
        ]
        window = 0, self._num_samples
        return cover(found, *window).never.count - cover([*found, *carried], *window).never.count if carried else 0

    def _disagreements(self, epoch: int) -> Iterator[str]:
        """Yield descriptions of the differences between ranks in the attempts that count for an epoch."""
        for attempt in self._attempts:
            start, stop = attempt.range_in(epoch, self._num_samples)
            if start < stop:
                yield from _differences(attempt)

    def _ends(self) -> Iterator[Cursor]:
        """Yield cursors (epoch, position) that the run reached; the largest one is the end of the history."""
        for attempt in self._attempts:
            if attempt.begin < attempt.limit:
                yield attempt.begin
        for epoch, records in self._records.items():
            for attempt, _, record in records:
                strided = attempt.counted(record, self._num_samples)
                if strided.start < strided.stop and record.kind in {RecordKind.SERVED, RecordKind.DROPPED}:
                    yield epoch, strided.stop

    def _reached(self, epoch: int, passed: dict[tuple[int, int], list[StridedRange]]) -> int:
        """Return the position of an unfinished epoch up to which all ranks of the last attempt have served."""
        # Earlier positions were served by the attempts that the last one continues.
        last = self._attempts[-1]
        start, _ = last.range_in(epoch, self._num_samples)
        ends = [max((span.stop for span in passed[id(last), rank]), default=start) for rank in last.files]
        return min(ends, default=0)

    def _reasons(self, epoch: int, reached: int, passed: dict[tuple[int, int], list[StridedRange]]) -> Iterator[str]:
        """Yield descriptions of the ranks of each attempt with missing or repeated positions."""
        for attempt in self._attempts:
            start, stop = attempt.range_in(epoch, self._num_samples)
            # Do not report a rank for positions that no rank of the attempt has passed.
            ends = [span.stop for rank in attempt.files for span in passed[id(attempt), rank]]
            stop = min(stop, reached, max(ends, default=start))
            if start >= stop:
                continue
            prefix = (
                f"in the attempt of {count_text(attempt.world_size, 'rank')} from {_cursor_text(attempt.begin)} on"
            )
            if attempt.missing_ranks:
                yield f"{prefix} rank {_ranks_text(attempt.missing_ranks)} left no file"
            rest = attempt.find_rest(epoch)
            for rank, file in sorted(attempt.files.items()):
                spans = passed[id(attempt), rank]
                if rest is not None:
                    # Its batches have any positions of the round. At its end, a rank records the whole round.
                    has_passed = rest in spans or stop < rest.stop
                    spans = [*([rest] if has_passed else []), *(span for span in spans if span.start >= rest.stop)]
                coverage = cover(spans, start, stop)
                # The first gap and the first repetition are enough to identify the rank.
                for gap in coverage.never.ranges[:1]:
                    yield f"{prefix} rank {rank} skipped positions {gap.start} to {gap.stop - 1}: {file.path.name}"
                for twice in coverage.repeated.ranges[:1]:
                    positions = f"{twice.start} to {twice.stop - 1}"
                    yield f"{prefix} rank {rank} served positions {positions} twice: {file.path.name}"


def _num_below(stop: int, ranges: Iterable[StridedRange]) -> int:
    """Return the number of positions below `stop` in all ranges together."""
    return sum(strided.clip(0, stop).size for strided in ranges)


def _without(strided: StridedRange, others: Iterable[StridedRange]) -> Iterator[StridedRange]:
    """Yield the positions of a range that are in none of several contiguous ranges, as ranges."""
    for other in sorted(others, key=lambda other: other.start):
        yield strided.clip(strided.start, other.start)
        strided = strided.clip(other.stop, strided.stop)
    yield strided


def _union(ranges: Sequence[StridedRange], num_samples: int) -> list[StridedRange]:
    """Return the union of contiguous ranges in range(num_samples) as disjoint ranges."""
    gaps = cover(ranges, 0, num_samples).never.ranges
    # The union starts and stops where gaps stop and start.
    edges = [0, *chain.from_iterable((gap.start, gap.stop) for gap in gaps), num_samples]
    spans = zip(edges[::2], edges[1::2], strict=True)
    return [contiguous(start, stop) for start, stop in spans if start < stop]


def _cursor_text(cursor: Cursor) -> str:
    return f"epoch {cursor[0]}, position {cursor[1]},"


def _ranks_text(ranks: Sequence[int]) -> str:
    names = ", ".join(map(str, ranks[:_MAX_NAMED_RANKS]))
    return names if len(ranks) <= _MAX_NAMED_RANKS else f"{names} and {len(ranks) - _MAX_NAMED_RANKS} more"


def find_ledgers(folder: Path) -> list[str]:
    """Return the ledgers below a folder, that is the folders with files of a ledger, relative to it and sorted.

    "." is the folder itself. Folders that cannot be read are left out. The search ends four levels below `folder`,
    and after ten thousand folders. Symbolic links are not followed.
    """
    found = []
    for number, (path, folders, files) in enumerate(os.walk(folder)):
        if number >= _MAX_FOLDERS:
            break
        relative = Path(path).relative_to(folder)
        if len(relative.parts) >= _MAX_DEPTH:
            folders.clear()
        if any(name.endswith(SUFFIX) for name in files):
            found.append(str(relative))
    return sorted(found)


def audit_folders(paths: Sequence[Path], *, epoch: int | None = None) -> Audit:
    """Audit the ledger of a run.

    Args:
        paths: folders of the ledger, or files; several, if each node has its own folder.
        epoch: epoch to audit; None: all epochs in the files.

    Raises:
        CorruptDataError: no file can be read, and some are damaged. If others can be read, damage is in the result.
        NotFoundError: a path is no ledger, or there are no records; see `audit`.
        ConfigError, UnavailableError: a file has another format, or cannot be read.
    """
    results = [list(read_ledger(path)) for path in paths]
    damage = [str(file) for folder in results for file in folder if isinstance(file, CorruptDataError)]
    folders = [[file for file in folder if isinstance(file, LedgerFile)] for folder in results]
    # An audit needs at least one readable file: its header states the data set and the access order.
    if damage and not any(folders):
        raise CorruptDataError("\n".join(damage))
    return audit(folders, epoch=epoch, damage=damage)
