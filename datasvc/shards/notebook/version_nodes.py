"""Versions of a data set as nodes of `datasvc.drawing.version_graph`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from datasvc.drawing import VersionNode
from datasvc.repository import Entry


def entry_nodes(
    name: str,
    entries: Iterable[Entry],
    *,
    tags: Mapping[str, int] | None = None,
    removed: Collection[int] = (),
    href: Callable[[str], str] | None = None,
) -> list[VersionNode]:
    """Return a node for each entry, in their order.

    Args:
        name: name of the data set.
        entries: entries with valid splits.
        tags: version of each tag.
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
            title=_title(f"{name}@{entry.number}", entry.content),
        )
        for entry in entries
    ]


def _title(ref: str, content: Mapping[str, Any]) -> str:
    parents = entry_parents(content)
    origin = f", from {' and '.join(parents)}" if parents else ""
    return f"{ref}, created {content.get('created', 'at an unknown time')}{origin}"


def entry_parents(content: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the versions that a version was made from, as its entry records them; () for an ingest."""
    change = content.get("change")
    parents = [content["parent"]] if content.get("parent") else []
    if isinstance(change, Mapping) and change.get("kind") == "merge":
        parents += change.get("versions", ())
    elif isinstance(change, Mapping) and change.get("kind") == "revert" and change.get("to"):
        parents.append(change["to"])
    return tuple(dict.fromkeys(map(str, parents)))


def change_of(content: Mapping[str, Any]) -> str:
    """Return how a version was made: "ingest", "append", "delete", "merge" or another change."""
    change = content.get("change")
    return str(change.get("kind")) if isinstance(change, Mapping) else "ingest"


def _note(content: Mapping[str, Any]) -> str:
    num_samples = sum(split["samples"] for split in content["splits"].values())
    parts = [f"{num_samples:,} samples", change_of(content), str(content.get("message") or "")]
    return "  ".join(part for part in parts if part)
