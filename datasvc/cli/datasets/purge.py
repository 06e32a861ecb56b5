"""`datasvc purge | certificates`: remove the bytes of samples from all versions, and show the certificates."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from datasvc import durable
from datasvc.cli.datasets.ingest import read_keys
from datasvc.cli.terminal.completion import reference
from datasvc.cli.terminal.derived_options import options_from
from datasvc.cli.terminal.output import (
    DryRunOption,
    JsonOption,
    KeysOption,
    RefArgument,
    RepoOption,
    check_one_of,
    print_facts,
    print_json,
    print_line,
    print_table,
)
from datasvc.errors import CorruptDataError
from datasvc.printable import count_text, text_value
from datasvc.progress import byte_progress
from datasvc.sizes import format_size

if TYPE_CHECKING:
    from datasvc.api.purge import PurgeReport

_MAX_LISTED = 10


@options_from(
    "api.purge.purge",
    in_order="ref repo keys where split missing copies hash_keys cache by message certificate yes dry_run as_json",
    caches=None,
)
def purge(
    ref: RefArgument,
    repo: RepoOption,
    keys: KeysOption = None,
    cache: Annotated[
        list[Path] | None, typer.Option(help="Also evict the old shards from this cache; may be given several times.")
    ] = None,
    certificate: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the certificate to FILE.")] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do it. Without --yes, only print what it would do.")] = False,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
    **options: Any,
) -> None:
    """Remove the bytes of samples from all versions, and prove that no object has them; nothing can be undone.

    Example: datasvc purge pets --keys keys.txt --yes --certificate purged.json --repo ./repo

    Versions keep their number, order and samples. A purged sample has empty values, and loaders mask it.

    The exit status is 3 if the repository still has the bytes.
    """
    from datasvc.api.purge import purge as run_purge
    from datasvc.api.purge import to_json
    from datasvc.repository import Repository

    check_one_of(yes=yes, dry_run=dry_run)
    repository = Repository.open(repo)
    with byte_progress(f"purging {ref}") as progress:
        report = run_purge(
            repository,
            ref,
            keys=None if keys is None else read_keys(keys),
            caches=cache or (),
            dry_run=not yes,
            progress=progress,
            **options,
        )
    if certificate is not None and report.certificate is not None:
        durable.write_file(certificate, repository.objects.read(report.certificate))
    if as_json:
        print_json(to_json(report))
    else:
        _print_report(report)
    if report.certificate is not None and not report.is_complete:
        raise typer.Exit(CorruptDataError.exit_code)


def certificates(
    name: Annotated[str, reference("Data set.", "NAME")],
    repo: RepoOption,
    certificate: Annotated[
        str | None,
        typer.Argument(metavar="DIGEST", help="Certificate to show, by the first characters of its digest."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """List the certificates of the purges of a data set, or show one of them: what was removed, when and by whom.

    Example: datasvc certificates pets --repo ./repo
    """
    from datasvc.api.certificates import list_certificates, read_certificate
    from datasvc.repository import Repository

    repository = Repository.open(repo)
    if certificate is not None:
        found = read_certificate(repository, certificate, name)
        if as_json:
            print_json(found)
        else:
            print_facts(found)
        return
    known = list_certificates(repository, name)
    if as_json:
        print_json(known)
    else:
        print_table(tuple(known[0]) if known else ("certificate",), [tuple(each.values()) for each in known])


def _print_report(report: PurgeReport) -> None:
    if report.missing:
        print_line(
            f"{count_text(len(report.missing), 'key is', 'keys are')} in no version: {_listed(report.missing)}"
        )
    if not report.keys:
        print_line(f"nothing to purge in {report.dataset.name}")
        return
    verb = "would purge" if report.dry_run else "purged"
    print_line(f"{verb} {count_text(len(report.keys), 'sample')}: {_listed(report.keys)}")
    shards = count_text(report.num_shards, "shard")
    if report.num_overlays:
        shards += f" and {count_text(report.num_overlays, 'object')} with values beside them"
    print_line(
        f"  {shards} ({format_size(report.size_bytes)}) read and written again"
        + (f"; {count_text(report.num_redacted, 'sample')} redacted before" if report.num_redacted else "")
    )
    for name, counts in (("versions", report.versions), ("models trained on them", report.models)):
        print_line(f"  {name}: {_listed([f'{ref} ({count})' for ref, count in counts.items()]) or 'none'}")
    for origin in report.origins:
        print_line(f"  copied from {origin}: the samples are still there")
    for copy, number in report.destinations[:_MAX_LISTED]:
        if copy.is_in_place:
            print_line(
                f"  {copy.version} was attached to files in place at {copy.destination}, with "
                f"{'an unknown number' if number is None else number} of the samples: delete them there too"
            )
            continue
        how, advice = ("exported", "delete it") if copy.is_export else ("copied", "purge there too")
        print_line(
            f"  {copy.version} was {how} to {copy.destination} on {copy.created[:10]} by {copy.by}, with "
            f"{'an unknown number' if number is None else number} of the samples; nothing is promised there: {advice}"
        )
    if len(report.destinations) > _MAX_LISTED:
        print_line(f"  and {len(report.destinations) - _MAX_LISTED} more copies, see --json")
    if report.copies:
        places = [f"{key} in {name}/{split}" for name, split, key in report.copies]
        print_line(f"  the same bytes under other keys: {_listed(places)}; --copies purges them too")
    for folder, held in report.held.items():
        print_line(f"  cache {folder}: " + (f"{count_text(len(held), 'shard')} still in use" if held else "evicted"))
    if report.proof is None:
        print_line("nothing was changed; add --yes to purge: it cannot be undone")
        return
    proof = report.proof
    print_line(
        f"  searched {count_text(proof.num_shards, 'shard')} by payload digest and "
        f"{count_text(proof.num_overlays, 'object')} with values beside them, and read "
        f"{count_text(proof.num_unreferenced, 'object')} without a version; deleted {len(proof.deleted)}, and "
        f"{count_text(report.thumbnails, 'thumbnail')}"
    )
    if proof.unfinished:
        print_line(f"  unfinished work has the bytes: {_listed(proof.unfinished)}; purge again when it has ended")
    if proof.unreadable:
        print_line(f"  may have the bytes, but cannot be read: {_listed(proof.unreadable)}; delete or repair them")
    print_line(f"certificate {report.certificate}: {'complete' if report.is_complete else 'NOT complete'}")


def _listed(values: Any) -> str:
    """Return the first values, and the number of the others, as text."""
    more = f" and {len(values) - _MAX_LISTED} more" if len(values) > _MAX_LISTED else ""
    return ", ".join(text_value(value) for value in values[:_MAX_LISTED]) + more
