"""What a rank handed over, written down batch by batch: one file below a folder for every place it began from.

A file is begun with the first batch after a loader was made or `load_state_dict` was called, and its header says
from where. Each batch is in the file before the loader's position moves past it, so whatever a state calls served is
in the ledger, though the process is killed or only one rank saves the state. Nothing is buffered, and nothing is
added to the loader's state.

A batch is one `pwrite` of 64 bytes over the last: what a rank serves in steady state is one comb of positions, whose
window grows. `datasvc.ledger.file` has the format, and `datasvc.ledger.history` how files of many ranks and restarts
become one history.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from datasvc.errors import ConfigError, CorruptDataError, UnavailableError
from datasvc.ledger.file import (
    RECORD_BYTES,
    Header,
    LedgerRecord,
    RecordKind,
    create_ledger_file,
    list_files,
    read_header,
)
from datasvc.ledger.strided_range import describe_positions, solid, split_runs
from datasvc.loaders.core.batches import SampleBatch
from datasvc.loaders.core.data_ranks import DataRanks
from datasvc.loaders.core.split_reader import Cursor
from datasvc.order import Tail


@dataclass(frozen=True)
class _WritePosition:
    """How far a file is written.

    Attributes:
        num_records: in it.
        slot: of the record that may still grow; -1 for none.
        growing: that record.
    """

    num_records: int = 0
    slot: int = -1
    growing: LedgerRecord | None = None


class Ledger:
    """One rank's part of a ledger.

    Args:
        folder: of the ledger; made when something is written. All ranks of a job and all its restarts share it.
        order: what the loader's state says beside epoch and position.
        source: what is read, "digits@1/train".
        num_samples: of an epoch.
        ranks: which part of each global batch is this process's.
        batch_size: samples of this rank per step.
        tail: what becomes of the samples that fill no global batch.

    Raises:
        ConfigError: the folder is the ledger of other data, or of another order.
        UnavailableError: it cannot be read.
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
        self._about: dict[str, Any] = {
            "order": json.loads(json.dumps(order)),  # as it will be read back
            "source": source,
            "num_samples": num_samples,
            "batch_size": batch_size,
            "tail": tail,
        }
        self._ranks = ranks
        self._begin = (0, 0)
        self._path: Path | None = None
        self._file: int | None = None
        self._header_bytes = 0
        self._place = _WritePosition()
        self._last: tuple[Cursor, _WritePosition] | None = None
        self._check_folder()

    def begin(self, epoch: int, position: int) -> None:
        """Say from where the next batches come: they go into a new file."""
        self.close()
        self._begin, self._path = (epoch, position), None
        self._place, self._last = _WritePosition(), None

    def write(self, batch: SampleBatch, bad: Collection[int] = ()) -> None:
        """Write down a batch, before the loader's position moves past it; the same batch again changes nothing.

        Args:
            batch: that is handed over.
            bad: which of its samples did not decode and are masked, as indices in it.

        Raises:
            UnavailableError: the file cannot be written; says why.
        """
        step = batch.step
        if self._last is not None and self._last[0] == batch.before:
            self._place = self._last[1]  # an interrupt fell between the ledger and the cursor: the same batch again
        else:
            self._last = (batch.before, self._place)
        self._open()
        is_full = bool(batch.mask.all())
        if bad or not is_full:
            # What is said of a batch beside comes first: it counts only together with its batch.
            self._append(_beside(batch, bad))
        samples = batch.positions if is_full else batch.positions[batch.mask]
        for comb in describe_positions(step.start, step.next_position, samples):
            self._grow(LedgerRecord(RecordKind.SERVED, batch.epoch, comb, comb.size))

    def end_epoch(self, epoch: int, position: int) -> None:
        """Write down that an epoch ends at a position; what is left of it fills no batch. Raises as `write`."""
        num_left = self._about["num_samples"] - position
        if num_left:
            self._open()
            comb = solid(position, position + num_left)
            self._append([LedgerRecord(RecordKind.DROPPED, epoch, comb, num_left)])

    def close(self) -> None:
        """Let go of the file, and let it survive a power cut. A later batch goes on with the same file."""
        if self._file is not None:
            file, self._file = self._file, None
            try:
                with suppress(OSError):  # all is written; what cannot be synced is as safe as before
                    os.fsync(file)
            finally:
                os.close(file)

    def _grow(self, record: LedgerRecord) -> None:
        growing = self._place.growing
        if growing is None or growing.epoch != record.epoch or not record.comb.continues(growing.comb):
            slot = self._place.num_records
            self._put(slot, record.encode())
            self._place = _WritePosition(slot + 1, slot, record)
            return
        comb = dataclasses.replace(growing.comb, stop=record.comb.stop)
        longer = LedgerRecord(record.kind, record.epoch, comb, growing.count + record.count)
        self._put(self._place.slot, longer.encode())
        self._place = _WritePosition(self._place.num_records, self._place.slot, longer)

    def _append(self, records: Sequence[LedgerRecord]) -> None:
        if records:
            self._put(self._place.num_records, b"".join(record.encode() for record in records))
            place = self._place
            self._place = _WritePosition(place.num_records + len(records), place.slot, place.growing)

    def _put(self, slot: int, content: bytes) -> None:
        assert self._file is not None
        try:
            written = os.pwrite(self._file, content, self._header_bytes + slot * RECORD_BYTES)
            if written != len(content):
                raise OSError(f"{written} of {len(content)} bytes written")  # noqa: TRY301
        except OSError as error:
            raise self._failed(error) from error

    def _open(self) -> None:
        try:
            if self._path is None:
                self._path, self._header_bytes = create_ledger_file(self.folder, self._header())
            if self._file is None:
                self._file = os.open(self._path, os.O_WRONLY | os.O_CLOEXEC)
        except OSError as error:
            raise self._failed(error) from error

    def _header(self) -> Header:
        epoch, position = self._begin
        return Header(
            **self._about,
            data_rank=self._ranks.rank,
            data_world_size=self._ranks.world_size,
            epoch=epoch,
            position=position,
            started=time.time(),
        )

    def _check_folder(self) -> None:
        """Refuse a ledger of something else at once; ranks that differ and begin together are found by the audit."""
        if self.folder.exists() and not self.folder.is_dir():
            raise ConfigError(f"ledger is {self.folder}, which is a file; give a folder, which may be missing")
        files = list_files(self.folder) if self.folder.exists() else []
        if not files:
            return
        try:
            found = read_header(files[-1][1])
        except CorruptDataError:
            return  # the audit names it
        if found.order != self._about["order"]:
            raise ConfigError(
                f"{self.folder} is the ledger of {found.source} with {found.order}; this loader reads "
                f"{self._about['source']} with {self._about['order']}: give each its own folder"
            )

    def _failed(self, error: OSError) -> UnavailableError:
        return UnavailableError(
            f"cannot write the ledger {self.folder}: {error}; make room or access, and go on from the last state"
        )


def _beside(batch: SampleBatch, bad: Collection[int]) -> list[LedgerRecord]:
    """Return the records of what only pads, and of samples that did not decode."""
    chosen = np.zeros(len(batch.positions), np.bool_)
    chosen[list(bad)] = True
    kinds = ((RecordKind.PADDED, ~batch.mask), (RecordKind.MASKED, chosen & batch.mask))
    return [
        LedgerRecord(kind, batch.epoch, comb, comb.size)
        for kind, which in kinds
        for comb in split_runs(batch.positions[which])
    ]
