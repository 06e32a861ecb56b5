"""`datasvc models rm | retain | gc | mark-lost | tag`: remove model versions, free their bytes, move tags."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from datasvc.cli.datasets import maintain
from datasvc.cli.datasets.maintain import ForceOption, RefsArgument, RemovalMessageOption, run_rm
from datasvc.cli.datasets.tags import AtOption, ExpectOption, HistoryOption, RemoveOption, TagArgument, run_tag
from datasvc.cli.models.arguments import NameArgument, RefArgument
from datasvc.cli.terminal.derived_options import options_from
from datasvc.cli.terminal.output import (
    DoneOption,
    DryRunOption,
    JsonOption,
    MessageOption,
    RepoOption,
    YesOption,
    check_one_of,
    print_json,
    print_line,
    print_table,
)
from datasvc.printable import count_text

if TYPE_CHECKING:
    from datasvc.models import ModelVersion
    from datasvc.models.registry.retention import RetentionPlan


def rm(
    refs: RefsArgument,
    repo: RepoOption,
    force: ForceOption = False,
    yes: DoneOption = False,
    dry_run: DryRunOption = False,
    message: RemovalMessageOption = "",
    as_json: JsonOption = False,
) -> None:
    """Remove model versions. Their numbers are never reused, and their metadata can still be shown.

    Example: datasvc models rm digits-cnn@3 digits-cnn@4 --repo ./repo

    After a grace period, `datasvc models gc` frees the bytes that no other version uses.
    """
    check_one_of(yes=yes, dry_run=dry_run)
    run_rm("models", refs, repo, force=force, dry_run=dry_run, message=message, as_json=as_json)


@options_from(
    "models.registry.retention.RetentionPolicy",
    every_versions=None,
    in_order="name repo last best metric mode every every_steps yes dry_run apply as_json",
    **dict.fromkeys(("last", "best", "every_steps"), typer.Option(min=1)),
)
def retain(
    name: NameArgument,
    repo: RepoOption,
    every: Annotated[int | None, typer.Option(min=1, help="Keep every n-th version.")] = None,
    yes: YesOption = False,
    dry_run: DryRunOption = False,
    apply: Annotated[bool, typer.Option("--apply", hidden=True, help="The former name of --yes.")] = False,
    as_json: JsonOption = False,
    **options: Any,
) -> None:
    """Remove the versions of a model that no rule keeps, and print the reason for each version that is kept.

    Example: datasvc models retain digits-cnn --last 5 --best 3 --metric accuracy --every-steps 10000 --repo ./repo

    The newest version, the best ones and tagged ones are always kept.
    """
    from datasvc.models.registry.retention import RetentionPolicy
    from datasvc.models.registry.retention import retain as run_retain
    from datasvc.repository import Repository

    apply = yes or apply
    check_one_of(yes=apply, dry_run=dry_run)
    policy = RetentionPolicy(every_versions=every, **options)
    versions, plan = run_retain(Repository.open(repo), name, policy, dry_run=not apply)
    if as_json:
        print_json({"name": name, "applied": apply, **plan.to_dict()})
        return
    rows = [_row(version, plan, apply=apply) for version in reversed(versions)]
    print_table(("version", "step", "metrics", "reason"), rows)
    verb = "removed" if apply else "would remove"
    print_line(f"{verb} {len(plan.removed)} of {count_text(len(versions), 'version')}", err=True)
    if plan.removed:
        hint = "`datasvc models gc` frees their bytes after its grace period" if apply else "--yes removes them"
        print_line(hint, err=True)


def gc(
    repo: RepoOption,
    grace: Annotated[
        str, typer.Option(help="Keep everything that is younger than this, or was removed later: 7d, 48h, 30m.")
    ] = "7d",
    yes: YesOption = False,
    dry_run: DryRunOption = False,
    no_writers: maintain.NoWritersOption = False,
    as_json: JsonOption = False,
) -> None:
    """Remove the bytes of removed versions, and all other unreferenced objects; same as `datasvc gc`.

    Example: datasvc models gc --grace 7d --yes --repo ./repo
    """
    maintain.gc(repo=repo, grace=grace, yes=yes, dry_run=dry_run, no_writers=no_writers, as_json=as_json)


def mark_lost(
    refs: RefsArgument,
    repo: RepoOption,
    force: maintain.GiveUpOption = False,
    yes: DoneOption = False,
    dry_run: DryRunOption = False,
    message: MessageOption = "",
    as_json: JsonOption = False,
) -> None:
    """Give up model versions whose log entries are damaged and have no copy, so that gc runs again.

    Example: datasvc models mark-lost digits-cnn@3 --message "disk failure, no backup" --repo ./repo

    Only for versions whose entry cannot be read. They count as removed, and their numbers are never used again.
    """
    check_one_of(yes=yes, dry_run=dry_run)
    maintain.give_up("models", refs, repo, force=force, dry_run=dry_run, message=message, as_json=as_json)


def _row(version: ModelVersion, plan: RetentionPlan, *, apply: bool) -> tuple[object, ...]:
    from datasvc.views.models import metrics_text

    reasons = plan.kept.get(version.version)
    reason = ", ".join(reasons) if reasons else "removed" if apply else "REMOVE"
    return str(version), version.entry["step"], metrics_text(version.entry["metrics"]) or "-", reason


def tag(
    ref: RefArgument,
    repo: RepoOption,
    name: TagArgument = None,
    expect: ExpectOption = None,
    remove: RemoveOption = False,
    history: HistoryOption = False,
    at: AtOption = None,
    as_json: JsonOption = False,
) -> None:
    """Point TAG at a model version, optionally only if it points at an expected one; its history keeps all moves.

    Example: datasvc models tag digits-cnn@7 prod --expect 5 --repo ./repo

    In every command, NAME@TAG~1 is the version before the tag's newest move. Times are those of the writers' clocks.
    """
    run_tag("models", ref, repo, name, expect=expect, remove=remove, history=history, at=at, as_json=as_json)
