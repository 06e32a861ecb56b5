"""Cluster: the nodes, what their caches hold and fetch, and who serves which shards."""

from __future__ import annotations

import shlex
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain, pairwise
from typing import Any, Final

from datasvc.cache.peers.placement import count_shard_owners
from datasvc.drawing import ChartSeries, chart_table, format_quantity, line_chart, separate_charts
from datasvc.errors import DatasvcError, NotFoundError
from datasvc.ui.pages.histogram_charts import CHART_WIDTH
from datasvc.ui.pages.problems import node_problems
from datasvc.ui.web.links import cluster_link
from datasvc.ui.web.live import PageState
from datasvc.ui.web.node_monitor import NodeSample, NodeState, used_bytes
from datasvc.ui.web.page import Crumb, Page, Panel, Parts, Problem, Query, RawResponse
from datasvc.ui.web.site import Site
from datasvc.ui.web.table_view import Column, view_table

_MAX_DRAWN: Final = 8  # nodes with a chart of their own
_MAX_ROWS: Final = 100
# Counter, title and colour; the colours are those of the Planner.
_RATES: Final = (
    ("origin_bytes", "from the origin", "c1"),
    ("peer_bytes", "from peers", "c0"),
    ("evicted_bytes", "evicted", "c5"),
)
_CACHES: Final = "c2"
_NODE_COLUMNS: Final = (
    Column("node", "url"),
    Column("state"),
    Column("cache", "used_bytes", "number", "bytes"),
    Column("objects", "objects", "number"),
    Column("hits", "hit_share", "number"),
    Column("from the origin", "origin_bytes", "number", "bytes"),
    Column("from peers", "peer_bytes", "number", "bytes"),
    Column("evicted", "evicted_bytes", "number", "bytes"),
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
        placement = _placement_panel(site, all_states, query.text("data"))
    except DatasvcError as error:
        # The nodes are shown also if the repository does not respond.
        placement = None
        problems.append(Problem(f"the owners of shards are not known: {error}"))
    if placement is not None:
        panels["placement"] = placement
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
            "nodes": view_table(
                [_node_row(state) for state in states],
                _NODE_COLUMNS,
                query,
                path=cluster_link(node=chosen),
                prefix="nodes_",
            ),
            "datasets": site.repo.datasets.names()[:_MAX_ROWS] if placement is not None else [],
            "known": {state.url for state in all_states},
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
        return {"state": state, "url": state.url}
    cache = state.status["cache"]
    last = state.samples[-2:]
    rates = [_rate(last[0], last[1], name) if len(last) > 1 else None for name, _, _ in _RATES]
    totals = {name: cache["counters"].get(name, 0) for name, _, _ in _RATES}
    return {
        "state": state,
        "url": state.url,
        "objects": cache["num_resident"],
        **totals,
        "cache": cache,
        "used_bytes": used_bytes(cache),
        "hit_share": _hit_share(cache["counters"]),
        "totals": list(zip(totals.values(), rates, strict=True)),
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
    """Return the charts of the history in groups, each with a title and a table; none before there are two samples.

    One node has its traffic in one chart; of several nodes, each has a chart of its own, with the same scales.
    """
    followed = [state for state in states if len(state.samples) > 1]
    if not followed:
        return []
    now_s = time.time()
    rates = [
        [_line(title, _rates_over_time(state.samples, name), now_s, colour) for state in followed]
        for name, title, colour in _RATES
    ]
    hits = [_line("hits", _hits_over_time(state.samples), now_s, _CACHES) for state in followed]
    used = [
        _line("in the cache", [(sample.time_s, sample.used_bytes) for sample in state.samples], now_s, _CACHES)
        for state in followed
    ]
    if len(followed) == 1:
        return [
            _group("Traffic", [line for (line,) in rates], "bytes/s"),
            _group("Hits", hits, "% of the requests"),
            _group("In the cache", used, "bytes"),
        ]
    urls = [state.url for state in followed]
    groups = [(title.capitalize(), lines, "bytes/s") for (_, title, _), lines in zip(_RATES, rates, strict=True)] + [
        ("Hits", hits, "% of the requests"),
        ("In the caches", used, "bytes"),
    ]
    return [
        _group(title, [replace(line, name=url) for line, url in zip(lines, urls, strict=True)], unit, is_one=False)
        for title, lines, unit in groups
    ]


def _rates_over_time(samples: Sequence[NodeSample], name: str) -> list[tuple[float, float]]:
    return [(later.time_s, _rate(earlier, later, name)) for earlier, later in pairwise(samples)]


def _hits_over_time(samples: Sequence[NodeSample]) -> list[tuple[float, float | None]]:
    points: list[tuple[float, float | None]] = []
    for earlier, later in pairwise(samples):
        hits, misses = (max(0, later.counter(name) - earlier.counter(name)) for name in ("hits", "misses"))
        points.append((later.time_s, 100 * hits / (hits + misses) if hits + misses else None))
    return points


def _line(name: str, points: Sequence[tuple[float, float | None]], now_s: float, colour: str) -> ChartSeries:
    return ChartSeries(name, [(time_s - now_s) / 60 for time_s, _ in points], [value for _, value in points], colour)


def _group(title: str, series: Sequence[ChartSeries], unit: str, *, is_one: bool = True) -> dict[str, Any]:
    """Return one chart of several lines, or a chart for each of the first 8 lines, and the numbers as a table."""
    shown = series[:_MAX_DRAWN]
    text = title if len(shown) == len(series) else f"{title}, first {len(shown)} of {len(series)} nodes"
    axis: dict[str, Any] = {"unit": unit, "x_label": "minutes ago", "x_text": _past_text}
    size: dict[str, Any] = {"width": CHART_WIDTH, "height": 200, "from_zero": True}
    pictures = [line_chart(shown, title=text, **size, **axis)] if is_one else separate_charts(shown, **size, **axis)
    return {
        "title": text,
        "is_one": is_one,
        "pictures": pictures,
        "table": chart_table(shown, title=text, max_rows=100, **axis),
    }


def _past_text(minutes: float) -> str:
    return format_quantity(abs(round(minutes, 2)))


def _placement_panel(site: Site, states: Sequence[NodeState], ref: str | None) -> Panel | None:
    """Return how many shards of a data-set version each node owns and serves; None if there is nothing to share."""
    if len(states) < 2:
        return None
    ref = ref or site.first_dataset()
    if ref is None:
        return None
    version = str(site.repo.datasets.resolve(ref))
    urls = tuple(state.url for state in states)
    failed = tuple(state.url for state in states if state.error is not None)
    options = [("--node", url) for url in urls] + [("--failed", url) for url in failed]
    repository = f"datasvc.open({site.url!r}).repository"
    call = f"count_shard_owners({repository}, {version!r}, {list(urls)!r}, failed={list(failed)!r})"
    return Panel(
        site.owners.get(
            (version, urls, failed),
            lambda: count_shard_owners(site.repo.repository, version, urls, failed=failed),
        ),
        site.command("cache", "placement", version, *chain.from_iterable(options), "--json"),
        f"from datasvc.cache.peers.placement import count_shard_owners\n{call}",
    )
