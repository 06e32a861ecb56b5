"""Versions of a data set as nodes of `datasvc.drawing.version_graph`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from datasvc.drawing import VersionNode
from datasvc.repository import Entry
from datasvc.repository.logs.lines import branch_of
from datasvc.repository.logs.parents import recorded_parents


def entry_nodes(
    name: str,
    entries: Iterable[Entry],
    *,
    tags: Mapping[str, int] | None = None,
    branches: Mapping[str, int] | None = None,
    removed: Collection[int] = (),
    href: Callable[[str], str] | None = None,
) -> list[VersionNode]:
    """Return a node for each entry, in their order.

    Args:
        name: name of the data set.
        entries: entries with valid splits.
        tags: version of each tag.
        branches: head of each branch.
        removed: numbers of the removed versions.
        href: returns the address of the page of a version, by its name such as "pets@3".
    """
    return [
        VersionNode(
            f"{name}@{entry.number}",
            entry_parents(entry.content),
            tuple(tag for tag, number in (tags or {}).items() if number == entry.number),
            _note(entry.content),
            href(f"{name}@{entry.number}") if href else None,
            entry.number in removed,
            title=_title(name, entry),
            branches=tuple(branch for branch, number in (branches or {}).items() if number == entry.number),
        )
        for entry in entries
    ]


def entry_parents(content: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the versions that a version was made from, as its entry records them; () for an ingest."""
    change = content.get("change")
    parents: list[Any] = recorded_parents(content)
    if isinstance(change, Mapping) and change.get("kind") == "merge":
        parents += change.get("versions", ())
    elif isinstance(change, Mapping) and change.get("kind") == "revert" and change.get("to"):
        parents.append(change["to"])
    return tuple(dict.fromkeys(map(str, parents)))


def change_of(content: Mapping[str, Any]) -> str:
    """Return how a version was made: "ingest", "append", "delete", "merge" or another change."""
    change = content.get("change")
    return str(change.get("kind")) if isinstance(change, Mapping) else "ingest"


def _title(name: str, entry: Entry) -> str:
    branch = branch_of(entry.content)
    on_branch = "" if branch is None else f" on branch {branch}"
    parents = entry_parents(entry.content)
    origin = f", from {' and '.join(parents)}" if parents else ""
    return f"{name}@{entry.number}{on_branch}, created {entry.content.get('created', 'at an unknown time')}{origin}"


def _note(content: Mapping[str, Any]) -> str:
    num_samples = sum(split["samples"] for split in content["splits"].values())
    parts = [f"{num_samples:,} samples", change_of(content), str(content.get("message") or "")]
    return " · ".join(part for part in parts if part)
