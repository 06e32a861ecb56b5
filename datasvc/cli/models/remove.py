"""`datasvc models rm | retain | gc`: which versions stay, and the bytes of those that do not."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from datasvc.cli.datasets import maintain
from datasvc.cli.models.arguments import NameArgument
from datasvc.cli.models.listing import metrics_line
from datasvc.cli.terminal.output import JsonOption, RepoOption, print_json, print_table

if TYPE_CHECKING:
    from datasvc.models import ModelVersion
    from datasvc.models.registry.retention import RetentionPlan


class ModeChoice(StrEnum):
    """Whether a high or a low metric is better."""

    max = "max"
    min = "min"


def rm(
    refs: Annotated[list[str], typer.Argument(metavar="REF...", help="NAME@VERSION or NAME@TAG, one or more.")],
    repo: RepoOption,
    force: Annotated[bool, typer.Option("--force", help="Tagged ones too: their tags are taken away.")] = False,
    message: Annotated[str, typer.Option("--message", "-m", help="Kept with the removal.")] = "",
    as_json: JsonOption = False,
) -> None:
    """Remove model versions. Their numbers are never used again; what they came from can still be shown.

    Example: datasvc models rm digits-cnn@3 digits-cnn@4 --repo ./repo

    Their bytes go with a later gc, where no other version has them; until its grace is over they stay.
    """
    from datasvc.models.registry.removal import remove
    from datasvc.repository import Repository

    done = remove(Repository.open(repo), refs, force=force, message=message)
    versions = [str(version) for version in done.versions]
    if as_json:
        print_json({"removed": versions, "untagged": list(done.untagged)})
        return
    for tag in done.untagged:
        typer.echo(f"{tag} was taken away")
    typer.echo(f"removed {', '.join(versions)}; `datasvc models gc` frees their bytes once its grace is over")


def retain(
    name: NameArgument,
    repo: RepoOption,
    last: Annotated[int | None, typer.Option(min=1, help="Keep so many of the newest.")] = None,
    best: Annotated[int | None, typer.Option(min=1, help="Keep so many of the best by --metric.")] = None,
    metric: Annotated[
        str | None, typer.Option(help="What best means; without it: both ends of every metric.")
    ] = None,
    mode: Annotated[
        ModeChoice | None,
        typer.Option(help="Whether a high or a low metric is better; needed where its name does not tell."),
    ] = None,
    every: Annotated[int | None, typer.Option(min=1, help="Keep every n-th version.")] = None,
    every_steps: Annotated[int | None, typer.Option(min=1, help="Keep one version for so many steps.")] = None,
    apply: Annotated[bool, typer.Option("--apply", help="Remove; without it only say what would be.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Remove the versions of a model that no rule keeps, and say why each of the others stays.

    Example: datasvc models retain digits-cnn --last 5 --best 3 --metric accuracy --every-steps 10000 --repo ./repo

    The newest version, the best and the tagged ones always stay.
    """
    from datasvc.models.registry.removal import retain as run_retain
    from datasvc.models.registry.retention import RetentionPolicy
    from datasvc.repository import Repository

    policy = RetentionPolicy(last, best, metric, None if mode is None else mode.value, every, every_steps)
    versions, plan = run_retain(Repository.open(repo), name, policy, dry_run=not apply)
    if as_json:
        kept = {str(number): list(reasons) for number, reasons in plan.kept.items()}
        print_json({"name": name, "applied": apply, "kept": kept, "removed": list(plan.removed)})
        return
    print_table(("version", "step", "metrics", "why"), [_row(each, plan, apply=apply) for each in reversed(versions)])
    verb = "removed" if apply else "would remove"
    typer.echo(f"{verb} {len(plan.removed)} of {len(versions)} versions", err=True)
    if plan.removed:
        hint = "`datasvc models gc` frees their bytes once its grace is over" if apply else "--apply removes them"
        typer.echo(hint, err=True)


def gc(
    repo: RepoOption,
    grace: Annotated[str, typer.Option(help="Keep what is younger, or was removed since: 7d, 48h, 30m.")] = "7d",
    yes: maintain.YesOption = False,
    no_writers: maintain.NoWritersOption = False,
    as_json: JsonOption = False,
) -> None:
    """Free the bytes of removed versions, and all else in the repository that no version names; as `datasvc gc`.

    Example: datasvc models gc --grace 7d --yes --repo ./repo
    """
    maintain.gc(repo=repo, grace=grace, yes=yes, no_writers=no_writers, as_json=as_json)


def _row(version: ModelVersion, plan: RetentionPlan, *, apply: bool) -> tuple[object, ...]:
    reasons = plan.kept.get(version.version)
    why = ", ".join(reasons) if reasons else "removed" if apply else "REMOVE"
    return str(version), version.entry["step"], metrics_line(version.entry["metrics"]) or "-", why
