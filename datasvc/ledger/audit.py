"""The proof that a run served each sample of an epoch once, over all ranks and restarts; or what speaks against it.

Pure: from the files of a ledger to what they prove. Which files count for which positions is `history`'s rule; the
rest is arithmetic of combs, so a billion samples cost what the number of restarts and ranks costs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain

from datasvc.errors import NotFoundError
from datasvc.ledger.coverage import Uneven, cover
from datasvc.ledger.file import Header, LedgerFile, LedgerRecord, RecordKind
from datasvc.ledger.history import Attempt, Place, order_files, split_into_stretches
from datasvc.ledger.strided_range import StridedRange, solid

_NAMED_RANKS = 8


@dataclass(frozen=True)
class EpochAudit:
    """What became of the samples of one epoch, for the weights at the end of the history.

    Attributes:
        epoch: counted from 0.
        num_samples: of it.
        reached: positions that every rank has passed; all of them once the epoch is finished.
        is_finished: whether the run left the epoch.
        served: positions handed over once, with a sample.
        masked: handed over, but the sample did not decode.
        dropped: positions that filled no batch, as tail="drop" says.
        padded: samples handed over once more, masked, to fill a batch.
        never: positions before `reached` that nobody handed over.
        repeated: positions that were handed over more than once.
        again: positions handed over by attempts that the weights at the end forgot, restarted from older states.
        copies: positions in further files of the same ranks: model-parallel peers, or a restart from the same state.
        reasons: of what was never handed over or repeatedly: which ranks have a gap or no file, in words.
        disagreements: of the ranks in the stretches that count for it, a line each.
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

    @property
    def is_faultless(self) -> bool:
        """Whether nothing speaks against it so far."""
        return not (self.never.count or self.repeated.count or self.disagreements)

    @property
    def is_proven(self) -> bool:
        """Whether each sample of the epoch was accounted for once."""
        return self.is_finished and self.is_faultless


@dataclass(frozen=True)
class Audit:
    """What a ledger proves.

    Attributes:
        header: of its first file: what was read, in which order.
        num_files: how many files were read.
        world_sizes: numbers of ranks, stretch by stretch.
        epochs: those that were looked at.
        disagreements: files of other data or another order; and those of the ranks in the epochs looked at, which cut
            batches differently or left unequal numbers of files.
        damage: what cannot be read, a line each.
        torn: files whose end a crash cut off.
    """

    header: Header
    num_files: int
    world_sizes: Sequence[int]
    epochs: Sequence[EpochAudit]
    disagreements: Sequence[str]
    damage: Sequence[str]
    torn: Sequence[str] = field(default=())

    @property
    def is_proven(self) -> bool:
        """Whether epochs were finished, and in none of those looked at anything speaks against it."""
        sound = not (self.disagreements or self.damage)
        return sound and any(each.is_finished for each in self.epochs) and all(e.is_faultless for e in self.epochs)


def audit(folders: Sequence[Sequence[LedgerFile]], *, epoch: int | None = None, damage: Sequence[str] = ()) -> Audit:
    """Return what the files of a run prove.

    Args:
        folders: the files of each folder, by number; one folder where all ranks share it.
        epoch: the only one to look at; None: all that the files speak of.
        damage: what is known to be damaged beside.

    Raises:
        NotFoundError: the files say nothing; or nothing of that epoch.
    """
    files = list(order_files(folders))
    if not files:
        raise NotFoundError("the ledger has no file that can be read")
    header = files[0].header
    same, disagreements = _same_order(files, header)
    stretches = split_into_stretches(same)
    known = sorted(set(_epochs_of(stretches)))
    if not known:
        raise NotFoundError("the ledger says nothing: no rank has handed over a batch")
    epochs = range(known[0], known[-1] + 1)
    if epoch is not None and epoch not in epochs:
        raise NotFoundError(f"the ledger says nothing of epoch {epoch}; it knows epochs {known[0]} to {known[-1]}")
    history = _History(stretches, header.num_samples)
    audits = [history.audit(each) for each in (epochs if epoch is None else [epoch])]
    return Audit(
        header,
        len(files),
        [stretch.world_size for stretch in stretches],
        audits,
        [*disagreements, *dict.fromkeys(chain.from_iterable(each.disagreements for each in audits))],
        [*damage, *chain.from_iterable(file.damage for file in files)],
        [str(file.path) for file in files if file.torn],
    )


def _same_order(files: Sequence[LedgerFile], header: Header) -> tuple[Iterator[LedgerFile], list[str]]:
    """Return the files of the header's order, and what is to be said of the others."""
    wanted = (header.order, header.num_samples)
    others = [file.header for file in files if (file.header.order, file.header.num_samples) != wanted]
    said = dict.fromkeys(
        f"rank {each.data_rank} read {each.source}, {each.num_samples} samples, with {each.order}; the first file is "
        f"of {header.source}, {header.num_samples} samples, with {header.order}"
        for each in others
    )
    same = (file for file in files if (file.header.order, file.header.num_samples) == wanted)
    return same, list(said)


def _disagreements(stretch: Attempt) -> Iterator[str]:
    """Yield what the ranks of a stretch do not agree on."""
    for name in ("batch_size", "tail"):
        ranks = defaultdict(list)
        for rank, file in sorted(stretch.files.items()):
            ranks[getattr(file.header, name)].append(rank)
        if len(ranks) > 1:
            said = "; ".join(f"{value} on ranks {_ranks_text(which)}" for value, which in ranks.items())
            yield f"from {_place_text(stretch.begin)} on ranks differ in {name}: {said}"
    most = max(stretch.num_files.values())
    fewer = defaultdict(list)
    for rank, num_files in sorted(stretch.num_files.items()):
        if num_files < most:
            fewer[num_files].append(rank)
    for num_files, which in sorted(fewer.items()):
        yield (
            f"from {_place_text(stretch.begin)} on rank {_ranks_text(which)} left {num_files} "
            f"{'file' if num_files == 1 else 'files'} where others left {most}: its last may be of an attempt that "
            "was given up"
        )


def _epochs_of(stretches: Iterable[Attempt]) -> Iterator[int]:
    for stretch in stretches:
        yield stretch.begin[0]
        yield from (record.epoch for file in stretch.files.values() for record in file.records)


class _History:
    """The records of a history, by epoch.

    Args:
        stretches: the history.
        num_samples: of an epoch.
    """

    def __init__(self, stretches: Sequence[Attempt], num_samples: int) -> None:
        self._stretches = stretches
        self._num_samples = num_samples
        self._records: dict[int, list[tuple[Attempt, int, LedgerRecord]]] = defaultdict(list)
        self._copies: dict[int, int] = defaultdict(int)
        for stretch in stretches:
            for rank, file in stretch.files.items():
                for record in file.records:
                    self._records[record.epoch].append((stretch, rank, record))
            for record in (record for file in stretch.copies for record in file.records):
                if record.kind is RecordKind.SERVED:
                    self._copies[record.epoch] += record.count
        self._stands = max(self._ends(), default=(0, 0))

    def audit(self, epoch: int) -> EpochAudit:
        """Return what became of an epoch's samples."""
        counted: dict[RecordKind, list[StridedRange]] = {kind: [] for kind in RecordKind}
        windows: dict[tuple[int, int], list[StridedRange]] = defaultdict(list)
        given = 0
        for stretch, rank, record in self._records[epoch]:
            comb = stretch.counted(record, self._num_samples)
            counted[record.kind].append(comb)
            if record.kind is RecordKind.SERVED:
                given += record.count
                windows[id(stretch), rank].append(solid(comb.start, comb.stop))
        is_finished = self._stands >= (epoch, self._num_samples)
        reached = self._num_samples if is_finished else self._reached(epoch, windows)
        dropped = _union(counted[RecordKind.DROPPED], self._num_samples)
        found = cover([*counted[RecordKind.SERVED], *dropped], 0, reached)
        num_dropped, num_masked = (
            sum(comb.clip(0, reached).size for comb in combs) for combs in (dropped, counted[RecordKind.MASKED])
        )
        whole = reached - found.never.count - found.repeated.count
        return EpochAudit(
            epoch,
            self._num_samples,
            reached,
            is_finished,
            served=max(0, whole - num_dropped - num_masked),
            masked=num_masked,
            dropped=num_dropped,
            padded=sum(comb.size for comb in counted[RecordKind.PADDED]),
            never=found.never,
            repeated=found.repeated,
            again=given - sum(comb.size for comb in counted[RecordKind.SERVED]),
            copies=self._copies[epoch],
            reasons=list(self._reasons(epoch, reached, windows)) if found.never.count or found.repeated.count else [],
            disagreements=list(self._disagreements(epoch)),
        )

    def _disagreements(self, epoch: int) -> Iterator[str]:
        """Yield what the ranks do not agree on in the stretches that count for an epoch."""
        for stretch in self._stretches:
            start, stop = stretch.range_in(epoch, self._num_samples)
            if start < stop:
                yield from _disagreements(stretch)

    def _ends(self) -> Iterator[Place]:
        """Yield how far each record that counts brought its rank; the farthest is where the run stands."""
        for stretch in self._stretches:
            if stretch.begin < stretch.limit:
                yield stretch.begin
        for epoch, records in self._records.items():
            for stretch, _, record in records:
                comb = stretch.counted(record, self._num_samples)
                if comb.start < comb.stop and record.kind in {RecordKind.SERVED, RecordKind.DROPPED}:
                    yield epoch, comb.stop

    def _reached(self, epoch: int, windows: dict[tuple[int, int], list[StridedRange]]) -> int:
        """Return the position of an unfinished epoch that all ranks, but those that left nothing, have passed."""
        last = self._stretches[-1]
        ends = [
            max(
                (window.stop for window in windows[id(last), rank]),
                default=last.range_in(epoch, self._num_samples)[0],
            )
            for rank in last.files
        ]
        return min(ends, default=0)

    def _reasons(self, epoch: int, reached: int, windows: dict[tuple[int, int], list[StridedRange]]) -> Iterator[str]:
        """Yield, stretch by stretch, which ranks did not go all the way that the others went."""
        for stretch in self._stretches:
            start, stop = stretch.range_in(epoch, self._num_samples)
            ends = [window.stop for rank in stretch.files for window in windows[id(stretch), rank]]
            stop = min(stop, reached, max(ends, default=start))
            if start >= stop:
                continue
            whose = f"in the stretch of {stretch.world_size} ranks from {_place_text(stretch.begin)} on"
            if stretch.missing_ranks:
                yield f"{whose} rank {_ranks_text(stretch.missing_ranks)} left no file"
            for rank, file in sorted(stretch.files.items()):
                went = cover(windows[id(stretch), rank], start, stop)
                for gap in went.never.combs[:1]:
                    yield f"{whose} rank {rank} skipped positions {gap.start} to {gap.stop - 1}: {file.path.name}"
                for twice in went.repeated.combs[:1]:
                    yield f"{whose} rank {rank} came twice to {twice.start} to {twice.stop - 1}: {file.path.name}"


def _union(combs: Sequence[StridedRange], num_samples: int) -> list[StridedRange]:
    """Return the positions that solid combs hold, each once: every rank says what is dropped."""
    gaps = cover(combs, 0, num_samples).never.combs
    edges = [0, *chain.from_iterable((gap.start, gap.stop) for gap in gaps), num_samples]
    spans = zip(edges[::2], edges[1::2], strict=True)
    return [solid(start, stop) for start, stop in spans if start < stop]


def _place_text(place: Place) -> str:
    return f"epoch {place[0]}, position {place[1]},"


def _ranks_text(ranks: Sequence[int]) -> str:
    said = ", ".join(map(str, ranks[:_NAMED_RANKS]))
    return said if len(ranks) <= _NAMED_RANKS else f"{said} and {len(ranks) - _NAMED_RANKS} more"
