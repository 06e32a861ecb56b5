"""`datasvc ls | log`: list data sets and their versions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from datasvc.cli.terminal.output import JsonOption, RepoOption, print_json, print_table
from datasvc.cli.terminal.unreadable import unreadable_facts
from datasvc.errors import CorruptDataError
from datasvc.sizes import format_size

if TYPE_CHECKING:
    from datasvc.repository import Resolved

NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="Name of a data set.")]


def ls(repo: RepoOption, as_json: JsonOption = False) -> None:
    """List the data sets of a repository.

    Example: datasvc ls --repo ./repo
    """
    from datasvc.repository import Repository
    from datasvc.shards.versions.dataset import list_datasets

    repository = Repository.open(repo)
    rows: list[dict[str, Any]] = []
    for dataset in list_datasets(repository):
        with _left_out_if_invalid(dataset.resolved):
            splits = dataset.entry.content["splits"].values()
            rows.append(
                {
                    "name": dataset.resolved.name,
                    "version": dataset.resolved.version,
                    "samples": sum(split["samples"] for split in splits),
                    "bytes": sum(split["bytes"] for split in splits),
                    "tags": repository.tags("datasets", dataset.resolved.name),
                }
            )
    if as_json:
        print_json([*rows, *unreadable_facts()])
    else:
        print_table(("name", "version", "samples", "bytes", "tags"), [_row(row) for row in rows])


def log(name: NameArgument, repo: RepoOption, as_json: JsonOption = False) -> None:
    """List the versions of a data set: newest first in the table, oldest first with --json.

    Example: datasvc log pets --repo ./repo
    """
    from datasvc.repository import Repository, Resolved

    repository = Repository.open(repo)
    entries = repository.entries("datasets", name)
    removed = repository.state("datasets", name).removed
    if as_json:
        facts = [
            {**entry.content, "version": entry.number} | ({"removed": True} if entry.number in removed else {})
            for entry in entries
        ]
        print_json([*facts, *unreadable_facts()])
        return
    # People read the newest version first; programs get the order of the log.
    rows: list[tuple[object, ...]] = []
    for entry in reversed(entries):
        version, content = Resolved("datasets", name, entry.number), entry.content
        with _left_out_if_invalid(version):
            num_samples = sum(split["samples"] for split in content["splits"].values())
            shown = f"{version}{' (removed)' if entry.number in removed else ''}"
            rows.append((shown, content["created"], num_samples, content["message"] or "-"))
    print_table(("version", "created", "samples", "message"), rows)


@contextmanager
def _left_out_if_invalid(version: Resolved) -> Iterator[None]:
    """Leave a version out with a warning if a field of its entry has a wrong type."""
    from datasvc.repository.repository import warn_unreadable

    try:
        yield
    except (KeyError, TypeError, AttributeError) as error:
        warn_unreadable(version, CorruptDataError(f"the entry of {version} is not valid: {error!r}"))


def _row(row: dict[str, Any]) -> tuple[object, ...]:
    tags = ", ".join(f"{tag}={version}" for tag, version in row["tags"].items()) or "-"
    return row["name"], row["version"], row["samples"], format_size(row["bytes"]), tags
