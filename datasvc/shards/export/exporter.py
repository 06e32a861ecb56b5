"""Data-set versions out again, in the formats that others read: planned here, written by one worker per shard.

Files depend on the version and the format alone, whatever the number of workers and however often it was interrupted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from datasvc.errors import ConfigError
from datasvc.repository import Repository, Resolved
from datasvc.shards.export.destination import Destination
from datasvc.shards.export.export_format import ExportFormat, WrittenFiles
from datasvc.shards.export.formats import choose_format
from datasvc.shards.export.progress import ExportRecords, open_progress
from datasvc.shards.export.samples import ExportUnit
from datasvc.shards.export.workers import write_in_processes
from datasvc.shards.versions.dataset import DatasetVersion, Split, choose_split, open_dataset


@dataclass(frozen=True)
class ExportReport:
    """What an export wrote.

    Attributes:
        version: that was exported.
        format: as which.
        destination: where to, without credentials.
        splits: samples, files and bytes of each split.
    """

    version: Resolved
    format: str
    destination: str
    splits: Mapping[str, WrittenFiles]


def export(
    repository: Repository,
    ref: str,
    destination: str,
    format: str,  # noqa: A002 - what everybody calls it
    *,
    split: str | None = None,
    workers: int = 1,
    report: Callable[[int], None] | None = None,
) -> ExportReport:
    """Write a data-set version, deleted samples left out, as files of another format.

    The destination is complete once it has `datasvc-export.json`. After a kill the same call goes on with the shards
    that are not yet written.

    Args:
        repository: where the version is.
        ref: NAME, NAME@VERSION or NAME@TAG.
        destination: a new or empty local folder or fsspec URL.
        format: one of `FORMATS`.
        split: only this one.
        workers: processes that write; 1: this one.
        report: called with the stored bytes of each shard as it is done.

    Raises:
        ConfigError: the format cannot hold a column or a sample, or the destination is not empty.
        NotFoundError: no such version, split or shard.
        CorruptDataError: a shard was changed; nothing that looks complete is left.
        ConflictError: another process is exporting into the destination.
        UnavailableError: a store failed, the disk is full, or a worker was killed: the same call goes on.
    """
    chosen = choose_format(format)
    if workers < 1:
        raise ConfigError(f"an export needs at least 1 worker; got {workers}")
    dataset = open_dataset(repository, ref)
    splits = choose_split(dataset, split)
    target = Destination(destination)
    if chosen.is_local_only and not target.is_local:
        raise ConfigError(
            f"{format} is written to local folders only; {target.location} is none: upload it afterwards"
        )
    for each in splits:
        chosen.check(each)
    plan = {"version": str(dataset.resolved), "format": format, "tables": {each.name: each.digest for each in splits}}
    with open_progress(target, plan) as progress:
        if progress.summary is not None:
            progress.tidy()
            return _report_again(dataset, progress.summary, target)
        units = [unit for each in splits for unit in plan_units(each, chosen)]
        _write_units(units, chosen, target, progress, workers, report or (lambda _bytes: None))
        written = {each.name: _join(each, units, chosen, target, progress) for each in splits}
        progress.finish({"splits": {each.name: _describe(each, written[each.name]) for each in splits}})
    return ExportReport(dataset.resolved, format, target.location, written)


def plan_units(split: Split, export_format: ExportFormat) -> list[ExportUnit]:
    """Return the units of a split: those shards that have samples, in table order."""
    shards = np.flatnonzero(split.table.samples_per_shard).tolist()
    groups = [tuple(shards)] if export_format.is_one_per_split else [(shard,) for shard in shards]
    return [ExportUnit(split, group, number, len(groups)) for number, group in enumerate(groups)]


def _write_units(
    units: Sequence[ExportUnit],
    export_format: ExportFormat,
    destination: Destination,
    progress: ExportRecords,
    workers: int,
    report: Callable[[int], None],
) -> None:
    """Write the units that are not yet written, and record each."""
    missing = []
    for unit in units:
        if progress.written(unit.split.name, unit.number) is None:
            missing.append(unit)
        else:
            report(unit.stored_bytes)
    in_processes = workers > 1 and len(missing) > 1 and not destination.is_in_memory
    done = (
        write_in_processes(missing, export_format, destination, min(workers, len(missing)))
        if in_processes
        else ((unit, export_format.write(unit, destination)) for unit in missing)
    )
    for unit, written in done:
        progress.record(unit.split.name, unit.number, written)
        report(unit.stored_bytes)


def _join(
    split: Split,
    units: Sequence[ExportUnit],
    export_format: ExportFormat,
    destination: Destination,
    progress: ExportRecords,
) -> WrittenFiles:
    """Join the units of a split; returns what it takes all in all."""
    records = [progress.written(split.name, unit.number) for unit in units if unit.split is split]
    parts = [record for record in records if record is not None]
    assert len(parts) == len(records)
    every = [*parts, export_format.join(split, parts, destination)]
    return WrittenFiles(
        sum(each.num_samples for each in every),
        sum(each.num_files for each in every),
        sum(each.size_bytes for each in every),
    )


def _describe(split: Split, written: WrittenFiles) -> dict[str, Any]:
    return {
        "samples": written.num_samples,
        "files": written.num_files,
        "bytes": written.size_bytes,
        "columns": {field.name: str(field.type) for field in split.table.sample_schema},
        "classes": list(split.classes),
    }


def _report_again(dataset: DatasetVersion, summary: Mapping[str, Any], destination: Destination) -> ExportReport:
    splits = {
        name: WrittenFiles(each["samples"], each["files"], each["bytes"]) for name, each in summary["splits"].items()
    }
    return ExportReport(dataset.resolved, summary["format"], destination.location, splits)
