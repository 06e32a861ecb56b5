"""Exports data-set versions to other formats, for `datasvc export`.

Each split is divided into units, usually one for each shard. One worker writes the files of a unit. After all units,
the format writes the files that describe the whole split. The files depend only on the version and the format, not on
the number of workers or on interruptions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from datasvc.errors import ConfigError
from datasvc.progress import NO_PROGRESS, Progress
from datasvc.repository import Repository, Resolved
from datasvc.shards.export.destination import Destination
from datasvc.shards.export.export_format import ExportFormat, WrittenFiles
from datasvc.shards.export.formats import choose_format
from datasvc.shards.export.records import ExportRecords, open_records
from datasvc.shards.export.samples import ExportUnit
from datasvc.shards.export.workers import write_in_processes
from datasvc.shards.versions.dataset import DatasetVersion, Split, choose_split, open_dataset


@dataclass(frozen=True)
class ExportReport:
    """The result of an export.

    Attributes:
        version: version that was exported.
        format: name of the format.
        destination: URL of the destination, without credentials.
        splits: numbers of samples, files and bytes by split.
    """

    version: Resolved
    format: str
    destination: str
    splits: Mapping[str, WrittenFiles]


def export(
    repository: Repository,
    ref: str,
    destination: str,
    format: str,  # noqa: A002 - the usual name, as in `--format`
    *,
    split: str | None = None,
    workers: int = 1,
    progress: Progress = NO_PROGRESS,
) -> ExportReport:
    """Write a data-set version as files of another format, without its deleted samples.

    The destination is complete when it contains `datasvc-export.json`. After an interruption, the same call continues
    with the shards that are not yet written.

    Args:
        repository: repository of the version.
        ref: NAME, NAME@VERSION or NAME@TAG.
        destination: a new or empty local folder or fsspec URL.
        format: one of `FORMATS`.
        split: the only split to export; None: all.
        workers: number of processes that write; 1: only the calling process.
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
    dataset = open_dataset(repository, ref)
    splits = choose_split(dataset, split)
    target = Destination(destination)
    if export_format.is_local_only and not target.is_local:
        raise ConfigError(
            f"{format} is written to local folders only; {target.location} is not one: export into a local folder, "
            "and upload it afterwards"
        )
    # All splits are checked before the first file is written.
    for chosen in splits:
        export_format.check(chosen)
    # The digests of the tables identify the samples, so a continued export writes the same ones.
    tables = {chosen.name: chosen.digest for chosen in splits}
    plan = {"version": str(dataset.resolved), "format": format, "tables": tables}
    with open_records(target, plan) as records:
        # A summary means that an earlier run was interrupted before it removed its records: only this is left to do.
        if records.summary is not None:
            records.tidy()
            return _repeat_report(dataset, records.summary, target)
        units = [unit for chosen in splits for unit in plan_units(chosen, export_format)]
        progress.begin(sum(unit.stored_bytes for unit in units))
        _write_units(units, export_format, target, records, workers, progress)
        written = {chosen.name: _join(chosen, units, export_format, target, records) for chosen in splits}
        # Commit point: the summary is written after all files.
        records.finish({"splits": {chosen.name: _describe(chosen, written[chosen.name]) for chosen in splits}})
    return ExportReport(dataset.resolved, format, target.location, written)


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
    }


def _repeat_report(dataset: DatasetVersion, summary: Mapping[str, Any], destination: Destination) -> ExportReport:
    """Return the report of an export that an earlier run finished, from its summary."""
    splits = {
        name: WrittenFiles(totals["samples"], totals["files"], totals["bytes"])
        for name, totals in summary["splits"].items()
    }
    return ExportReport(dataset.resolved, summary["format"], destination.location, splits)
