"""How the files of many ranks and restarts become one history: what the weights at its end have seen.

A job that is killed serves some positions that no saved state knows of; resumed from a state, it serves them again.
Only the second time counts: the weights that saw the first are gone. The rule, exactly:

1. Files are ordered by their numbers; those of several folders by when they started, as far as the numbers of each
   folder allow. Files without records say nothing and are left out.
2. Neighbours in that order that begin at the same cursor with the same number of ranks are one *stretch*: the ranks
   of a job, side by side. Of several files by one rank in a stretch the last counts; the others are its
   model-parallel peers, or an attempt that was restarted from the same state. Ranks have as many peers and as many
   attempts as one another, so in a stretch all that left files left equally many. Where they did not, the last file
   of a rank with fewer may be of an attempt that was given up, which proves nothing of the last one: `audit` calls
   that a disagreement. (A rank that was killed before its first batch looks the same.) A rank without any file is
   no disagreement: what it served is missing.
3. A stretch continues the latest one before it that stood at its first cursor: that began there, or came there with
   whole batches. Where no file says so, it continues the latest that began no later.
4. The history is the last stretch and whatever it continues, back to the first. Each of these counts from where it
   begins up to its limit, where the next begins; all else was forgotten.

A cursor is (epoch, position). This rests on what any launcher ensures: the ranks of one attempt are gone before the
next begins to serve.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from datasvc.ledger.file import LedgerFile, LedgerRecord, RecordKind
from datasvc.ledger.strided_range import StridedRange

Place = tuple[int, int]
"""A cursor: epoch and position."""

END: Place = (1 << 62, 0)


@dataclass(frozen=True)
class Attempt:
    """What the ranks of one attempt served from a cursor on.

    Attributes:
        begin: that cursor.
        limit: where what they served stops to count; `begin` where all of it was forgotten.
        world_size: how many data ranks there were.
        files: by data rank; ranks without records are missing.
        copies: further files of these ranks, which do not count.
    """

    begin: Place
    limit: Place
    world_size: int
    files: dict[int, LedgerFile]
    copies: list[LedgerFile]

    @property
    def num_files(self) -> dict[int, int]:
        """How many files each rank left, with its copies."""
        return dict(Counter(file.header.data_rank for file in (*self.files.values(), *self.copies)))

    @property
    def missing_ranks(self) -> list[int]:
        """Data ranks that left no record."""
        return sorted(set(range(self.world_size)) - set(self.files))

    def range_in(self, epoch: int, num_samples: int) -> tuple[int, int]:
        """Return the positions [start, stop) of an epoch for which this stretch counts."""
        (first, start), (last, stop) = self.begin, self.limit
        if not first <= epoch <= last:
            return 0, 0
        start = start if epoch == first else 0
        stop = stop if epoch == last else num_samples
        return start, max(start, stop)

    def stood_at(self, place: Place) -> bool:
        """Return whether a state of this stretch can have been saved there."""
        if place == self.begin:
            return True
        header = next(iter(self.files.values())).header
        (epoch, position), num_samples = place, header.num_samples
        start = self.begin[1] if epoch == self.begin[0] else 0
        is_whole = position == num_samples or (position - start) % (header.batch_size * self.world_size) == 0
        return is_whole and self.begin < place <= max(self._reached(num_samples))

    def _reached(self, num_samples: int) -> Iterator[Place]:
        """Yield how far each record brought its rank."""
        yield self.begin
        for record in (record for file in self.files.values() for record in file.records):
            if record.kind in {RecordKind.SERVED, RecordKind.DROPPED}:
                stop = record.comb.stop
                yield (record.epoch + 1, 0) if stop >= num_samples else (record.epoch, stop)

    def counted(self, record: LedgerRecord, num_samples: int) -> StridedRange:
        """Return the positions of a record that count."""
        if record.kind is RecordKind.PADDED:
            # Wherever the samples are taken from that pad it, the step is the one that ends the epoch.
            return record.comb if self.limit >= (record.epoch, num_samples) else record.comb.clip(0, 0)
        return record.comb.clip(*self.range_in(record.epoch, num_samples))


def order_files(folders: Sequence[Sequence[LedgerFile]]) -> Iterator[LedgerFile]:
    """Yield the files of some folders, each ordered by number, in the order of the history."""

    def timed(folder: int, files: Sequence[LedgerFile]) -> Iterator[tuple[float, int, int, LedgerFile]]:
        latest = 0.0
        for index, file in enumerate(files):
            latest = max(latest, file.header.started)  # a clock that was set back changes no order of numbers
            yield latest, folder, index, file

    merged = heapq.merge(*(timed(folder, files) for folder, files in enumerate(folders)), key=lambda each: each[:3])
    return (file for *_, file in merged)


def split_into_stretches(files: Iterator[LedgerFile]) -> list[Attempt]:
    """Return the attempts that some files tell of, in their order; see the module."""
    said = (file for file in files if file.records or file.damage)
    stretches = []
    for (begin, world_size), group in groupby(said, key=_key_of):
        of_rank: dict[int, list[LedgerFile]] = {}
        for file in group:
            of_rank.setdefault(file.header.data_rank, []).append(file)
        last = {rank: own[-1] for rank, own in of_rank.items()}
        copies = [file for own in of_rank.values() for file in own[:-1]]
        stretches.append(Attempt(begin, begin, world_size, last, copies))
    return _limit(stretches)


def _limit(stretches: list[Attempt]) -> list[Attempt]:
    """Give those that belong to the history of the last one their limits."""
    limited = list(stretches)
    limit, index = END, len(stretches) - 1
    while index >= 0:
        limited[index] = replace(stretches[index], limit=limit)
        limit = stretches[index].begin
        index = _continued_by(stretches[:index], limit)
    return limited


def _continued_by(earlier: Sequence[Attempt], begin: Place) -> int:
    """Return the number of the stretch that one which begins there continues; -1 for none."""
    stood = [index for index, stretch in enumerate(earlier) if stretch.stood_at(begin)]
    began = [index for index, stretch in enumerate(earlier) if stretch.begin <= begin]
    return max(stood or began, default=-1)


def _key_of(file: LedgerFile) -> tuple[Place, int]:
    header = file.header
    return (header.epoch, header.position), header.data_world_size
