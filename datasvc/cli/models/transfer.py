"""`datasvc models push | pull`: model versions from one repository to another."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from datasvc.cli.models.arguments import TrustedOption
from datasvc.cli.terminal.output import JsonOption, RepoOption, print_json, print_table
from datasvc.progress import byte_progress

if TYPE_CHECKING:
    from datasvc.repository import Repository

RefsArgument = Annotated[list[str], typer.Argument(metavar="REF...", help="NAME, NAME@VERSION or NAME@TAG; several.")]
NameOption = Annotated[str | None, typer.Option("--name", help="What the model is called there; default as here.")]
ParentsOption = Annotated[bool, typer.Option("--with-parents", help="All versions, too, that they were made from.")]
DataOption = Annotated[bool, typer.Option("--with-data", help="The data-set versions, too, that they consumed.")]

RenameDataOption = Annotated[
    list[str] | None,
    typer.Option(
        "--rename-data",
        metavar="OLD=NEW",
        help="What a data set is called there, where that has another one of its name. May be given several times.",
    ),
]


def push(
    refs: RefsArgument,
    to: Annotated[str, typer.Option("--to", metavar="URL", help="Another repository: a folder or any fsspec URL.")],
    repo: RepoOption,
    name: NameOption = None,
    with_parents: ParentsOption = False,
    with_data: DataOption = False,
    rename_data: RenameDataOption = None,
    trusted: TrustedOption = None,
    create: Annotated[bool, typer.Option("--create", help="Make the other repository where there is none.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Let another repository have model versions too; only what is missing there moves.

    Example: datasvc models push gpt@prod --to s3://bucket/repo --repo ./repo

    Interrupted, the same command goes on. A version is one version there however often it is pushed.
    """
    from datasvc.repository import Repository

    target = Repository.create(to) if create else Repository.open(to)
    _transfer(
        Repository.open(repo),
        target,
        refs,
        name,
        "pushing",
        parents=with_parents,
        data=with_data,
        rename_data=rename_data,
        trusted=trusted,
        as_json=as_json,
    )


def pull(
    refs: RefsArgument,
    origin: Annotated[str, typer.Option("--from", metavar="URL", help="The repository that has them.")],
    repo: RepoOption,
    name: NameOption = None,
    with_parents: ParentsOption = False,
    with_data: DataOption = False,
    rename_data: RenameDataOption = None,
    trusted: TrustedOption = None,
    as_json: JsonOption = False,
) -> None:
    """Get model versions from another repository; only what is missing here moves.

    Example: datasvc models pull gpt@prod --from s3://bucket/repo --repo ./repo
    """
    from datasvc.repository import Repository

    source, target = Repository.open(origin), Repository.open(repo)
    _transfer(
        source,
        target,
        refs,
        name,
        "pulling",
        parents=with_parents,
        data=with_data,
        rename_data=rename_data,
        trusted=trusted,
        as_json=as_json,
    )


def _transfer(
    source: Repository,
    target: Repository,
    refs: list[str],
    name: str | None,
    doing: str,
    *,
    parents: bool,
    data: bool,
    rename_data: list[str] | None,
    trusted: list[Path] | None,
    as_json: bool,
) -> None:
    from datasvc.models.tensors.name_filter import parse_name_map
    from datasvc.models.transfer import transfer
    from datasvc.sizes import format_size

    with byte_progress(f"{doing} {', '.join(refs)}") as (set_total, advance):
        done = transfer(
            source,
            target,
            refs,
            name=name,
            with_parents=parents,
            with_data=data,
            data_names=parse_name_map(rename_data or ()),
            trusted_keys=trusted or None,
            begin=set_total,
            report=advance,
        )
    if as_json:
        versions = [
            {"source": str(each.source), "target": str(each.target), "kind": each.source.kind, "new": each.is_new}
            for each in done.versions
        ]
        print_json({"versions": versions, "objects": done.num_objects, "bytes": done.bytes})
        return
    rows = [(each.source, each.target, "new" if each.is_new else "was there") for each in done.versions]
    print_table(("here" if doing == "pushing" else "there", "there" if doing == "pushing" else "here", ""), rows)
    typer.echo(f"moved {done.num_objects} objects, {format_size(done.bytes)}")
