"""`datasvc verify | gc`: is everything there, and what is there that nobody needs."""

from __future__ import annotations

import re
from dataclasses import asdict, replace
from typing import Annotated, Final

import typer

from datasvc.cli.datasets.ingest import overlap_facts
from datasvc.cli.terminal.output import JsonOption, RepoOption, print_json
from datasvc.cli.terminal.values import text_value
from datasvc.errors import ConfigError, CorruptDataError
from datasvc.progress import byte_progress

RefArgument = Annotated[str, typer.Argument(metavar="REF", help="NAME, NAME@VERSION or NAME@TAG.")]

_SECONDS: Final = {"s": 1, "m": 60, "h": 3600, "d": 24 * 3600}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*([smhd])")

YesOption = Annotated[bool, typer.Option("--yes", help="Remove; without it only say what would be removed.")]
NoWritersOption = Annotated[
    bool, typer.Option("--no-writers", help="Nobody writes to the repository now: allow any grace.")
]


def verify(
    ref: RefArgument,
    repo: RepoOption,
    deep: Annotated[bool, typer.Option("--deep", help="Read every byte and compare every sample.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Look for missing, truncated and changed objects of a data-set version, and for samples that two splits share.

    Example: datasvc verify pets@1 --deep --repo s3://bucket/repo

    Without --deep shards are looked at by their size. Ends with status 3 when there is a problem.
    """
    from datasvc.repository import Repository
    from datasvc.shards.versions.verify import verify as run_verify
    from datasvc.sizes import format_size

    with byte_progress(f"verifying {ref}") as (set_total, advance):
        done = run_verify(Repository.open(repo), ref, deep=deep, begin=set_total, report=advance)
    if as_json:
        facts = asdict(replace(done, overlaps=()))
        print_json({**facts, "overlaps": [overlap_facts(overlap) for overlap in done.overlaps]})
    else:
        how = "read and compared" if deep else "looked at by size; --deep reads every byte"
        typer.echo(
            f"{done.version}: {done.num_samples} samples in {done.num_shards} shards, "
            f"{format_size(done.size_bytes)}, {how}"
        )
        for problem in done.problems:
            typer.echo(text_value(str(problem)))
        for kind, count in done.accepted.items():
            typer.echo(f"{count} samples are in two splits, by {kind}: accepted when they were committed")
        for overlap in done.overlaps:
            typer.echo(
                text_value(
                    f"{overlap}; `datasvc delete {done.version} --keys FILE --split {overlap.split}` removes them"
                )
            )
        if done.num_unchecked:
            typer.echo(f"{done.num_unchecked} samples have no sample index: equal images in two splits are not found")
        num_problems = len(done.problems) + len(done.overlaps)
        typer.echo(f"{num_problems} problems" if num_problems else "all is well")
    if done.problems or done.overlaps:
        raise typer.Exit(CorruptDataError.exit_code)


def gc(
    repo: RepoOption,
    grace: Annotated[str, typer.Option(help="Keep what is younger: 7d, 48h, 30m.")] = "7d",
    yes: YesOption = False,
    no_writers: NoWritersOption = False,
    as_json: JsonOption = False,
) -> None:
    """Remove objects that no version of any data set or model names, and what killed writers left.

    Example: datasvc gc --grace 7d --yes --repo ./repo
    """
    from datasvc.gc import gc as run_gc
    from datasvc.repository import Repository
    from datasvc.sizes import format_size

    grace_s = parse_duration(grace)
    done = run_gc(Repository.open(repo), grace_s=grace_s, dry_run=not yes, no_writers=no_writers)
    if as_json:
        print_json({**asdict(done), "size_bytes": done.size_bytes})
        return
    typer.echo(
        f"{'would remove' if done.dry_run else 'removed'} {len(done.objects)} objects "
        f"({format_size(done.size_bytes)}), {len(done.temporary_files)} unfinished files, {len(done.journals)} "
        f"journals; {done.num_kept} objects stay"
    )
    if done.clock_warning is not None:
        typer.echo(text_value(done.clock_warning))
    if done.dry_run and (done.objects or done.pointers or done.temporary_files or done.journals):
        typer.echo("nothing was removed yet: add --yes; --json lists them")


def parse_duration(text: str) -> float:
    """Return the seconds of "7d", "48h", "30m" or "90s". Raises ConfigError."""
    match = _DURATION.fullmatch(text.strip())
    if not match:
        raise ConfigError(f"{text!r} is no duration; expected such as 7d, 48h, 30m or 90s")
    return float(match[1]) * _SECONDS[match[2]]
