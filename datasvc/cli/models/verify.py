"""`datasvc models verify`: check that all objects of model versions exist and match their digests."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from datasvc.cli.datasets.maintain import RepairFromOption, describe_repair
from datasvc.cli.models.arguments import TrustedOption
from datasvc.cli.terminal.completion import reference
from datasvc.cli.terminal.output import JsonOption, RepoOption, print_json, print_line
from datasvc.errors import ConfigError, CorruptDataError
from datasvc.printable import count_text
from datasvc.progress import byte_progress

if TYPE_CHECKING:
    from datasvc.repository import Repository, Resolved


def verify(
    repo: RepoOption,
    refs: Annotated[
        list[str] | None, reference("Versions to verify; with --all, names of models.", "[REF]...")
    ] = None,
    every: Annotated[
        bool, typer.Option("--all", help="Verify every version of the given models, or of all models.")
    ] = False,
    deep: Annotated[bool, typer.Option("--deep", help="Also decode every tensor.")] = False,
    repair_from: RepairFromOption = None,
    trusted: TrustedOption = None,
    as_json: JsonOption = False,
) -> None:
    """Read and verify every object of model versions once; list the damaged tensors.

    Example: datasvc models verify digits-cnn@3 --repo s3://bucket/repo

    Example: datasvc models verify --all --repair-from s3://backup/repo --repo s3://bucket/repo

    The exit status is 3 if a problem remains.
    """
    from datasvc.models.registry.repair import verify_and_repair
    from datasvc.models.registry.verify import lost_versions
    from datasvc.repository import Repository
    from datasvc.sizes import format_size

    repository = Repository.open(repo)
    versions = _choose(repository, refs or [], every=every)
    lost = list(map(str, lost_versions(repository, refs or []))) if every else []
    with byte_progress(f"verifying {count_text(len(versions), 'version')}") as progress:
        outcome = verify_and_repair(
            repository, versions, repair_from or (), deep=deep, trusted_keys=trusted or None, progress=progress
        )
    report, remaining = outcome.verified, outcome.remaining
    if as_json:
        repairs = [asdict(repair) for repair in outcome.repairs]
        print_json({**asdict(report), "repairs": repairs, "num_left": len(remaining), "lost": lost})
    else:
        size = format_size(report.size_bytes)
        print_line(
            f"{count_text(len(report.versions), 'version')}: {count_text(report.num_objects, 'object')}, {size}, read"
        )
        for problem in report.problems:
            print_line(str(problem))
        for repair in outcome.repairs:
            print_line(describe_repair(repair))
        for version in lost:
            print_line(f"{version} was declared lost: its entry could not be read, and none of it can be restored")
        no_problems = "no problems in the other versions" if lost else "no problems"
        print_line(count_text(len(remaining), "problem") if remaining else no_problems)
    if remaining:
        raise typer.Exit(CorruptDataError.exit_code)


def _choose(repository: Repository, refs: list[str], *, every: bool) -> list[Resolved]:
    from datasvc.models.registry.verify import every_version

    if every:
        return every_version(repository, refs)
    if not refs:
        raise ConfigError("no versions are given; give versions to verify, or --all")
    return list(dict.fromkeys(repository.resolve("models", ref) for ref in refs))
