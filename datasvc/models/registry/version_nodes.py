"""Converts model versions to nodes of `datasvc.drawing.version_graph`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from datasvc.drawing import VersionNode
from datasvc.models.registry.registry import ModelVersion


def version_nodes(versions: Iterable[ModelVersion], *, href: Callable[[str], str] | None = None) -> list[VersionNode]:
    """Return a node for each version, in their order; that of `read_history` is the one of a graph.

    Args:
        versions: the versions.
        href: returns the address of the page of a version, by its name such as "cnn@3".
    """
    return [
        VersionNode(
            str(version),
            version.parents,
            version.tags,
            _note(version.entry),
            href(str(version)) if href else None,
            version.removed,
            title=_title(version),
        )
        for version in versions
    ]


def metrics_text(metrics: Mapping[str, Any]) -> str:
    """Return metrics as one line of text."""
    return ", ".join(
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in metrics.items()
    )


def _title(version: ModelVersion) -> str:
    parents = f", from {' and '.join(version.parents)}" if version.parents else ""
    return f"{version}, created {version.entry['created']}{parents}"


def _note(entry: Mapping[str, Any]) -> str:
    parts = [
        f"step {entry['step']:,}",
        metrics_text(entry["metrics"]),
        "NOT FINITE" if entry.get("num_nonfinite") else "",
        str(entry["message"]),
    ]
    return " · ".join(part for part in parts if part)
