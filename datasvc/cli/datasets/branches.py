"""`datasvc branch | merge`: create, list, remove and merge branches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from datasvc.cli.datasets.ingest import format_counts, overlap_facts, print_conflicts, read_keys
from datasvc.cli.datasets.listing import NameArgument
from datasvc.cli.terminal.completion import reference
from datasvc.cli.terminal.derived_options import options_from
from datasvc.cli.terminal.output import JsonOption, RepoOption, print_json, print_line, print_result, print_table
from datasvc.errors import ConfigError
from datasvc.printable import count_text, text_value

if TYPE_CHECKING:
    from datasvc.repository import Entry
    from datasvc.repository.branching import BranchState
    from datasvc.shards.history.merge_branch import BranchMergeReport

_MAX_CONFLICTS = 10


def branch(
    name: NameArgument,
    repo: RepoOption,
    branch: Annotated[  # noqa: A002, RUF100 - the name of the argument
        str | None, typer.Argument(metavar="BRANCH", help="Branch to create; without it, list the branches.")
    ] = None,
    start: Annotated[
        str | None,
        typer.Option(
            "--from", metavar="REF", help="Version at which the branch begins; default: the newest of the main line."
        ),
    ] = None,
    remove: Annotated[
        bool, typer.Option("--remove", help="Remove the branch; its versions stay, by number.")
    ] = False,
    history: Annotated[bool, typer.Option("--history", help="List where the branch began and ended.")] = False,
    message: Annotated[str, typer.Option("--message", "-m", help="Description stored with the branch.")] = "",
    as_json: JsonOption = False,
) -> None:
    """Create a branch of a data set: a line of versions of its own, which does not change what NAME refers to.

    Example: datasvc branch pets experiment --repo ./repo

    NAME@BRANCH is its newest version, in every command. Commit to it with `ingest SOURCE NAME@BRANCH --append` or
    `delete NAME@BRANCH`, and merge it with `merge NAME NAME@BRANCH`.
    """
    from datasvc.repository import Repository
    from datasvc.repository.branching import branch_history, create_branch, read_branches, remove_branch
    from datasvc.repository.logs.references import check_name, parse_reference

    check_name(name, "data set")
    repository = Repository.open(repo)
    if (remove and history) or (start is not None and (remove or history)):
        raise ConfigError("--from, --remove and --history exclude each other; give one of them")
    if branch is None:
        if remove or history or start is not None:
            raise ConfigError("--from, --remove and --history need a branch: datasvc branch NAME BRANCH")
        _print_branches(list(read_branches(repository, name).values()), as_json=as_json)
    elif history:
        _print_history(name, branch_history(repository, name, branch), as_json=as_json)
    elif remove:
        removed = remove_branch(repository, name, branch, message=message)
        head = None if removed is None else str(removed.head)
        where = "" if head is None else f"; its newest version {head} stays until it is removed"
        print_result({"branch": branch, "head": head}, f"removed the branch {name}@{branch}{where}", as_json=as_json)
    else:
        if start is not None and parse_reference(start).name != name:
            raise ConfigError(f"--from {start!r} is not a version of {name}; give a version, tag or branch of {name}")
        begun = create_branch(repository, start or name, branch, message=message)
        print_result({"branch": branch, "head": str(begun)}, f"{name}@{branch} is {begun}", as_json=as_json)


def _print_history(name: str, moves: Sequence[Entry], *, as_json: bool) -> None:
    if as_json:
        print_json([dict(move.content) for move in moves])
        return
    rows = []
    for move in reversed(moves):
        begin = move.content.get("version")
        to = f"from {name}@{begin}" if begin else "removed"
        rows.append((move.number, to, move.content["created"], move.content.get("message") or "-"))
    print_table(("entry", "move", "moved", "message"), rows)


def _print_branches(branches: Sequence[BranchState], *, as_json: bool) -> None:
    if as_json:
        print_json({each.name: {"head": str(each.head), "start": str(each.start)} for each in branches})
    else:
        print_table(("branch", "head", "begins at"), [(each.name, each.head, each.start) for each in branches])


@options_from(
    "shards.history.merge_branch.merge_branch",
    in_order="name ref repo on_conflict ours theirs base dry_run on_split_overlap message as_json",
    on_conflict=typer.Option(
        help="If both sides changed a sample: fail, or keep that of NAME (ours), or take that of REF (theirs)."
    ),
    base=typer.Option(metavar="REF", help="Version that both sides come from; default: found in their history."),
)
def merge(
    name: Annotated[str, reference("Data set to commit to, or NAME@BRANCH.", "NAME")],
    ref: Annotated[str, reference("Version of another line of NAME, such as NAME@BRANCH.")],
    repo: RepoOption,
    ours: Annotated[
        str | None, typer.Option("--ours", metavar="FILE", help="Keys of conflicts to take from NAME, one per line.")
    ] = None,
    theirs: Annotated[
        str | None, typer.Option("--theirs", metavar="FILE", help="Keys of conflicts to take from REF, one per line.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the changes and conflicts, and commit nothing.")
    ] = False,
    as_json: JsonOption = False,
    **options: Any,
) -> None:
    """Merge a branch into another line of its data set, as the next version of NAME.

    Example: datasvc merge pets pets@experiment --repo ./repo

    The changes that REF has since the common ancestor are merged, sample by sample, by key. A sample that both sides
    changed differently is a conflict. Only shards whose labels or keys change are copied. `combine` takes all samples
    of several versions.
    """
    from datasvc.repository import Repository
    from datasvc.shards.history.merge_branch import merge_branch

    options |= {side: [] if path is None else read_keys(path) for side, path in (("ours", ours), ("theirs", theirs))}
    report = merge_branch(Repository.open(repo), ref, name, dry_run=dry_run, **options)
    if as_json:
        print_json(
            {
                "version": str(report.version),
                "committed": report.is_new,
                "ours": str(report.ours),
                "theirs": str(report.theirs),
                "bases": [str(each) for each in report.bases],
                "added": dict(report.added),
                "changed": dict(report.changed),
                "deleted": dict(report.deleted),
                "conflicts": [asdict(conflict) for conflict in report.conflicts],
                "overlaps": [overlap_facts(overlap) for overlap in report.overlaps],
                "label_conflicts": [conflict._asdict() for conflict in report.label_conflicts],
            }
        )
        return
    _print_merge(report, dry_run=dry_run)


def _print_merge(report: BranchMergeReport, *, dry_run: bool) -> None:
    bases = ", ".join(map(str, report.bases))
    if report.theirs in report.bases:
        print_line(f"nothing to merge: {report.ours} has {report.theirs} already")
        return
    kinds = {"added": report.added, "changed": report.changed, "deleted": report.deleted}
    counts = "; ".join(f"{kind} {format_counts(by_split)}" for kind, by_split in kinds.items() if by_split)
    verb = f"would merge {report.theirs} into {report.ours}" if dry_run else f"committed {report.version}"
    what = "" if dry_run else f", {report.theirs} merged into {report.ours}"
    print_line(f"{verb}{what} (common ancestor {bases}): {counts or 'no sample changes'}")
    for conflict in report.conflicts[:_MAX_CONFLICTS]:
        taken = "not settled" if conflict.taken is None else f"taken from {conflict.taken}"
        print_line(
            f"conflict {conflict.split}/{text_value(conflict.key)}: {conflict.ours} in {report.ours}, "
            f"{conflict.theirs} in {report.theirs}; {taken}",
            err=True,
        )
    if len(report.conflicts) > _MAX_CONFLICTS:
        print_line(f"{count_text(len(report.conflicts), 'conflict')} in total; --json lists all", err=True)
    for overlap in report.overlaps:
        print_line(str(overlap), err=True)
    print_conflicts(report.label_conflicts)
