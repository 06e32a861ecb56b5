"""Exports data-set versions to other formats, for `datasvc export`.

Each split is divided into units, usually one for each shard. One worker writes the files of a unit. After all units,
the format writes the files that describe the whole split. The files depend only on the version and the format, not on
the number of workers or on interruptions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import lru_cache
from multiprocessing import get_context
from typing import Any, Final

import numpy as np

from datasvc.child_process import end_with_parent
from datasvc.errors import ConfigError, UnavailableError
from datasvc.progress import NO_PROGRESS, Progress
from datasvc.repository import Repository, Resolved
from datasvc.repository.logs.copies import EXPORT, RecordedCopy, record_copies
from datasvc.repository.logs.redactions import redaction_log
from datasvc.shards.export.coco import CocoExport
from datasvc.shards.export.destination import Destination
from datasvc.shards.export.export_format import ExportFormat, ExportUnit, WrittenFiles
from datasvc.shards.export.folder import FolderExport
from datasvc.shards.export.lmdb_database import LmdbExport
from datasvc.shards.export.mds import MdsExport
from datasvc.shards.export.mxnet import MxnetExport
from datasvc.shards.export.parquet import ParquetExport
from datasvc.shards.export.records import ExportRecords, open_records
from datasvc.shards.export.tfrecord import TfRecordExport
from datasvc.shards.export.webdataset import WebDatasetExport
from datasvc.shards.versions.dataset import Split, choose_split, open_dataset

FORMATS: Final[Mapping[str, ExportFormat]] = {
    export_format.name: export_format
    for export_format in (
        WebDatasetExport(),
        ParquetExport(),
        MdsExport(),
        LmdbExport(),
        FolderExport(),
        CocoExport(),
        TfRecordExport(),
        MxnetExport(),
    )
}


@dataclass(frozen=True)
class ExportReport:
    """The result of an export.

    Attributes:
        version: version that was exported.
        title: the version for messages, with the selection if only views of its splits were exported.
        format: name of the format.
        destination: URL of the destination, without credentials.
        splits: numbers of samples, files and bytes by split.
        copy: what the log of copies has of it.
    """

    version: Resolved
    title: str
    format: str
    destination: str
    splits: Mapping[str, WrittenFiles]
    copy: RecordedCopy


def export(
    repository: Repository,
    ref: str,
    destination: str,
    format: str,  # noqa: A002 - the usual name, as in `--format`
    *,
    split: str | None = None,
    workers: int = 1,
    record: bool = True,
    progress: Progress = NO_PROGRESS,
) -> ExportReport:
    """Write a data-set version as files of another format, without its deleted samples.

    Of a view, each sample is written once, whatever its weight.

    The destination is complete when it contains `datasvc-export.json`. After an interruption, the same call continues
    with the shards that are not yet written.

    Args:
        repository: repository of the version.
        ref: NAME, NAME@VERSION or NAME@TAG; REF[SELECTION] for a part of the samples, see `open_dataset`.
        destination: a new or empty local folder or fsspec URL.
        format: one of `FORMATS`.
        split: the only split to export; None: all.
        workers: number of processes that write; 1: only the calling process.
        record: whether the log of copies gets an entry, so that a purge lists the export. If it cannot be written,
            there is a warning.
        progress: counts the stored bytes of each shard that was written.

    Raises:
        ConfigError: the format cannot hold a column or a sample, or the destination is not empty.
        NotFoundError: the version, the split or a shard does not exist.
        CorruptDataError: a shard is damaged; the destination stays incomplete.
        ConflictError: another process exports into the destination.
        UnavailableError: a store failed, the disk is full, or a worker was killed; repeat the call to continue.
    """
    export_format = choose_format(format)
    if workers < 1:
        raise ConfigError(f"an export needs at least 1 worker; got {workers}")
    # Read before a table: what was purged until now is not written.
    redactions = redaction_log(repository.objects).read().head
    dataset = open_dataset(repository, ref)
    splits = choose_split(dataset, split)
    _check(export_format, format, target := Destination(destination), splits)
    # The digests of the tables identify the samples, so a continued export writes the same ones.
    tables = {chosen.name: chosen.digest for chosen in splits}
    plan = {"version": str(dataset.resolved), "format": format, "tables": tables}
    with open_records(target, plan, redactions) as records:
        # A summary means that an earlier run was interrupted before it removed its records: only this is left to do.
        if records.summary is not None:
            written = _written(records.summary)
        else:
            units = [unit for chosen in splits for unit in plan_units(chosen, export_format)]
            progress.begin(sum(unit.stored_bytes for unit in units))
            _write_units(units, export_format, target, records, workers, progress)
            written = {chosen.name: _join(chosen, units, export_format, target, records) for chosen in splits}
            # Commit point: the summary is written after all files.
            records.finish({"splits": {chosen.name: _describe(chosen, written[chosen.name]) for chosen in splits}})
        num_samples = sum(files.num_samples for files in written.values())
        copy = RecordedCopy(dataset.title, EXPORT, target.location, num_samples, tables, records.redactions)
        if record:
            record_copies(repository.storage, [copy])
        # Last: an export that is killed before this is recorded when it is repeated.
        records.tidy()
    return ExportReport(dataset.resolved, dataset.title, format, target.location, written, copy)


def _check(export_format: ExportFormat, name: str, target: Destination, splits: Sequence[Split]) -> None:
    """Check the place and all splits, before the first file is written. Raises ConfigError."""
    if export_format.is_local_only and not target.is_local:
        raise ConfigError(
            f"{name} is written to local folders only; {target.location} is not one: export into a local folder, "
            "and upload it afterwards"
        )
    for split in splits:
        export_format.check(split)


def plan_units(split: Split, export_format: ExportFormat) -> list[ExportUnit]:
    """Return one unit for each shard with live samples, in table order; a single unit if the format requires it."""
    shards = np.flatnonzero(split.table.samples_per_shard).tolist()
    groups = [tuple(shards)] if export_format.is_one_per_split else [(shard,) for shard in shards]
    return [ExportUnit(split, group, number, len(groups)) for number, group in enumerate(groups)]


def _write_units(
    units: Sequence[ExportUnit],
    export_format: ExportFormat,
    destination: Destination,
    records: ExportRecords,
    workers: int,
    progress: Progress,
) -> None:
    """Write the units that are not yet written, and record each of them."""
    missing = []
    for unit in units:
        if records.written(unit.split.name, unit.number) is None:
            missing.append(unit)
        else:
            progress.advance(unit.stored_bytes)
    # A `memory:` destination exists only in this process, so worker processes cannot write to it.
    is_in_memory = destination.storage.url.startswith("memory:")
    done: Iterable[tuple[ExportUnit, WrittenFiles]]
    if workers > 1 and len(missing) > 1 and not is_in_memory:
        done = write_in_processes(missing, export_format, destination, min(workers, len(missing)))
    else:
        # A generator: each unit must be recorded before the next one is written.
        done = ((unit, export_format.write(unit, destination)) for unit in missing)
    for unit, written in done:
        records.record(unit.split.name, unit.number, written)
        progress.advance(unit.stored_bytes)


def _join(
    split: Split,
    units: Sequence[ExportUnit],
    export_format: ExportFormat,
    destination: Destination,
    records: ExportRecords,
) -> WrittenFiles:
    """Write the files that describe a whole split; return the totals of the split."""
    # The results come from the records, because an earlier run may have written some units.
    parts = []
    for unit in units:
        if unit.split is split:
            written = records.written(split.name, unit.number)
            assert written is not None  # `_write_units` has recorded every unit
            parts.append(written)
    all_files = [*parts, export_format.join(split, parts, destination)]
    return WrittenFiles(
        sum(files.num_samples for files in all_files),
        sum(files.num_files for files in all_files),
        sum(files.size_bytes for files in all_files),
    )


def _describe(split: Split, written: WrittenFiles) -> dict[str, Any]:
    """Return the entry of a split in the summary file."""
    return {
        "samples": written.num_samples,
        "files": written.num_files,
        "bytes": written.size_bytes,
        "columns": {field.name: str(field.type) for field in split.table.sample_schema},
        "classes": list(split.classes),
        **({"view": split.view} if split.view else {}),
    }


def _written(summary: Mapping[str, Any]) -> dict[str, WrittenFiles]:
    """Return what an earlier run has written of each split, from its summary."""
    return {
        name: WrittenFiles(totals["samples"], totals["files"], totals["bytes"])
        for name, totals in summary["splits"].items()
    }


def write_in_processes(
    units: Sequence[ExportUnit], export_format: ExportFormat, destination: Destination, workers: int
) -> Iterator[tuple[ExportUnit, WrittenFiles]]:
    """Write units in worker processes; yield each written unit with its result, in any order.

    Raises:
        UnavailableError: a worker was killed.
        DatasvcError: the first error of a unit; units that have not started are cancelled.
    """
    # Spawned, not forked: clients of object stores do not work after a fork.
    pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=end_with_parent)
    try:
        futures = {
            pool.submit(
                _write_unit,
                # Only names and numbers are sent: a worker opens the repository, the table and the destination.
                (unit.split.repository.url, unit.split.dataset, unit.split.name, unit.split.digest),
                (unit.shards, unit.number, unit.num_units),
                export_format.name,
                destination.storage.url,
            ): unit
            for unit in units
        }
        for future in as_completed(futures):
            yield futures[future], future.result()
    except BrokenProcessPool as error:
        raise UnavailableError(
            "a worker process was killed, perhaps for lack of memory; repeat the export with fewer workers: "
            "it continues with the shards that are not yet written"
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _write_unit(
    split: tuple[str, str, str, str], unit: tuple[tuple[int, ...], int, int], export_format: str, destination: str
) -> WrittenFiles:
    """Write a unit. `split` has the arguments of `_open_split`, and `unit` those of `ExportUnit` after the split."""
    return FORMATS[export_format].write(ExportUnit(_open_split(*split), *unit), Destination(destination))


@lru_cache(maxsize=1)
def _open_split(repository: str, version: str, split: str, digest: str) -> Split:
    """Return a split. It is cached, so that a worker reads its table once, and not for each unit."""
    # One split is enough, because the units of a split follow each other.
    return Split(split, version, Repository.open(repository), digest)


def choose_format(name: str) -> ExportFormat:
    """Return the format called `name`. Raise ConfigError if there is none."""
    if name not in FORMATS:
        raise ConfigError(f"cannot export as {name!r}; expected one of {', '.join(FORMATS)}")
    return FORMATS[name]
