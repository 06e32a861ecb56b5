"""`datasvc ls | log | tag`: list data sets and their versions, and set tags."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from datasvc.cli.terminal.output import JsonOption, RefArgument, RepoOption, print_json, print_line, print_table
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

    entries = Repository.open(repo).entries("datasets", name)
    if as_json:
        print_json([*({**entry.content, "version": entry.number} for entry in entries), *unreadable_facts()])
        return
    # People read the newest version first; programs get the order of the log.
    rows: list[tuple[object, ...]] = []
    for entry in reversed(entries):
        version, content = Resolved("datasets", name, entry.number), entry.content
        with _left_out_if_invalid(version):
            num_samples = sum(split["samples"] for split in content["splits"].values())
            rows.append((version, content["created"], num_samples, content["message"] or "-"))
    print_table(("version", "created", "samples", "message"), rows)


def tag(
    ref: RefArgument,
    name: Annotated[str, typer.Argument(metavar="TAG", help="Tag to set or move.")],
    repo: RepoOption,
    as_json: JsonOption = False,
) -> None:
    """Point TAG at a data-set version; its history keeps the earlier versions.

    Example: datasvc tag pets@1 stable --repo ./repo
    """
    from datasvc.repository import Repository

    target = Repository.open(repo).tag("datasets", ref, name)
    if as_json:
        print_json({"tag": name, "version": str(target)})
    else:
        print_line(f"{target.name}@{name} is {target}")


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
