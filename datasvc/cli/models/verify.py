"""`datasvc models verify`: is everything that model versions name there, and as it was written."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from datasvc.cli.models.arguments import TrustedOption
from datasvc.cli.terminal.output import JsonOption, RepoOption, print_json
from datasvc.cli.terminal.values import text_value
from datasvc.errors import ConfigError, CorruptDataError
from datasvc.progress import byte_progress

if TYPE_CHECKING:
    from datasvc.models.registry.repair import Repair
    from datasvc.repository import Repository, Resolved


def verify(
    repo: RepoOption,
    refs: Annotated[
        list[str] | None, typer.Argument(metavar="[REF]...", help="Versions; with --all names of models.")
    ] = None,
    every: Annotated[
        bool, typer.Option("--all", help="Every version of the models that are named, or of all.")
    ] = False,
    deep: Annotated[bool, typer.Option("--deep", help="Decode every tensor as well.")] = False,
    repair_from: Annotated[
        list[str] | None,
        typer.Option(
            "--repair-from",
            metavar="URL",
            help="Another repository to copy good objects from; may be given several times. Bad ones are moved to "
            "quarantine/ in the repository.",
        ),
    ] = None,
    trusted: TrustedOption = None,
    as_json: JsonOption = False,
) -> None:
    """Read every byte of model versions, each object once; names the tensors that are hit.

    Example: datasvc models verify digits-cnn@3 --repo s3://bucket/repo

    Example: datasvc models verify --all --repair-from s3://backup/repo --repo s3://bucket/repo

    Ends with status 3 when a problem is left.
    """
    from datasvc.models.registry.repair import verify_and_repair
    from datasvc.models.versions.signing_keys import trusted_keys
    from datasvc.repository import Repository
    from datasvc.sizes import format_size

    repository = Repository.open(repo)
    versions = _choose(repository, refs or [], every=every)
    copies = [Repository.open(url) for url in repair_from or []]
    with byte_progress(f"verifying {len(versions)} versions") as (set_total, advance):
        keys = trusted_keys(trusted or None)
        all_done = verify_and_repair(
            repository, versions, copies, deep=deep, trusted=keys, begin=set_total, report=advance
        )
    done, left = all_done.found, all_done.left
    if as_json:
        print_json({**asdict(done), "repairs": [asdict(each) for each in all_done.repairs], "num_left": len(left)})
    else:
        typer.echo(f"{len(done.versions)} versions: {done.num_objects} objects, {format_size(done.size_bytes)}, read")
        for problem in done.problems:
            typer.echo(text_value(str(problem)))
        for each in all_done.repairs:
            typer.echo(text_value(_describe(each)))
        typer.echo(f"{len(left)} problems" if left else "all is well")
    if left:
        raise typer.Exit(CorruptDataError.exit_code)


def _choose(repository: Repository, refs: list[str], *, every: bool) -> list[Resolved]:
    from datasvc.models.registry.verify import every_version

    if every:
        return every_version(repository, refs)
    if not refs:
        raise ConfigError("say which versions to verify, or --all")
    return list(dict.fromkeys(repository.resolve("models", ref) for ref in refs))


def _describe(repair: Repair) -> str:
    if repair.failure is not None:
        return f"not repaired: {repair.digest}: {repair.failure}"
    kept: Any = f"; the bad bytes are kept in {repair.kept_at}" if repair.kept_at else ""
    return f"repaired: {repair.digest}{kept}"
