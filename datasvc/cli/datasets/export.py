"""`datasvc export`: write a data-set version in another format."""

from __future__ import annotations

import os
from typing import Annotated, Literal

import typer

from datasvc.cli.terminal.output import (
    JsonOption,
    RefArgument,
    RepoOption,
    SplitOption,
    print_json,
    print_line,
    resumable,
)
from datasvc.printable import count_text
from datasvc.progress import byte_progress
from datasvc.sizes import format_size

# These are the keys of `datasvc.shards.export.FORMATS`, repeated because its import is too slow for `--help`.
DatasetFormat = Literal["webdataset", "parquet", "mds", "lmdb", "folder", "tfrecord"]


def export(
    ref: RefArgument,
    destination: Annotated[str, typer.Argument(metavar="DEST", help="New or empty folder, local or any fsspec URL.")],
    repo: RepoOption,
    export_format: Annotated[DatasetFormat, typer.Option("--format", help="Format to write.")],
    split: SplitOption = None,
    workers: Annotated[int, typer.Option(min=1, help="Writer processes; default: one per CPU, at most 8.")] = min(
        8, os.cpu_count() or 1
    ),
    as_json: JsonOption = False,
) -> None:
    """Export a data-set version in a format that other tools read; deleted samples are not written.

    Example: datasvc export pets@3 ./pets-wds --format webdataset --repo ./repo

    DEST is complete when it contains datasvc-export.json. After an interruption, the same command continues.
    """
    from datasvc.repository import Repository
    from datasvc.shards import open_dataset
    from datasvc.shards.export import export as run_export

    repository = Repository.open(repo)
    dataset = open_dataset(repository, ref)
    with resumable(), byte_progress(f"exporting {dataset.resolved}") as progress:
        result = run_export(
            repository,
            str(dataset.resolved),
            destination,
            export_format,
            split=split,
            workers=workers,
            progress=progress,
        )
    splits = {
        name: {"samples": written.num_samples, "files": written.num_files, "bytes": written.size_bytes}
        for name, written in result.splits.items()
    }
    if as_json:
        print_json(
            {
                "version": str(result.version),
                "format": result.format,
                "destination": result.destination,
                "splits": splits,
            }
        )
        return
    counts = ", ".join(f"{facts['samples']} {name}" for name, facts in splits.items())
    num_files, size_bytes = (sum(facts[key] for facts in splits.values()) for key in ("files", "bytes"))
    print_line(
        f"exported {result.version} as {result.format} to {result.destination}: {counts} samples, "
        f"{count_text(num_files, 'file')}, {format_size(size_bytes)}"
    )
