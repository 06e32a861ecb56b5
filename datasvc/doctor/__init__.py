"""Checks of an installation, its machine, folders, stores and nodes: what works, what does not, and what to do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from datasvc.doctor.finding import Finding
from datasvc.doctor.machine import examine_cache, examine_open_files, examine_ports, examine_shared_memory
from datasvc.doctor.packages import examine_decoding, examine_packages
from datasvc.doctor.stores import examine_node, examine_repository
from datasvc.models.versions.code_revision import describe_environment
from datasvc.node.client import NodeClient
from datasvc.node.settings import DEFAULT_PORT

__all__ = ["Finding", "examine"]


PORTS: Final[Mapping[int, str]] = {DEFAULT_PORT: "datasvc serve", 8766: "datasvc ui"}


def examine(
    *, repository: str | None = None, nodes: Mapping[str, NodeClient] | None = None, cache: Path | None = None
) -> Iterator[Finding]:
    """Yield a finding for each check; a check that fails is a finding too.

    Args:
        repository: URL of a repository; None: no repository is checked.
        nodes: clients of nodes by their URLs.
        cache: folder of a cache, which may be missing; None: no cache is checked.
    """
    yield from examine_packages()
    yield from examine_decoding(describe_environment())
    yield examine_open_files()
    yield examine_shared_memory()
    yield from examine_ports(PORTS)
    if cache is not None:
        yield from examine_cache(cache)
    if repository is not None:
        yield from examine_repository(repository)
    for url, client in (nodes or {}).items():
        yield from examine_node(url, client)
