"""What needs attention: the problems of nodes and runs, each with what it means and what to do."""

from __future__ import annotations

from collections.abc import Iterator

from datasvc.printable import count_text
from datasvc.sizes import format_size
from datasvc.ui.web.links import cluster_link
from datasvc.ui.web.node_monitor import NodeState
from datasvc.ui.web.page import Problem

_FULL_OF_PINS = 0.9


def node_problems(state: NodeState) -> list[Problem]:
    """Return the problems of a node, the gravest first."""
    link = cluster_link(node=state.url)
    if state.error is not None:
        since = "" if state.status is None else "; what is shown are its last values"
        return [Problem(f"{state.error}; check that `datasvc serve` runs there{since}", link)]
    warnings = [Problem(text, link, "warning") for text in _warnings(state)]
    return [*(Problem(f"{state.url}: {text}", link) for text in _errors(state)), *warnings]


def _errors(state: NodeState) -> Iterator[str]:
    assert state.status is not None
    cache = state.status["cache"]
    if cache["quarantined_bytes"]:
        yield (
            f"{format_size(cache['quarantined_bytes'])} of corrupt objects are in quarantine, "
            f"{count_text(cache['counters'].get('corrupt', 0), 'corrupt object')} found so far; they are never "
            "served, and are fetched again. Check disks, memory and network cards, and run "
            f"`datasvc cache scrub --cache {cache['folder']}`"
        )
    if cache["limit_bytes"] < cache["budget_bytes"]:
        yield (
            f"the limit of the cache is lowered from {format_size(cache['budget_bytes'])} to "
            f"{format_size(cache['limit_bytes'])} because the disk was full (set the budget again once it is not)"
        )
    failed = {}
    for job in state.status.get("jobs", ()):  # oldest first: a later job of the same data replaces an earlier one
        failed[job.get("ref"), job.get("split")] = job
    for (ref, _), job in failed.items():
        if job["state"] == "failed":
            yield f"staging {ref} failed: {job['error']}"


def _warnings(state: NodeState) -> Iterator[str]:
    assert state.status is not None
    cache = state.status["cache"]
    if cache["pinned_bytes"] >= _FULL_OF_PINS * cache["limit_bytes"]:
        yield (
            f"{state.url}: {format_size(cache['pinned_bytes'])} of {format_size(cache['limit_bytes'])} are pinned, "
            "so little space is left for other objects; unpin what is not needed (`datasvc cache unpin`)"
        )
    for peer, report in sorted(state.status.get("peers", {}).items()):
        if report["num_lying"]:
            yield (
                f"{state.url} received {count_text(report['num_lying'], 'wrong object')} from {peer}; none was used. "
                f"Check disk and memory of {peer}"
            )
