"""`datasvc push | pull`: copy versions of data sets from one repository to another."""

from __future__ import annotations

import secrets
from functools import partial
from typing import TYPE_CHECKING, Annotated, Protocol

import typer

from datasvc.cli.terminal.completion import complete_reference
from datasvc.cli.terminal.output import JsonOption, RepoOption, print_json, print_line, print_table
from datasvc.errors import NotFoundError
from datasvc.printable import count_text
from datasvc.progress import NO_PROGRESS, Progress, byte_progress

if TYPE_CHECKING:
    from collections.abc import Sequence

    from datasvc.models.transfer import TransferReport
    from datasvc.repository import Repository

RefsArgument = Annotated[
    list[str],
    typer.Argument(
        metavar="REF...",
        help="NAME, NAME@VERSION or NAME@TAG, of a data set NAME@BRANCH; one or more.",
        autocompletion=complete_reference,
    ),
]
ToOption = Annotated[str, typer.Option("--to", metavar="URL", help="Target repository: a folder or any fsspec URL.")]
FromOption = Annotated[str, typer.Option("--from", metavar="URL", help="Source repository.")]
NameOption = Annotated[
    str | None, typer.Option("--name", help="Name in the target repository; default: the same name.")
]
ParentsOption = Annotated[bool, typer.Option("--with-parents", help="Also copy all ancestors of the versions.")]
TagsOption = Annotated[
    bool, typer.Option("--with-tags", help="Also copy the tags of the versions; a tag of the target is not moved.")
]
BranchesOption = Annotated[
    bool, typer.Option("--with-branches", help="Also carry all branches of the data sets; NAME@BRANCH carries one.")
]
CreateOption = Annotated[bool, typer.Option("--create", help="Create the target repository if it does not exist.")]
DryRunOption = Annotated[
    bool, typer.Option("--dry-run", help="Write nothing; print which versions and how many bytes would be copied.")
]


def push(
    refs: RefsArgument,
    to: ToOption,
    repo: RepoOption,
    name: NameOption = None,
    with_parents: ParentsOption = False,
    with_tags: TagsOption = False,
    with_branches: BranchesOption = False,
    create: CreateOption = False,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Copy versions of data sets to another repository; only objects that are missing there are sent.

    Example: datasvc push pets@stable --to s3://bucket/repo --with-tags --repo ./repo

    After an interruption, the same command continues. A version that is pushed again creates no second version.
    """
    from datasvc.models.transfer import transfer_datasets
    from datasvc.repository import Repository

    source, target = Repository.open(repo), open_target(to, create=create, dry_run=dry_run)
    transfer_and_print(
        "pushing",
        refs,
        partial(
            transfer_datasets,
            source,
            target,
            refs,
            name=name,
            with_parents=with_parents,
            with_tags=with_tags,
            with_branches=with_branches,
        ),
        dry_run=dry_run,
        as_json=as_json,
    )


def pull(
    refs: RefsArgument,
    origin: FromOption,
    repo: RepoOption,
    name: NameOption = None,
    with_parents: ParentsOption = False,
    with_tags: TagsOption = False,
    with_branches: BranchesOption = False,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Copy versions of data sets from another repository; only objects that are missing here are fetched.

    Example: datasvc pull pets@stable --from s3://bucket/repo --repo ./repo
    """
    from datasvc.models.transfer import transfer_datasets
    from datasvc.repository import Repository

    source, target = Repository.open(origin), Repository.open(repo)
    transfer_and_print(
        "pulling",
        refs,
        partial(
            transfer_datasets,
            source,
            target,
            refs,
            name=name,
            with_parents=with_parents,
            with_tags=with_tags,
            with_branches=with_branches,
        ),
        dry_run=dry_run,
        as_json=as_json,
    )


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
        print_json({"versions": versions, **totals})
        return
    rows = [(copy.source, copy.target, "new" if copy.is_new else "existed") for copy in result.versions]
    print_table(("source", "target", ""), rows)
    if result.tags:
        print_line(f"{'would tag' if dry_run else 'tagged'} {', '.join(result.tags)}")
    if result.branches:
        print_line(f"{'would carry' if dry_run else 'carried'} the branch {', '.join(result.branches)}")
    verb = "would copy" if dry_run else "copied"
    print_line(f"{verb} {count_text(result.num_objects, 'object')}, {format_size(result.bytes)}")
