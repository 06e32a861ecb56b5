"""`datasvc ls | log`: list data sets and their versions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from datasvc.cli.terminal.completion import reference
from datasvc.cli.terminal.output import (
    JsonOption,
    LastOption,
    RepoOption,
    SvgOption,
    print_json,
    print_line,
    print_table,
    unreadable_facts,
    write_version_graph,
)
from datasvc.sizes import format_size

if TYPE_CHECKING:
    from datasvc.repository import Repository

NameArgument = Annotated[str, reference("Name of a data set.", "NAME")]


def ls(repo: RepoOption, as_json: JsonOption = False) -> None:
    """List the data sets of a repository.

    Example: datasvc ls --repo ./repo
    """
    from datasvc.repository import Repository
    from datasvc.repository.store.redaction import redact_url
    from datasvc.shards.lines.commit import summarize_datasets

    repository = Repository.open(repo)
    rows = summarize_datasets(repository)
    if as_json:
        print_json([*rows, *unreadable_facts()])
        return
    if not rows and not unreadable_facts():
        print_line(
            f"no data sets in {redact_url(repository.url)}; `datasvc ingest SOURCE NAME` creates one", err=True
        )
    else:
        has_branches = any(row["branches"] for row in rows)
        columns = ("name", "version", "samples", "bytes", "tags", *(["branches"] if has_branches else []))
        print_table(columns, [_row(row, has_branches=has_branches) for row in rows])


def log(
    name: NameArgument,
    repo: RepoOption,
    last: LastOption = None,
    svg: SvgOption = None,
    sizes: Annotated[
        bool, typer.Option("--bytes", help="Show the bytes that versions share, instead of their entries.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """List the versions of a data set: newest first in the table, oldest first with --json.

    Example: datasvc log pets --svg pets.svg --repo ./repo

    NAME@BRANCH lists the versions of a branch and those that it comes from.
    """
    from datasvc.repository import Repository
    from datasvc.repository.logs.branches import branch_of
    from datasvc.shards.versions.dataset import readable_versions
    from datasvc.shards.versions.describe import describe_log, purged_by_version

    repository = Repository.open(repo)
    if svg is not None:
        from datasvc.views.datasets import dataset_nodes

        write_version_graph(svg, dataset_nodes(repository, name, last=last), name)
        if not as_json:
            return
    if sizes:
        _print_bytes(repository, name, last=last, as_json=as_json)
        return
    if as_json:
        print_json([*describe_log(repository, name, last=last), *unreadable_facts()])
        return
    entries = readable_versions(repository, name, last=last)
    removed = repository.state("datasets", entries.name).removed
    # People read the newest version first; programs get the order of the log.
    branches = {entry.number: branch_of(entry.content) for entry in entries}
    # A data set without branches has no column of them.
    has_branches = any(branches.values())
    purged = purged_by_version(
        repository, entries.name, [each.number for each in entries if each.number not in removed]
    )
    rows = [
        (
            f"{entries.name}@{entry.number}{' (removed)' if entry.number in removed else ''}"
            + (f" ({purged[entry.number]} purged)" if entry.number in purged else ""),
            *([branches[entry.number] or "-"] if has_branches else []),
            entry.content.get("created", "-"),
            sum(split["samples"] for split in entry.content["splits"].values()),
            entry.content.get("message") or "-",
        )
        for entry in reversed(entries)
    ]
    print_table(("version", *(["branch"] if has_branches else []), "created", "samples", "message"), rows)


def _print_bytes(repository: Repository, name: str, *, last: int | None, as_json: bool) -> None:
    from datasvc.shards.versions.describe import shared_bytes

    compared = shared_bytes(repository, name, last=last)
    if as_json:
        print_json([*(each.to_json() for each in compared), *unreadable_facts()])
        return
    rows = [
        (
            f"{name.partition('@')[0]}@{each.version}",
            *map(format_size, (each.total_bytes, each.new_bytes, each.unique_bytes)),
        )
        for each in reversed(compared)
    ]
    print_table(("version", "bytes", "new in it", "only in it"), rows)


def _row(row: dict[str, Any], *, has_branches: bool) -> tuple[object, ...]:
    names = ("tags", "branches") if has_branches else ("tags",)
    labels = [", ".join(f"{label}={version}" for label, version in row[name].items()) or "-" for name in names]
    return row["name"], row["version"], row["samples"], format_size(row["bytes"]), *labels
