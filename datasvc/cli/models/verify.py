"""`datasvc models verify | keygen | sign`: check the objects of model versions, and sign versions."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from datasvc.cli.datasets.maintain import RepairFromOption, describe_repair
from datasvc.cli.models.arguments import RefArgument, TrustedOption
from datasvc.cli.terminal.completion import reference
from datasvc.cli.terminal.output import JsonOption, RepoOption, print_json, print_line, print_result
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
    from datasvc.models.registry.verify import lost_versions, verify_and_repair
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


def keygen(
    path: Annotated[Path, typer.Argument(metavar="FILE", help="New file for the private key.")],
    as_json: JsonOption = False,
) -> None:
    """Create a signing key: FILE is the private key, FILE.pub the public key that verifies signatures.

    Example: datasvc models keygen ~/.datasvc/signing.pem
    """
    from datasvc.models.versions.signing import make_key

    key = make_key(path.expanduser())
    line = f"created key {key.id}: {path} is the private key, {key.source} the public key for verification"
    print_result({"key": key.id, "private": str(path), "public": str(key.source)}, line, as_json=as_json)


def sign(
    ref: RefArgument,
    key: Annotated[Path, typer.Option(help="File of a private key, see `datasvc models keygen`.")],
    repo: RepoOption,
    as_json: JsonOption = False,
) -> None:
    """Sign a model version: its name, its number and its digests, and thereby all of its bytes.

    Example: datasvc models sign digits-cnn@3 --key ~/.datasvc/signing.pem --repo s3://bucket/repo
    """
    from datasvc.models.versions.signing import load_private_key
    from datasvc.models.versions.signing import sign as run_sign
    from datasvc.repository import Repository

    signature = run_sign(Repository.open(repo), ref, load_private_key(key.expanduser()))
    line = f"signed {signature.version} with key {signature.key_id}: {signature.location}"
    print_result(asdict(signature), line, as_json=as_json)
