"""`datasvc models push | pull`: copy model versions from one repository to another."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from datasvc.cli.models.arguments import TrustedOption
from datasvc.cli.terminal.output import JsonOption, RepoOption, print_json, print_line, print_table
from datasvc.printable import count_text
from datasvc.progress import byte_progress

if TYPE_CHECKING:
    from datasvc.repository import Repository

RefsArgument = Annotated[
    list[str], typer.Argument(metavar="REF...", help="NAME, NAME@VERSION or NAME@TAG; one or more.")
]
NameOption = Annotated[
    str | None, typer.Option("--name", help="Name of the model in the target repository; default: the same name.")
]
ParentsOption = Annotated[bool, typer.Option("--with-parents", help="Also copy all ancestors of the versions.")]
DataOption = Annotated[bool, typer.Option("--with-data", help="Also copy the data-set versions that were consumed.")]

RenameDataOption = Annotated[
    list[str] | None,
    typer.Option(
        "--rename-data",
        metavar="OLD=NEW",
        help="New name of a data set, if the target repository has another data set of the same name. May be given "
        "several times.",
    ),
]


def push(
    refs: RefsArgument,
    to: Annotated[str, typer.Option("--to", metavar="URL", help="Target repository: a folder or any fsspec URL.")],
    repo: RepoOption,
    name: NameOption = None,
    with_parents: ParentsOption = False,
    with_data: DataOption = False,
    rename_data: RenameDataOption = None,
    trusted: TrustedOption = None,
    create: Annotated[
        bool, typer.Option("--create", help="Create the target repository if it does not exist.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Copy model versions to another repository; only objects that are missing there are sent.

    Example: datasvc models push gpt@prod --to s3://bucket/repo --repo ./repo

    After an interruption, the same command continues. A version that is pushed again creates no second version.
    """
    from datasvc.repository import Repository

    target = Repository.create(to) if create else Repository.open(to)
    source = Repository.open(repo)
    _transfer("pushing", source, target, refs, name, with_parents, with_data, rename_data, trusted, as_json)


def pull(
    refs: RefsArgument,
    origin: Annotated[str, typer.Option("--from", metavar="URL", help="Source repository.")],
    repo: RepoOption,
    name: NameOption = None,
    with_parents: ParentsOption = False,
    with_data: DataOption = False,
    rename_data: RenameDataOption = None,
    trusted: TrustedOption = None,
    as_json: JsonOption = False,
) -> None:
    """Copy model versions from another repository; only objects that are missing here are fetched.

    Example: datasvc models pull gpt@prod --from s3://bucket/repo --repo ./repo
    """
    from datasvc.repository import Repository

    source, target = Repository.open(origin), Repository.open(repo)
    _transfer("pulling", source, target, refs, name, with_parents, with_data, rename_data, trusted, as_json)


def _transfer(
    title: str,
    source: Repository,
    target: Repository,
    refs: list[str],
    name: str | None,
    with_parents: bool,
    with_data: bool,
    rename_data: list[str] | None,
    trusted: list[Path] | None,
    as_json: bool,
) -> None:
    from datasvc.models.tensors.name_filter import parse_name_map
    from datasvc.models.transfer import transfer
    from datasvc.sizes import format_size

    with byte_progress(f"{title} {', '.join(refs)}") as progress:
        result = transfer(
            source,
            target,
            refs,
            name=name,
            with_parents=with_parents,
            with_data=with_data,
            data_names=parse_name_map(rename_data or ()),
            trusted_keys=trusted or None,
            progress=progress,
        )
    if as_json:
        versions = [
            {"source": str(copy.source), "target": str(copy.target), "kind": copy.source.kind, "new": copy.is_new}
            for copy in result.versions
        ]
        print_json({"versions": versions, "objects": result.num_objects, "bytes": result.bytes})
        return
    rows = [(copy.source, copy.target, "new" if copy.is_new else "existed") for copy in result.versions]
    print_table(("source", "target", ""), rows)
    print_line(f"copied {count_text(result.num_objects, 'object')}, {format_size(result.bytes)}")
