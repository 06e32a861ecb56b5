"""What needs attention: the problems of nodes and runs, each with what it means and what to do."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from datasvc.node.service import describe_disk
from datasvc.printable import count_text
from datasvc.runs import RunSummary
from datasvc.sizes import format_size
from datasvc.ui.web.links import cluster_link, run_link
from datasvc.ui.web.node_monitor import NodeState, used_bytes
from datasvc.ui.web.page import Problem
from datasvc.views.run_words import describe_divergence, describe_stall

_FULL_OF_PINS = 0.9
STARVED_SHARE = 0.05  # as in the loaders' diagnosis
_RECENT_S = 86400.0
_RECENT_STALL_S = 600.0
_MIN_FREE_SHARE = 0.03


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
    needed_bytes = cache["limit_bytes"] - used_bytes(cache)
    free_bytes = state.status.get("disk", {}).get("free_bytes", needed_bytes)
    if free_bytes < needed_bytes:
        yield (
            f"{state.url}: the disk of the cache is nearly full: {format_size(free_bytes)} are free, but the cache "
            f"may use {format_size(needed_bytes)} more; its limit shrinks when the disk is full. Free space, or "
            "lower the budget"
        )
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


def run_problems(run: RunSummary) -> list[Problem]:
    """Return the problems of a run that its newest part shows: how it ended, and what slows a live run down."""
    link = run_link(run.name, run.id)
    is_live = run.state == "running"
    if run.state == "failed":
        return [Problem(f"{run.ref} failed: {run.message or 'the log has no message'}", link)]
    if run.state == "not responding":
        age_s = round(time.time() - run.last_s)
        step = "before its first step" if run.step is None else f"at step {run.step:,}"
        return [
            Problem(
                f"{run.ref} is not responding: its log has had no new part for {age_s:,} s, {step}. "
                "Its program was killed, or cannot reach the repository; start it again to "
                "continue from its newest version",
                link,
            )
        ]
    warnings = [Problem(f"{run.ref} {text}", link, "warning") for text in (_run_warnings(run) if is_live else ())]
    stall, divergence = describe_stall(run), describe_divergence(run)
    errors = [*([f"is {stall}"] if stall else ()), *([divergence] if divergence else ())]
    return [*(Problem(f"{run.ref} {text}", link) for text in errors), *warnings]


def _run_warnings(run: RunSummary) -> Iterator[str]:
    """Yield what slows a live run down, to be read after its name."""
    share = starved_share(run.latest)
    if run.verdict.startswith("starved"):
        yield f"is {run.verdict}"
    elif not run.verdict and share is not None and share >= STARVED_SHARE:
        # A diagnosis covers many steps: better than the share of the newest one.
        yield f"is starved: it waits {share:.0%} of the time for data; a diagnosis with advice was not reported yet"
    if run.stragglers:
        ranks = ", ".join(map(str, run.stragglers))
        yield f"has stragglers: the other ranks wait for rank {ranks}; the table of ranks has hosts and times"
    # Both times are of the machine that writes the log.
    if run.last_stall_s is not None and run.last_s - run.last_stall_s < _RECENT_STALL_S:
        ago_s = max(0, round(run.last_s - run.last_stall_s))
        stalls = count_text(run.num_stalls, "step")
        yield f"stalls: {stalls} waited a second or longer for data, the last one {ago_s} s before its newest part"


def recent_run_problems(runs: Iterable[RunSummary], now_s: float) -> list[Problem]:
    """Return the problems of the runs that have written a part within a day."""
    return [problem for run in runs if now_s - run.last_s < _RECENT_S for problem in run_problems(run)]


def starved_share(latest: Mapping[str, object]) -> float | None:
    """Return the share of the newest step that waited for data; None if it is not known."""
    wait_s, step_s = latest.get("wait_s"), latest.get("step_s")
    if not isinstance(wait_s, (int, float)) or not isinstance(step_s, (int, float)) or not step_s > 0:
        return None
    return wait_s / step_s


def disk_problems(folder: Path | None) -> list[Problem]:
    """Return a problem if the disk of a local repository is nearly full. `folder`: None for other repositories."""
    disk = {} if folder is None or not folder.is_dir() else describe_disk(folder)
    if not disk or disk["free_bytes"] >= _MIN_FREE_SHARE * disk["total_bytes"]:
        return []
    text = (
        f"the disk of the repository is nearly full: {format_size(disk['free_bytes'])} of "
        f"{format_size(disk['total_bytes'])} are free; versions and run logs cannot be written when it is full. "
        "`datasvc gc --dry-run` shows what can be deleted"
    )
    return [Problem(text, severity="warning")]
