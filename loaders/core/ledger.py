"""Writer of the ledger: a record of the samples that a rank handed over, one file per start or restart of the loader.

A new file begins with the first batch after the loader's creation or after `load_state_dict`; its header has the
cursor (epoch, position) at which it begins. Invariant: a batch is in the file before the loader's cursor moves past
it. So the ledger has every sample that a state counts as served, even if the process is killed.

Usually the positions that a rank serves form one range with a constant stride. So writing a batch is one `pwrite` of
64 bytes, which extends the range in the last record. `datasvc.ledger.file` defines the format;
`datasvc.ledger.history` merges the files of ranks and restarts.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from datasvc.errors import ConfigError, CorruptDataError, UnavailableError
from datasvc.ledger.broken_rounds import PickedStep, RestOfRound
from datasvc.ledger.file import (
    RECORD_BYTES,
    Header,
    LedgerRecord,
    RecordKind,
    create_ledger_file,
    list_files,
    read_header,
)
from datasvc.ledger.strided_range import StridedRange, contiguous, describe_positions, split_runs
from datasvc.loaders.core.batches import SampleBatch
from datasvc.loaders.core.leased_rounds import LeasedStep
from datasvc.loaders.core.mixture import Mixture, splits_of
from datasvc.loaders.core.split_reader import Cursor
from datasvc.loaders.core.state import save_state
from datasvc.loaders.ranks.data_ranks import DataRanks
from datasvc.mix_schedule import stem_of
from datasvc.order import OrderConfig, Tail
from datasvc.shards import Split


@dataclass(frozen=True)
class _FileEnd:
    """End of a ledger file, where the next batch is written.

    Attributes:
        num_records: number of records in the file.
        growing: last record of served samples, which the next batch may extend; None if there is none.
        growing_index: index of this record in the file; -1 if there is none.
    """

    num_records: int = 0
    growing: LedgerRecord | None = None
    growing_index: int = -1


class Ledger:
    """Writes one rank's part of a ledger.

    Args:
        folder: folder of the ledger, created at the first write. All ranks and restarts of a job use the same.
        order: the loader's state without epoch and position. It identifies the data and the access order, and must
            equal the order in the files of the folder.
        source: name of the data, such as "digits@1/train".
        num_samples: samples of an epoch.
        ranks: data rank of this process, and the number of ranks.
        batch_size: samples of this rank per step.
        tail: treatment of the last samples of an epoch.

    Raises:
        ConfigError: the folder is the ledger of other data or of another order.
        UnavailableError: the folder cannot be read.
    """

    def __init__(
        self,
        folder: Path | str,
        *,
        order: Mapping[str, Any],
        source: str,
        num_samples: int,
        ranks: DataRanks,
        batch_size: int,
        tail: Tail,
    ) -> None:
        self.folder = Path(folder)
        self._header_fields: dict[str, Any] = {
            # Convert to JSON and back: `_check_folder` compares the order with one that was read from JSON.
            "order": json.loads(json.dumps(order)),
            "source": source,
            "num_samples": num_samples,
            "batch_size": batch_size,
            "tail": tail,
        }
        self._ranks = ranks
        self._begin_cursor = (0, 0)  # epoch and position
        self._path: Path | None = None
        self._file: int | None = None
        self._close_file: Callable[[], object]  # set with `_file`
        self._header_bytes = 0
        self._end = _FileEnd()
        # Step and first position of the last batch, and the end of the file before it.
        self._before_last: tuple[tuple[Cursor, list[int]], _FileEnd] | None = None
        self._check_folder()

    def prepare(self) -> None:
        """Create the file for the next batches, if it is not there. Raises the errors of `write`."""
        self._open()

    def begin(self, epoch: int, position: int) -> None:
        """Begin a new file for the batches from this cursor on."""
        self.close()
        self._begin_cursor, self._path = (epoch, position), None
        self._end, self._before_last = _FileEnd(), None

    def write(self, batch: SampleBatch, bad: Collection[int] = ()) -> None:
        """Record a batch. Call this before the loader's cursor moves past the batch. A repeated call changes nothing.

        Args:
            batch: the batch to hand over.
            bad: indices, in the batch, of samples that did not decode and are masked.

        Raises:
            UnavailableError: the file cannot be written; the message has the reason.
        """
        step = batch.step
        # Two parts of a step, which one rank may serve (`PartReader`), differ in their positions.
        identity = (batch.before, batch.positions[:1].tolist())
        if self._before_last is not None and self._before_last[0] == identity:
            # The batch is recorded already, but an interrupt came before the cursor moved. Write its records again,
            # in the same place.
            self._end = self._before_last[1]
        else:
            self._before_last = (identity, self._end)
        self._open()
        is_full = bool(batch.mask.all())
        is_served = batch.mask if batch.masked is None else batch.mask | batch.masked
        if bad or not is_full:
            # Write the records of padding and bad samples before those of served ones. If the process is killed in
            # between, the audit ignores them, because the served samples of their batch are missing.
            self._append(_masked_records(batch, bad))
        if isinstance(step, LeasedStep):
            ranges = [step.strided]
        elif isinstance(step, PickedStep):
            # At the end of the rest a rank has passed the whole round.
            passed = [StridedRange(step.before, step.after, 1, 0, 0)] if step.after > step.before else []
            ranges = [*split_runs(batch.positions), *passed]
        else:
            samples = batch.positions if is_full else batch.positions[is_served]
            ranges = describe_positions(step.start, step.next_position, samples)
        for strided in ranges:
            self._grow(LedgerRecord(RecordKind.SERVED, batch.epoch, strided, strided.size))

    def write_returned(self, batch: SampleBatch, lost_rank: int) -> None:
        """Record that a rank was lost before its update with this batch was applied. Call this before `write`.

        Raises the errors of `write`.
        """
        self._open()
        self._append(
            [
                LedgerRecord(RecordKind.RETURNED, batch.epoch, strided, strided.size, lost_rank)
                for strided in split_runs(batch.positions[batch.mask])
            ]
        )

    def write_carried(self, epoch: int, rest: RestOfRound) -> None:
        """Record what was applied of a broken round before, and the round itself. Raises the errors of `write`."""
        self._open()
        ranges = [StridedRange(rest.start, rest.stop, 1, 0, 0)]  # also a rank without samples leaves a file
        if len(rest.carried):
            ranges += describe_positions(rest.start, int(rest.carried[-1]) + 1, rest.carried)
        self._append([LedgerRecord(RecordKind.CARRIED, epoch, strided, strided.size) for strided in ranges])

    def end_epoch(self, epoch: int, position: int) -> None:
        """Record that an epoch ends at `position` and drops its remaining samples. Raises the errors of `write`."""
        num_dropped = self._header_fields["num_samples"] - position
        if num_dropped:
            self._open()
            strided = contiguous(position, position + num_dropped)
            self._append([LedgerRecord(RecordKind.DROPPED, epoch, strided, num_dropped)])

    def close(self) -> None:
        """Sync the file to disk and close it. A later batch opens the same file again."""
        if self._file is not None:
            with suppress(OSError):  # all records are written; without the sync only a power cut can lose them
                os.fsync(self._file)
            self._file = None
            self._close_file()

    def _grow(self, record: LedgerRecord) -> None:
        """Extend the last record of served samples if `record` continues its range; otherwise append `record`."""
        growing = self._end.growing
        if growing is None or growing.epoch != record.epoch or not record.strided.continues(growing.strided):
            index = self._end.num_records
            self._put(index, record.encode())
            self._end = _FileEnd(index + 1, record, index)
            return
        strided = dataclasses.replace(growing.strided, stop=record.strided.stop)
        extended = LedgerRecord(record.kind, record.epoch, strided, growing.count + record.count)
        self._put(self._end.growing_index, extended.encode())
        self._end = _FileEnd(self._end.num_records, extended, self._end.growing_index)

    def _append(self, records: Sequence[LedgerRecord]) -> None:
        """Write records after the last one. Later batches do not extend them."""
        if records:
            num_records = self._end.num_records
            self._put(num_records, b"".join(record.encode() for record in records))
            self._end = dataclasses.replace(self._end, num_records=num_records + len(records))

    def _put(self, index: int, content: bytes) -> None:
        """Write encoded records to the file, from record number `index` on."""
        assert self._file is not None
        try:
            written = os.pwrite(self._file, content, self._header_bytes + index * RECORD_BYTES)
            if written != len(content):
                raise OSError(f"{written} of {len(content)} bytes written")  # noqa: TRY301
        except OSError as error:
            raise self._write_error(error) from error

    def _open(self) -> None:
        try:
            # Create the file at the first batch: a loader that hands over no batch must leave no file.
            if self._path is None:
                self._path, self._header_bytes = create_ledger_file(self.folder, self._header())
            if self._file is None:
                self._file = os.open(self._path, os.O_WRONLY | os.O_CLOEXEC)
                # A job that drops many loaders without `close` would else run out of descriptors.
                self._close_file = weakref.finalize(self, os.close, self._file)
        except OSError as error:
            raise self._write_error(error) from error

    def _header(self) -> Header:
        epoch, position = self._begin_cursor
        return Header(
            **self._header_fields,
            data_rank=self._ranks.rank,
            data_world_size=self._ranks.world_size,
            epoch=epoch,
            position=position,
            started=time.time(),
        )

    def _check_folder(self) -> None:
        """Raise ConfigError if the last file of the ledger is of other data or another order.

        Ranks that start together do not see each other's files yet; `datasvc audit` compares these files later.
        """
        if self.folder.exists() and not self.folder.is_dir():
            raise ConfigError(f"ledger is {self.folder}, which is a file; expected a folder, existing or new")
        files = list_files(self.folder) if self.folder.exists() else []
        if not files:
            return
        try:
            header = read_header(files[-1][1])
        except CorruptDataError:
            return  # not an error of this run: `datasvc audit` reports damaged files
        # The order includes the version of the data. The stages of a mixture may have changed at a resume.
        if stem_of(header.order) != stem_of(self._header_fields["order"]):
            expected = self._header_fields
            raise ConfigError(
                f"{self.folder} is the ledger of {header.source} with {header.order}; this loader reads "
                f"{expected['source']} with {expected['order']}: give each its own folder"
            )

    def _write_error(self, error: OSError) -> UnavailableError:
        return UnavailableError(
            f"cannot write the ledger {self.folder}: {error}; free disk space or grant access, then continue from "
            "the last state"
        )


def open_ledger(
    folder: Path | str, samples: Split | Mixture, order: OrderConfig, cursor: Cursor, **options: Any
) -> Ledger:
    """Return the ledger of a loader that reads `samples` in `order` and is at `cursor`; see `Ledger`."""
    state = save_state(samples, order, cursor)
    ledger = Ledger(
        folder,
        order={name: value for name, value in state.items() if name not in {"epoch", "position"}},
        # Without what a view selects: the audit reads the version by this name, and the view by its digest.
        source=" + ".join(f"{split.dataset}/{split.name}" for split in splits_of(samples)),
        num_samples=samples.num_positions,
        **options,
    )
    ledger.begin(*cursor)
    return ledger


def _masked_records(batch: SampleBatch, bad: Collection[int]) -> list[LedgerRecord]:
    """Return the records of padding samples, of samples that did not decode, and of those that the run masks."""
    is_bad, is_left_out = (np.zeros(len(batch.positions), np.bool_) for _ in range(2))
    is_bad[list(bad)] = True
    if batch.masked is not None:
        is_left_out = batch.masked
    kinds = (
        (RecordKind.PADDED, ~batch.mask & ~is_left_out),
        (RecordKind.MASKED, is_bad & batch.mask),
        (RecordKind.LEFT_OUT, is_left_out),
    )
    return [
        LedgerRecord(kind, batch.epoch, strided, strided.size)
        for kind, is_chosen in kinds
        for strided in split_runs(batch.positions[is_chosen])
    ]
