"""`datasvc rm | rename`: remove versions of a data set, and give it a new name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from datasvc.cli.datasets.listing import NameArgument
from datasvc.cli.terminal.completion import reference
from datasvc.cli.terminal.output import (
    DoneOption,
    DryRunOption,
    JsonOption,
    MessageOption,
    RepoOption,
    check_one_of,
    print_json,
    print_line,
    print_result,
)
from datasvc.errors import CorruptDataError, DatasvcError

if TYPE_CHECKING:
    from datasvc.repository import Kind, Repository, Resolved

RefsArgument = Annotated[list[str], reference("NAME@VERSION or NAME@TAG, one or more.", "REF...")]
ForceOption = Annotated[bool, typer.Option("--force", help="Remove tagged versions too, together with their tags.")]
RemovalMessageOption = Annotated[str, typer.Option("--message", "-m", help="Description stored with the removal.")]


def rm(
    refs: RefsArgument,
    repo: RepoOption,
    force: ForceOption = False,
    yes: DoneOption = False,
    dry_run: DryRunOption = False,
    message: RemovalMessageOption = "",
    as_json: JsonOption = False,
) -> None:
    """Remove data-set versions. Their numbers are never reused, and their entries can still be shown.

    Example: datasvc rm pets@3 pets@4 --repo ./repo

    After a grace period, `datasvc gc` frees the bytes that no other version uses.
    """
    check_one_of(yes=yes, dry_run=dry_run)
    run_rm("datasets", refs, repo, force=force, dry_run=dry_run, message=message, as_json=as_json)


def run_rm(
    kind: Kind, refs: list[str], repo: str, *, force: bool, dry_run: bool, message: str, as_json: bool
) -> None:
    """Remove versions, and print the result; for `rm` of data sets and of models."""
    from datasvc.repository import Repository
    from datasvc.repository.removal import remove_versions

    repository = Repository.open(repo)
    report = remove_versions(repository, kind, refs, force=force, dry_run=dry_run, message=message)
    versions = [str(version) for version in report.versions]
    damaged = [str(version) for version in report.versions if _is_damaged(repository, version)]
    command = "datasvc models" if kind == "models" else "datasvc"
    if as_json:
        facts = {"removed": versions, "untagged": list(report.untagged), "damaged": damaged}
        print_json(facts | ({"dry_run": True} if dry_run else {}))
    else:
        verb = "would remove" if dry_run else "removed"
        for tag in report.untagged:
            print_line(f"{verb} tag {tag}")
        freed = "" if damaged else f"; `{command} gc` frees their bytes after its grace period"
        print_line(f"{verb} {', '.join(versions)}{'; nothing was changed' if dry_run else freed}")
    if damaged and not dry_run:
        print_line(
            f"the entry of {', '.join(damaged)} cannot be read, so gc deletes nothing; if there is no copy, "
            f"`{command} mark-lost {' '.join(damaged)}` gives it up",
            err=True,
        )


def _is_damaged(repository: Repository, version: Resolved) -> bool:
    try:
        repository.entry(version)
    except CorruptDataError:
        return True
    except DatasvcError:  # the version is removed already: an error of this check must not be the result
        return False
    return False


def rename(
    name: NameArgument,
    new_name: Annotated[str, typer.Argument(metavar="NEW", help="A name that has no version yet.")],
    repo: RepoOption,
    yes: DoneOption = False,
    dry_run: DryRunOption = False,
    message: MessageOption = "",
    as_json: JsonOption = False,
) -> None:
    """Give a data set a new name, with its history, numbers and tags; the versions of the old name are removed.

    Example: datasvc rename pets animals --repo ./repo

    No shard is copied. Models that were trained on the data set still name the old versions, which `show` describes.
    """
    from datasvc.repository import Repository
    from datasvc.shards.history.rename import rename as run_rename

    check_one_of(yes=yes, dry_run=dry_run)
    newest = run_rename(Repository.open(repo), name, new_name, dry_run=dry_run, message=message)
    facts = {"from": name, "to": new_name, "version": str(newest)} | ({"dry_run": True} if dry_run else {})
    done = f"renamed {name} to {new_name}: its newest version is {newest}"
    line = f"would rename {name} to {new_name}; nothing was changed" if dry_run else done
    print_result(facts, line, as_json=as_json)
