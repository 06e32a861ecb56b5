"""`datasvc ls | log | tag`: list data sets and their versions, and set tags."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from datasvc.cli.terminal.output import JsonOption, RefArgument, RepoOption, print_json, print_line, print_table
from datasvc.cli.terminal.unreadable import unreadable_facts
from datasvc.sizes import format_size

NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="Name of a data set.")]


def ls(repo: RepoOption, as_json: JsonOption = False) -> None:
    """List the data sets of a repository.

    Example: datasvc ls --repo ./repo
    """
    from datasvc.repository import Repository
    from datasvc.shards.versions.dataset import list_datasets

    repository = Repository.open(repo)
    rows: list[dict[str, Any]] = [
        {
            "name": dataset.resolved.name,
            "version": dataset.resolved.version,
            "samples": sum(split["samples"] for split in dataset.entry.content["splits"].values()),
            "bytes": sum(split["bytes"] for split in dataset.entry.content["splits"].values()),
            "tags": repository.tags("datasets", dataset.resolved.name),
        }
        for dataset in list_datasets(repository)
    ]
    if as_json:
        print_json([*rows, *unreadable_facts()])
    else:
        print_table(("name", "version", "samples", "bytes", "tags"), [_row(row) for row in rows])


def log(name: NameArgument, repo: RepoOption, as_json: JsonOption = False) -> None:
    """List the versions of a data set: newest first in the table, oldest first with --json.

    Example: datasvc log pets --repo ./repo
    """
    from datasvc.repository import Repository

    entries = Repository.open(repo).entries("datasets", name)
    if as_json:
        print_json([*({**entry.content, "version": entry.number} for entry in entries), *unreadable_facts()])
        return
    # People read the newest version first; programs get the order of the log.
    rows = [
        (
            f"{name}@{entry.number}",
            entry.content["created"],
            sum(split["samples"] for split in entry.content["splits"].values()),
            entry.content["message"] or "-",
        )
        for entry in reversed(entries)
    ]
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


def _row(row: dict[str, Any]) -> tuple[object, ...]:
    tags = ", ".join(f"{tag}={version}" for tag, version in row["tags"].items()) or "-"
    return row["name"], row["version"], row["samples"], format_size(row["bytes"]), tags
