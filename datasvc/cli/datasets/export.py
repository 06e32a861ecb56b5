"""`datasvc export`: a data-set version in another format."""

from __future__ import annotations

import os
from enum import StrEnum
from typing import Annotated

import typer

from datasvc.cli.terminal.output import JsonOption, RepoOption, print_json
from datasvc.progress import byte_progress


class DatasetFormat(StrEnum):
    """What an export is written as."""

    webdataset = "webdataset"
    parquet = "parquet"
    mds = "mds"
    lmdb = "lmdb"
    folder = "folder"
    tfrecord = "tfrecord"


def export(
    ref: Annotated[str, typer.Argument(metavar="REF", help="NAME, NAME@VERSION or NAME@TAG.")],
    destination: Annotated[
        str, typer.Argument(metavar="DEST", help="A new or empty folder, local or any fsspec URL.")
    ],
    repo: RepoOption,
    export_format: Annotated[DatasetFormat, typer.Option("--format", help="What to write.")],
    split: Annotated[str | None, typer.Option(help="Only this split; default: all.")] = None,
    workers: Annotated[int, typer.Option(min=1, help="Processes that write; default: one per CPU, at most 8.")] = min(
        8, os.cpu_count() or 1
    ),
    as_json: JsonOption = False,
) -> None:
    """Export a data-set version as files that other tools read; deleted samples are left out.

    Example: datasvc export pets@3 ./pets-wds --format webdataset --repo ./repo

    DEST is complete once it holds datasvc-export.json. Interrupted, the same command goes on where it stopped.
    """
    from datasvc.repository import Repository
    from datasvc.shards import open_dataset
    from datasvc.shards.export import export as run_export
    from datasvc.shards.versions.dataset import choose_split
    from datasvc.sizes import format_size

    repository = Repository.open(repo)
    dataset = open_dataset(repository, ref)
    with byte_progress(f"exporting {dataset.resolved}") as (set_total, advance):
        set_total(sum(each.table.size_bytes for each in choose_split(dataset, split)))
        done = run_export(
            repository,
            str(dataset.resolved),
            destination,
            export_format.value,
            split=split,
            workers=workers,
            report=advance,
        )
    splits = {
        name: {"samples": each.num_samples, "files": each.num_files, "bytes": each.size_bytes}
        for name, each in done.splits.items()
    }
    if as_json:
        print_json(
            {"version": str(done.version), "format": done.format, "destination": done.destination, "splits": splits}
        )
        return
    counts = ", ".join(f"{each['samples']} {name}" for name, each in splits.items())
    files, size_bytes = (sum(each[what] for each in splits.values()) for what in ("files", "bytes"))
    typer.echo(
        f"exported {done.version} as {done.format} to {done.destination}: {counts} samples, {files} files, "
        f"{format_size(size_bytes)}"
    )
