"""Cluster: the nodes, what their caches hold and fetch, and who serves which shards."""

from __future__ import annotations

import shlex
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Final

from datasvc.cache.peers.placement import rank_nodes
from datasvc.drawing import ChartSeries, chart_table, line_chart, small_multiples
from datasvc.errors import DatasvcError, NotFoundError
from datasvc.ui.pages.problems import node_problems
from datasvc.ui.web.links import cluster_link
from datasvc.ui.web.live import PageState
from datasvc.ui.web.node_monitor import NodeSample, NodeState, used_bytes
from datasvc.ui.web.page import Crumb, Page, Panel, Parts, Problem, Query, RawResponse
from datasvc.ui.web.site import Site

_MAX_DRAWN: Final = 8  # nodes with a chart of their own
_MAX_PLACED_SHARDS: Final = 10_000
_MAX_ROWS: Final = 200
_RATES: Final = (
    ("origin_bytes", "From the origin"),
    ("peer_bytes", "From peers"),
    ("evicted_bytes", "Evicted"),
)


def load(site: Site, parts: Parts, query: Query) -> Page | RawResponse:  # noqa: ARG001 - the signature of all pages
    """Return the nodes, or the one whose URL `node` has."""
    all_states = site.nodes.states()
    chosen = query.text("node")
    states = [state for state in all_states if chosen in {None, state.url}]
    if chosen is not None and not states:
        raise NotFoundError(f"{chosen[:200]!r} is not a node of this page; it has {', '.join(site.settings.nodes)}")
    panels = {"nodes": nodes_panel(states)}
    problems = [problem for state in states for problem in node_problems(state)]
    try:
        placement = _placement(site, all_states, query.text("data"))
    except DatasvcError as error:
        # The nodes are shown also if the repository does not respond.
        placement = None
        problems.append(Problem(f"the owners of shards are not known: {error}"))
    if placement is not None:
        panels["placement"] = Panel(placement)
    return Page(
        template="cluster.html",
        title=chosen or "Cluster",
        section="cluster",
        crumbs=(Crumb("Cluster", cluster_link()), *([Crumb(chosen, cluster_link(node=chosen))] if chosen else [])),
        problems=tuple(problems),
        panels=panels,
        view={
            "site": site,
            "chosen": chosen,
            "states": states,
            "sums": _sums(states),
            "rows": [_node_row(state) for state in states],
            "tables": _tables(states),
            "max_rows": _MAX_ROWS,
            "charts": _charts(states),
            "since": min((state.samples[0].time_s for state in states if state.samples), default=None),
        },
    )


def state_of(site: Site, parts: Parts) -> PageState:  # noqa: ARG001 - the signature of all live pages
    """Return the state of the page: another one after each reading of a node."""
    return PageState(str(site.nodes.num_readings))


def nodes_panel(states: Sequence[NodeState]) -> Panel:
    """Return the status of each node."""
    urls = [state.url for state in states]
    command = "\n".join(shlex.join(["datasvc", "top", "--node", url, "--json"]) for url in urls)
    client = "from datasvc.node.client import NodeClient\n"
    python = f"{client}{{url: NodeClient(url).status() for url in {urls!r}}}"
    return Panel({state.url: state.to_dict() for state in states}, command or None, python)


def _sums(states: Sequence[NodeState]) -> dict[str, Any]:
    """Return the numbers of the sentence on top."""
    caches = [state.status["cache"] for state in states if state.status is not None]
    counters: Counter[str] = Counter()
    for cache in caches:
        counters.update(cache["counters"])
    jobs = [job for state in states for job in (state.status or {}).get("jobs", ())]
    return {
        "num_failed": sum(state.error is not None for state in states),
        "used_bytes": sum(map(used_bytes, caches)),
        "limit_bytes": sum(cache["limit_bytes"] for cache in caches),
        "hit_share": _hit_share(counters),
        "num_staging": sum(job["state"] in {"waiting", "running"} for job in jobs),
    }


def _hit_share(counters: Mapping[str, int]) -> float | None:
    requests = counters.get("hits", 0) + counters.get("misses", 0)
    return counters.get("hits", 0) / requests if requests else None


def _node_row(state: NodeState) -> dict[str, Any]:
    """Return a row of the table of nodes."""
    if state.status is None:
        return {"state": state}
    cache = state.status["cache"]
    last = state.samples[-2:]
    rates = [_rate(last[0], last[1], name) if len(last) > 1 else None for name, _ in _RATES]
    return {
        "state": state,
        "cache": cache,
        "used_bytes": used_bytes(cache),
        "hit_share": _hit_share(cache["counters"]),
        "totals": [(cache["counters"].get(name, 0), rate) for (name, _), rate in zip(_RATES, rates, strict=True)],
    }


def _rate(earlier: NodeSample, later: NodeSample, name: str) -> float:
    # A counter restarts at 0 with a new catalogue, so the difference may be negative.
    elapsed_s = max(later.time_s - earlier.time_s, 1e-3)
    return max(0, later.counter(name) - earlier.counter(name)) / elapsed_s


def _tables(states: Sequence[NodeState]) -> dict[str, list[tuple[Any, ...]]]:
    """Return the rows of the tables: staging jobs, peers, tenants and processes of all nodes."""
    tables: dict[str, list[tuple[Any, ...]]] = {"jobs": [], "peers": [], "tenants": [], "processes": []}
    for state in states:
        if state.status is None:
            continue
        cache = state.status["cache"]
        tables["jobs"] += [(state.url, job) for job in reversed(state.status.get("jobs", ()))]
        tables["peers"] += [(state.url, url, peer) for url, peer in sorted(state.status.get("peers", {}).items())]
        tables["tenants"] += [(state.url, name, usage) for name, usage in sorted(cache["tenants"].items())]
        # As in `datasvc top`: jobs of one process with one description are one row.
        clock_bytes: Counter[tuple[str, str]] = Counter()
        for job in cache["jobs"]:
            clock_bytes[str(job["lease_id"]).partition("-")[0], job["note"] or "-"] += job["clock_bytes"]
        tables["processes"] += [(state.url, *process, count) for process, count in clock_bytes.items()]
    return tables


def _charts(states: Sequence[NodeState]) -> list[dict[str, Any]]:
    """Return the charts of the history, each with its table; none before there are two samples."""
    followed = [state for state in states if len(state.samples) > 1]
    if not followed:
        return []
    now = time.time()
    charts = []
    for name, title in _RATES:
        lines = [(state.url, _rates_over_time(state.samples, name)) for state in followed]
        charts.append(_chart(lines, title, "bytes/s", now))
    charts.append(_chart([(state.url, _hits_over_time(state.samples)) for state in followed], "Hits", "%", now))
    used = [(state.url, [(sample.time_s, sample.used_bytes) for sample in state.samples]) for state in followed]
    charts.append(_chart(used, "In the caches", "bytes", now))
    return charts


def _rates_over_time(samples: Sequence[NodeSample], name: str) -> list[tuple[float, float]]:
    return [(later.time_s, _rate(earlier, later, name)) for earlier, later in pairwise(samples)]


def _hits_over_time(samples: Sequence[NodeSample]) -> list[tuple[float, float | None]]:
    points: list[tuple[float, float | None]] = []
    for earlier, later in pairwise(samples):
        hits, misses = (max(0, later.counter(name) - earlier.counter(name)) for name in ("hits", "misses"))
        points.append((later.time_s, 100 * hits / (hits + misses) if hits + misses else None))
    return points


def _chart(
    lines: Sequence[tuple[str, Sequence[tuple[float, float | None]]]], title: str, unit: str, now_s: float
) -> dict[str, Any]:
    left_out = len(lines) - _MAX_DRAWN
    series = [
        ChartSeries(url, [(time_s - now_s) / 60 for time_s, _ in points], [value for _, value in points])
        for url, points in lines[:_MAX_DRAWN]
    ]
    text = f"{title}, first {_MAX_DRAWN} of {len(lines)} nodes" if left_out > 0 else title
    if len(series) > 1:
        # One frame with many lines cannot be read.
        drawing = small_multiples(series, title=text, unit=unit, x_label="minutes", from_zero=True, same_range=True)
    else:
        drawing = line_chart(series, title=text, unit=unit, x_label="minutes", from_zero=True, height=200)
    return {
        "title": text,
        "several": len(series) > 1,
        "svg": drawing,
        "table": chart_table(series, title=text, unit=unit, x_label="minutes", max_rows=100),
    }


def _placement(site: Site, states: Sequence[NodeState], ref: str | None) -> dict[str, Any] | None:
    """Return how many shards of a data-set version each node owns; None if there is nothing to share."""
    if len(states) < 2:
        return None
    ref = ref or site.first_dataset()
    if ref is None:
        return None
    version = str(site.repo.datasets.resolve(ref))
    urls = tuple(state.url for state in states)
    responding = tuple(state.url for state in states if state.error is None)
    owned = site.owners.get((version, urls), lambda: _count_owned(site, version, urls))
    served = {**owned, "nodes": {}}
    if responding:
        served = site.owners.get((version, responding), lambda: _count_owned(site, version, responding))
    none = {"shards": 0, "bytes": 0}
    nodes = {url: {"owns": owned["nodes"][url], "serves": served["nodes"].get(url, none)} for url in urls}
    return {**owned, "nodes": nodes, "datasets": site.repo.datasets.names()[:_MAX_ROWS]}


def _count_owned(site: Site, ref: str, urls: tuple[str, ...]) -> dict[str, Any]:
    """Count the shards that each node owns. Of very many shards, evenly spaced ones are counted."""
    shards = {
        shard.digest: shard.size_bytes for split in site.repo.dataset(ref).values() for shard in split.table.shards()
    }
    stride = -(-len(shards) // _MAX_PLACED_SHARDS) or 1
    nodes = {url: {"shards": 0, "bytes": 0} for url in urls}
    counted = list(shards.items())[::stride]
    for digest, size_bytes in counted:
        owner = nodes[rank_nodes(digest, urls)[0]]
        owner["shards"] += 1
        owner["bytes"] += size_bytes
    return {"dataset": ref, "num_shards": len(shards), "num_counted": len(counted), "nodes": nodes}
