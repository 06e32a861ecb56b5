"""`datasvc verify | gc | rm | rename | mark-lost`: check, remove and rename versions, and free their bytes."""

from __future__ import annotations

import re
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated, Final

import typer

from datasvc.cli.datasets.ingest import overlap_facts
from datasvc.cli.datasets.listing import NameArgument
from datasvc.cli.terminal.completion import reference
from datasvc.cli.terminal.output import (
    DoneOption,
    DryRunOption,
    JsonOption,
    MessageOption,
    RefArgument,
    RepoOption,
    YesOption,
    check_one_of,
    print_json,
    print_line,
    print_result,
)
from datasvc.errors import ConfigError, CorruptDataError, DatasvcError
from datasvc.printable import count_text
from datasvc.progress import byte_progress
from datasvc.sizes import format_size

if TYPE_CHECKING:
    from datasvc.repository import Kind, Repository, Resolved
    from datasvc.repository.repair import Repair
    from datasvc.shards.history.repair import DatasetRepairReport

_SECONDS: Final = {"s": 1, "m": 60, "h": 3600, "d": 24 * 3600}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*([smhd])")

GiveUpOption = Annotated[bool, typer.Option("--force", help="Give up tagged versions too, and remove their tags.")]
RepairFromOption = Annotated[
    list[str] | None,
    typer.Option(
        "--repair-from",
        metavar="URL",
        help="Other repository to copy intact objects from; may be given several times. Bad objects are moved to "
        "quarantine/ in the repository.",
    ),
]
NoWritersOption = Annotated[
    bool, typer.Option("--no-writers", help="Promise that no process writes to the repository; allows any --grace.")
]
RefsArgument = Annotated[list[str], reference("NAME@VERSION or NAME@TAG, one or more.", "REF...")]
ForceOption = Annotated[bool, typer.Option("--force", help="Remove tagged versions too, together with their tags.")]
RemovalMessageOption = Annotated[str, typer.Option("--message", "-m", help="Description stored with the removal.")]


def verify(
    ref: RefArgument,
    repo: RepoOption,
    deep: Annotated[bool, typer.Option("--deep", help="Read every byte and compare every sample.")] = False,
    repair_from: RepairFromOption = None,
    as_json: JsonOption = False,
) -> None:
    """Find missing, truncated and changed objects of a version, samples in two splits, and contradicting labels.

    Example: datasvc verify pets@1 --deep --repo s3://bucket/repo

    Example: datasvc verify pets@1 --deep --repair-from s3://backup/repo --repo s3://bucket/repo

    Without --deep, the sizes and the structure of shards are checked. The exit status is 3 if a problem remains.
    """
    from datasvc.repository import Repository
    from datasvc.shards.history.repair import repair_dataset

    with byte_progress(f"verifying {ref}") as progress:
        outcome = repair_dataset(Repository.open(repo), ref, repair_from or (), deep=deep, progress=progress)
    result = outcome.verified
    if as_json:
        # An overlap may have millions of samples, so `asdict` must not copy it; `overlap_facts` lists the first ones.
        facts = asdict(replace(result, overlaps=(), conflicts=()))
        facts["overlaps"] = [overlap_facts(overlap) for overlap in result.overlaps]
        facts["conflicts"] = [conflict._asdict() for conflict in result.conflicts]
        facts["repairs"] = [asdict(repair) for repair in outcome.repairs]
        print_json({**facts, "num_left": len(outcome.remaining)})  # problems that were not repaired
    else:
        _print_verified(outcome, deep=deep)
    if outcome.remaining or result.overlaps or result.conflicts:
        raise typer.Exit(CorruptDataError.exit_code)


def _print_verified(outcome: DatasetRepairReport, *, deep: bool) -> None:
    from datasvc.shards.versions.label_conflicts import describe_conflicts

    result = outcome.verified
    how = "read and compared" if deep else "checked by size and structure; --deep reads every byte"
    print_line(
        f"{result.version}: {count_text(result.num_samples, 'sample')} in "
        f"{count_text(result.num_shards, 'shard')}, "
        f"{format_size(result.size_bytes)}, {how}"
    )
    for problem in result.problems:
        print_line(str(problem))
    for repair in outcome.repairs:
        print_line(describe_repair(repair))
    for kind, count in result.accepted.items():  # overlaps that the commit of the version allowed
        # Equal keys that are paths, such as cat/1.jpg, are of two pictures: no sample is in both splits.
        what = ("key is", "keys are") if kind == "key" else ("sample is", "samples are")
        print_line(f"{count_text(count, *what)} in two splits: accepted when they were committed")
    for overlap in result.overlaps:
        print_line(f"{overlap}; `datasvc delete {result.version} --keys FILE --split {overlap.split}` removes them")
    if result.num_unchecked:
        print_line(
            f"{count_text(result.num_unchecked, 'sample has', 'samples have')} no sample index: equal "
            "images in two splits are not detected"
        )
    if result.conflicts:
        print_line(describe_conflicts(result.conflicts))
    num_problems = len(outcome.remaining) + len(result.overlaps) + len(result.conflicts)
    print_line(count_text(num_problems, "problem") if num_problems else "no problems")


def describe_repair(repair: Repair) -> str:
    """Return the line about the repair of one object; for `verify` of data sets and of models."""
    if repair.failure is not None:
        return f"not repaired: {repair.digest}: {repair.failure}"
    quarantine = f"; the bad bytes are kept in {repair.kept_at}" if repair.kept_at else ""
    return f"repaired: {repair.digest}{quarantine}"


def gc(
    repo: RepoOption,
    grace: Annotated[str, typer.Option(help="Keep everything that is younger than this: 7d, 48h, 30m.")] = "7d",
    yes: YesOption = False,
    dry_run: DryRunOption = False,
    no_writers: NoWritersOption = False,
    runs_older_than: Annotated[
        str | None,
        typer.Option(help="Also remove the logs of runs that were not written for this time, such as 90d."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Remove objects that no version of any data set or model references, and files left by killed writers.

    Logs of runs are removed once all model versions that the run has saved are removed.

    Example: datasvc gc --grace 7d --yes --repo ./repo
    """
    from datasvc.api.gc import gc as run_gc
    from datasvc.repository import Repository

    check_one_of(yes=yes, dry_run=dry_run)
    report = run_gc(
        Repository.open(repo),
        grace_s=parse_duration(grace),
        dry_run=not yes,
        no_writers=no_writers,
        runs_older_than_s=None if runs_older_than is None else parse_duration(runs_older_than),
    )
    if as_json:
        print_json({**asdict(report), "size_bytes": report.size_bytes})
        return
    print_line(
        f"{'would remove' if report.dry_run else 'removed'} {count_text(len(report.objects), 'object')} "
        f"({format_size(report.size_bytes)}), {count_text(len(report.temporary_files), 'unfinished file')}, "
        f"{count_text(len(report.journals), 'journal')}, {count_text(len(report.runs), 'run log')}; "
        f"kept {count_text(report.num_kept, 'object')}"
    )
    if report.num_young:
        print_line(
            f"{report.num_young} of these ({format_size(report.young_bytes)}) are not used by any version, but are "
            f"younger than {grace}: if no process writes to the repository, --grace 0s --no-writers removes them"
        )
    if report.clock_warning is not None:
        print_line(report.clock_warning)
    if report.dry_run and any(
        (report.objects, report.pointers, report.temporary_files, report.journals, report.runs, report.recipes)
    ):
        print_line("nothing was removed; add --yes to remove, or --json to list everything")


def mark_lost(
    refs: RefsArgument,
    repo: RepoOption,
    force: GiveUpOption = False,
    yes: DoneOption = False,
    dry_run: DryRunOption = False,
    message: MessageOption = "",
    as_json: JsonOption = False,
) -> None:
    """Give up data-set versions whose log entries are damaged and have no copy, so that gc runs again.

    Example: datasvc mark-lost pets@3 --message "disk failure, no backup" --repo ./repo

    Only for versions whose entry cannot be read. They count as removed, and their numbers are never used again.
    """
    check_one_of(yes=yes, dry_run=dry_run)
    give_up("datasets", refs, repo, force=force, dry_run=dry_run, message=message, as_json=as_json)


def give_up(
    kind: Kind, refs: list[str], repo: str, *, force: bool, dry_run: bool, message: str, as_json: bool
) -> None:
    """Mark versions as lost (`gc` deletes nothing before that) and print them; for data sets and for models."""
    from datasvc.repository import Repository
    from datasvc.repository.removal import mark_lost as run_mark_lost

    result = run_mark_lost(Repository.open(repo), kind, refs, force=force, dry_run=dry_run, message=message)
    versions = [str(version) for version in result.versions]
    if as_json:
        facts = {"lost": versions, "untagged": list(result.untagged)}
        print_json(facts | ({"dry_run": True} if dry_run else {}))
        return
    for tag in result.untagged:
        print_line(f"{'would remove' if dry_run else 'removed'} tag {tag}")
    if dry_run:
        print_line(f"would mark {', '.join(versions)} as lost; nothing was changed")
        return
    print_line(f"{', '.join(versions)} is marked as lost; after its grace period, `datasvc gc` runs without it")


def parse_duration(text: str) -> float:
    """Return the seconds of "7d", "48h", "30m" or "90s".

    Raises:
        ConfigError: `text` is not a duration.
    """
    match = _DURATION.fullmatch(text.strip())
    if not match:
        raise ConfigError(f"{text!r} is not a valid duration; write for example 7d, 48h, 30m or 90s")
    return float(match[1]) * _SECONDS[match[2]]


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
