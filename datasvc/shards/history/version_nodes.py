"""Converts the versions of a data set to nodes of `datasvc.drawing.version_graph`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from datasvc.drawing import VersionNode
from datasvc.repository import Repository
from datasvc.shards.versions.dataset import readable_versions
from datasvc.shards.versions.version_entry import entry_parents


def dataset_nodes(
    repository: Repository, name: str, *, last: int | None = None, href: Callable[[str], str] | None = None
) -> list[VersionNode]:
    """Return a node for each of the `last` newest versions of a data set (None: all), newest first.

    Args:
        repository: repository of the data set.
        name: name of the data set.
        last: number of versions.
        href: returns the address of the page of a version, by its name such as "pets@3".

    Raises:
        The errors of `readable_versions`.
    """
    entries = readable_versions(repository, name, last=last)
    state = repository.state("datasets", name)
    return [
        VersionNode(
            f"{name}@{entry.number}",
            entry_parents(entry.content),
            tuple(tag for tag, number in state.tags.items() if number == entry.number),
            _note(entry.content),
            href(f"{name}@{entry.number}") if href else None,
            entry.number in state.removed,
            title=f"{name}@{entry.number}, created {entry.content.get('created', 'at an unknown time')}",
        )
        for entry in reversed(entries)
    ]


def _note(content: Mapping[str, Any]) -> str:
    num_samples = sum(split["samples"] for split in content["splits"].values())
    change = content.get("change")
    kind = str(change.get("kind")) if isinstance(change, Mapping) else "ingest"
    parts = [f"{num_samples:,} samples", kind, str(content.get("message") or "")]
    return "  ".join(part for part in parts if part)
