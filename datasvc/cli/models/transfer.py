"""`datasvc models push | pull`: copy model versions from one repository to another."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from datasvc.cli.datasets.transfer import (
    CreateOption,
    DryRunOption,
    FromOption,
    PreparedTransfer,
    RefsArgument,
    ToOption,
    open_target,
    transfer_and_print,
)
from datasvc.cli.models.arguments import TrustedOption
from datasvc.cli.terminal.derived_options import options_from
from datasvc.cli.terminal.output import JsonOption, RepoOption

if TYPE_CHECKING:
    from datasvc.repository import Repository

RenameDataOption = Annotated[
    list[str] | None,
    typer.Option(
        "--rename-data",
        metavar="OLD=NEW",
        help="New name of a data set, if the target repository has another data set of the same name. May be given "
        "several times.",
    ),
]


_ORDER: Final = "repo name with_parents with_data rename_data trusted with_tags"


@options_from("models.transfer.copy_versions.transfer", in_order=f"refs to {_ORDER} create dry_run as_json")
def push(
    refs: RefsArgument,
    to: ToOption,
    repo: RepoOption,
    rename_data: RenameDataOption = None,
    trusted: TrustedOption = None,
    create: CreateOption = False,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
    **options: Any,
) -> None:
    """Copy model versions to another repository; only objects that are missing there are sent.

    Example: datasvc models push gpt@prod --to s3://bucket/repo --repo ./repo

    After an interruption, the same command continues. A version that is pushed again creates no second version.
    """
    from datasvc.repository import Repository

    # In this order: without a source, no target is created.
    source, target = Repository.open(repo), open_target(to, create=create, dry_run=dry_run)
    transfer = _prepare(source, target, refs, rename_data, trusted, options)
    transfer_and_print("pushing", refs, transfer, dry_run=dry_run, as_json=as_json)


@options_from("models.transfer.copy_versions.transfer", in_order=f"refs origin {_ORDER} dry_run as_json")
def pull(
    refs: RefsArgument,
    origin: FromOption,
    repo: RepoOption,
    rename_data: RenameDataOption = None,
    trusted: TrustedOption = None,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
    **options: Any,
) -> None:
    """Copy model versions from another repository; only objects that are missing here are fetched.

    Example: datasvc models pull gpt@prod --from s3://bucket/repo --repo ./repo
    """
    from datasvc.repository import Repository

    transfer = _prepare(Repository.open(origin), Repository.open(repo), refs, rename_data, trusted, options)
    transfer_and_print("pulling", refs, transfer, dry_run=dry_run, as_json=as_json)


def _prepare(
    source: Repository,
    target: Repository,
    refs: list[str],
    rename_data: list[str] | None,
    trusted: list[Path] | None,
    options: dict[str, Any],
) -> PreparedTransfer:
    from datasvc.models.tensors.name_filter import parse_name_map
    from datasvc.models.transfer import transfer

    data_names = parse_name_map(rename_data or ())
    return partial(transfer, source, target, refs, data_names=data_names, trusted_keys=trusted or None, **options)
