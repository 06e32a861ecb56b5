"""`datasvc push | pull | export | copies`: copy data sets to another repository or format, and list these copies."""

from __future__ import annotations

import os
import secrets
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol

import typer

from datasvc.cli.terminal.completion import reference
from datasvc.cli.terminal.derived_options import options_from
from datasvc.cli.terminal.output import (
    JsonOption,
    RepoOption,
    SamplesArgument,
    SplitOption,
    print_json,
    print_line,
    print_result,
    print_table,
    resumable,
)
from datasvc.errors import NotFoundError
from datasvc.printable import count_text
from datasvc.progress import NO_PROGRESS, Progress, byte_progress
from datasvc.sizes import format_size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from datasvc.models.transfer import TransferReport
    from datasvc.repository import Repository


RefsArgument = Annotated[
    list[str], reference("NAME, NAME@VERSION or NAME@TAG, of a data set NAME@BRANCH; one or more.", "REF...")
]
ToOption = Annotated[str, typer.Option("--to", metavar="URL", help="Target repository: a folder or any fsspec URL.")]
FromOption = Annotated[str, typer.Option("--from", metavar="URL", help="Source repository.")]
CreateOption = Annotated[bool, typer.Option("--create", help="Create the target repository if it does not exist.")]
DryRunOption = Annotated[
    bool, typer.Option("--dry-run", help="Write nothing; print which versions and how many bytes would be copied.")
]


# These are the keys of `datasvc.shards.export.FORMATS`, repeated because its import is too slow for `--help`.
DatasetFormat = Literal["webdataset", "parquet", "mds", "lmdb", "folder", "coco", "tfrecord", "mxnet"]


@options_from("models.transfer.copy_datasets.transfer_datasets")
def push(
    refs: RefsArgument,
    to: ToOption,
    repo: RepoOption,
    *,
    create: CreateOption = False,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
    **options: Any,
) -> None:
    """Copy versions of data sets to another repository; only objects that are missing there are sent.

    Example: datasvc push pets@stable --to s3://bucket/repo --with-tags --repo ./repo

    After an interruption, the same command continues. A version that is pushed again creates no second version.
    """
    from datasvc.models.transfer import transfer_datasets
    from datasvc.repository import Repository

    source, target = Repository.open(repo), open_target(to, create=create, dry_run=dry_run)
    transfer = partial(transfer_datasets, source, target, refs, **options)
    transfer_and_print("pushing", refs, transfer, dry_run=dry_run, as_json=as_json)


@options_from("models.transfer.copy_datasets.transfer_datasets")
def pull(
    refs: RefsArgument,
    origin: FromOption,
    repo: RepoOption,
    *,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
    **options: Any,
) -> None:
    """Copy versions of data sets from another repository; only objects that are missing here are fetched.

    Example: datasvc pull pets@stable --from s3://bucket/repo --repo ./repo
    """
    from datasvc.models.transfer import transfer_datasets
    from datasvc.repository import Repository

    transfer = partial(transfer_datasets, Repository.open(origin), Repository.open(repo), refs, **options)
    transfer_and_print("pulling", refs, transfer, dry_run=dry_run, as_json=as_json)


def open_target(url: str, *, create: bool, dry_run: bool) -> Repository:
    """Return the target repository; in a dry run, an empty one in memory stands for one that is to be created."""
    from datasvc.repository import Repository

    if create and not dry_run:
        return Repository.create(url)
    try:
        return Repository.open(url)
    except NotFoundError:
        if not create:
            raise
        return Repository.create(f"memory://datasvc-dry-run-{secrets.token_hex(8)}")


class PreparedTransfer(Protocol):
    """A transfer that has all arguments but these two, such as a `functools.partial`."""

    def __call__(self, *, dry_run: bool, progress: Progress) -> TransferReport:
        """Copy, or only count what would be copied."""
        ...


def transfer_and_print(
    title: str,
    refs: Sequence[str],
    transfer: PreparedTransfer,
    *,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Run a transfer with a progress bar, and print its report."""
    from datasvc.sizes import format_size

    if dry_run:
        result = transfer(dry_run=True, progress=NO_PROGRESS)
    else:
        with byte_progress(f"{title} {', '.join(refs)}") as progress:
            result = transfer(dry_run=False, progress=progress)
    if as_json:
        versions = [
            {"source": str(copy.source), "target": str(copy.target), "kind": copy.source.kind, "new": copy.is_new}
            for copy in result.versions
        ]
        totals = {"objects": result.num_objects, "bytes": result.bytes, "tags": list(result.tags), "dry_run": dry_run}
        if result.branches:
            totals["branches"] = list(result.branches)
        if result.views:
            totals["views"] = list(result.views)
        print_json({"versions": versions, **totals})
        return
    rows = [(copy.source, copy.target, "new" if copy.is_new else "existed") for copy in result.versions]
    print_table(("source", "target", ""), rows)
    if result.tags:
        print_line(f"{'would tag' if dry_run else 'tagged'} {', '.join(result.tags)}")
    if result.branches:
        print_line(f"{'would carry' if dry_run else 'carried'} the branch {', '.join(result.branches)}")
    verb = "would copy" if dry_run else "copied"
    if result.views:
        print_line(f"{verb} the view {', '.join(result.views)}")
    print_line(f"{verb} {count_text(result.num_objects, 'object')}, {format_size(result.bytes)}")


def export(
    ref: SamplesArgument,
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
    from datasvc.shards.export import export as run_export

    repository = Repository.open(repo)
    with resumable(), byte_progress(f"exporting {ref}") as progress:
        result = run_export(
            repository, ref, destination, export_format, split=split, workers=workers, progress=progress
        )
    splits = {
        name: {"samples": written.num_samples, "files": written.num_files, "bytes": written.size_bytes}
        for name, written in result.splits.items()
    }
    facts = {"version": str(result.version), "format": result.format, "destination": result.destination}
    counts = ", ".join(f"{facts['samples']} {name}" for name, facts in splits.items())
    num_files, size_bytes = (sum(facts[key] for facts in splits.values()) for key in ("files", "bytes"))
    line = (
        f"exported {result.title} as {result.format} to {result.destination}: {counts} samples, "
        f"{count_text(num_files, 'file')}, {format_size(size_bytes)}"
    )
    print_result(facts | {"splits": splits}, line, as_json=as_json)


def copies(
    repo: RepoOption,
    name: Annotated[str | None, reference("Data set; default: all.", "NAME")] = None,
    as_json: JsonOption = False,
) -> None:
    """List the recorded copies of a data set: exports, and transfers by push and pull, oldest first.

    Example: datasvc copies pets --repo ./repo

    `datasvc purge` lists those that have a purged sample.
    """
    from datasvc.api.recorded_copies import read_copies
    from datasvc.repository import Repository

    found = read_copies(Repository.open(repo), name)
    if as_json:
        print_json([each.to_json() for each in found])
    else:
        rows = [(each.created, each.kind, each.version, each.samples, each.destination, each.by) for each in found]
        print_table(("created", "kind", "version", "samples", "destination", "by"), rows)
