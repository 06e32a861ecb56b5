"""`datasvc models push | pull`: copy model versions from one repository to another."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import typer

from datasvc.cli.datasets.transfer import (
    CreateOption,
    DryRunOption,
    FromOption,
    NameOption,
    ParentsOption,
    RefsArgument,
    TagsOption,
    ToOption,
    open_target,
    transfer_and_print,
)
from datasvc.cli.models.arguments import TrustedOption
from datasvc.cli.terminal.output import JsonOption, RepoOption

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
    to: ToOption,
    repo: RepoOption,
    name: NameOption = None,
    with_parents: ParentsOption = False,
    with_data: DataOption = False,
    rename_data: RenameDataOption = None,
    trusted: TrustedOption = None,
    with_tags: TagsOption = False,
    create: CreateOption = False,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Copy model versions to another repository; only objects that are missing there are sent.

    Example: datasvc models push gpt@prod --to s3://bucket/repo --repo ./repo

    After an interruption, the same command continues. A version that is pushed again creates no second version.
    """
    from datasvc.models.tensors.name_filter import parse_name_map
    from datasvc.models.transfer import transfer
    from datasvc.repository import Repository

    source, target = Repository.open(repo), open_target(to, create=create, dry_run=dry_run)
    transfer_and_print(
        "pushing",
        refs,
        partial(
            transfer,
            source,
            target,
            refs,
            name=name,
            with_parents=with_parents,
            with_data=with_data,
            data_names=parse_name_map(rename_data or ()),
            trusted_keys=trusted or None,
            with_tags=with_tags,
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
    with_data: DataOption = False,
    rename_data: RenameDataOption = None,
    trusted: TrustedOption = None,
    with_tags: TagsOption = False,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Copy model versions from another repository; only objects that are missing here are fetched.

    Example: datasvc models pull gpt@prod --from s3://bucket/repo --repo ./repo
    """
    from datasvc.models.tensors.name_filter import parse_name_map
    from datasvc.models.transfer import transfer
    from datasvc.repository import Repository

    source, target = Repository.open(origin), Repository.open(repo)
    transfer_and_print(
        "pulling",
        refs,
        partial(
            transfer,
            source,
            target,
            refs,
            name=name,
            with_parents=with_parents,
            with_data=with_data,
            data_names=parse_name_map(rename_data or ()),
            trusted_keys=trusted or None,
            with_tags=with_tags,
        ),
        dry_run=dry_run,
        as_json=as_json,
    )
