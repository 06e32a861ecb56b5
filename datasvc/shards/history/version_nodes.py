"""The versions of a data set, with tags and removals, as nodes of `datasvc.drawing.version_graph`."""

from __future__ import annotations

from collections.abc import Callable

from datasvc.drawing import VersionNode
from datasvc.repository import Repository
from datasvc.shards.notebook.version_nodes import entry_nodes
from datasvc.shards.versions.dataset import readable_versions


def dataset_nodes(
    repository: Repository, name: str, *, last: int | None = None, href: Callable[[str], str] | None = None
) -> list[VersionNode]:
    """Return a node for each of the `last` newest versions of a data set (None: all), newest first.

    Args:
        repository: repository of the data set.
        name: name of the data set, or NAME@BRANCH for the versions of a branch and their ancestors.
        last: number of versions.
        href: returns the address of the page of a version, by its name such as "pets@3".

    Raises:
        The errors of `readable_versions`.
    """
    entries = readable_versions(repository, name, last=last)
    state = repository.state("datasets", entries.name)
    return entry_nodes(
        entries.name, reversed(entries), tags=state.tags, branches=state.branches, removed=state.removed, href=href
    )
