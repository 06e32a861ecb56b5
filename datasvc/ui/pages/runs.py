"""Runs: the list of training runs, and one run while it trains or after it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from aiohttp import web

from datasvc.errors import DatasvcError, NotFoundError
from datasvc.ledger.folders import find_ledgers
from datasvc.printable import count_text
from datasvc.runs import RunEvent, RunHistory, RunSummary, list_runs
from datasvc.ui.pages.audit import find_ledger_of
from datasvc.ui.pages.charts.run_charts import describe_left_out, line_charts, time_chart
from datasvc.ui.pages.problems import STARVED_SHARE, run_problems, starved_share
from datasvc.ui.pages.run_table import runs_table
from datasvc.ui.web.changes import stream_events
from datasvc.ui.web.links import run_link, runs_link
from datasvc.ui.web.page import Crumb, Page, Panel, Parts, Problem, Query, RawResponse
from datasvc.ui.web.site import Site

_RUNS_PER_PAGE: Final = 100
_MAX_SORTED: Final = 1000  # runs whose logs are read to sort them
_MAX_EVENTS: Final = 100
# A log has a new part each second at most: with this pause, a reader sees a point within two seconds.
_PAUSE_S: Final = 0.5
_COLUMNS: Final = frozenset({"rank", "num_ranks", "stragglers", "host", "step"})


def load_list(site: Site, parts: Parts, query: Query) -> Page | RawResponse:  # noqa: ARG001 - the signature of all pages
    """Return a page of the runs, newest first, or of those with `name`; those that go on come first.

    With `sort` in the address, all of the newest 1,000 runs are sorted by a column.
    """
    name, number, is_sorted = query.text("name"), query.number("page", 0, high=1000), query.text("sort") is not None
    first = 0 if is_sorted else number * _RUNS_PER_PAGE
    last, folder = _MAX_SORTED if is_sorted else first + _RUNS_PER_PAGE, site.settings.ledgers
    found = list_runs(site.repo.repository, name, last=last + 1)
    runs = found[first:last]
    if is_sorted:
        table = runs_table(runs, query, path=runs_link())
    else:
        # A page is read without the runs of later ones, so that the newest ones are shown at once.
        in_order = sorted(runs, key=lambda run: run.state != "running")
        table = runs_table(in_order, Query({**query, "page": ""}), path=runs_link())
    shown = [row["run"] for row in table.rows]
    return Page(
        template="runs.html",
        title="Runs" if name is None else f"Runs: {name}",
        section="runs",
        crumbs=(Crumb("Runs", runs_link()), *([Crumb(name, runs_link(name=name))] if name else [])),
        problems=tuple(problem for run in shown for problem in run_problems(run)),
        panels={
            "runs": runs_panel(site, runs, name, last=last, is_first=not first),
        },
        view={
            "site": site,
            "name": name,
            "ledgers": find_ledgers(folder) if folder and not name and not number else [],
            "ledger_folder": folder,
            "runs_table": table,
            "num_running": sum(run.state == "running" for run in shown),
            "newer": runs_link(name=name, page=number - 1) if first else None,
            "older": runs_link(name=name, page=number + 1) if len(found) > last and not is_sorted else None,
            "num_sorted": len(runs) if is_sorted and len(found) > last else None,
        },
    )


def runs_panel(
    site: Site, runs: Sequence[RunSummary], name: str | None = None, *, last: int, is_first: bool = True
) -> Panel:
    """Return the panel of a list of runs; if it is not the first page, it has no command: that prints all pages."""
    values = [run.to_dict() for run in runs]
    if not is_first:
        return Panel(values)
    command = site.command("runs", "ls", *([name] if name else []), "--json", options={"--last": str(last)})
    return Panel(values, command, site.python("runs.ls", *([name] if name else []), last=last))


def load(site: Site, parts: Parts, query: Query) -> Page | RawResponse:  # noqa: ARG001 - the signature of all pages
    """Return one run."""
    history = site.runs.read(site.repo.repository, parts["name"], parts["id"])
    run = history.summary
    diagnosis = _newest(history.events, "diagnosis")
    ranks = _newest(history.events, "ranks")
    return Page(
        template="run.html",
        title=run.ref,
        section="runs",
        crumbs=(Crumb("Runs", runs_link()), Crumb(run.name, runs_link(name=run.name)), Crumb(run.ref, _link(run))),
        problems=(*_problems(history, diagnosis, ranks), *map(Problem, history.problems)),
        panels={
            "run": Panel(
                history.to_dict(),
                site.command("runs", "show", run.ref, "--json"),
                site.python("runs.read", run.ref),
            )
        },
        view={
            "site": site,
            "run": run,
            "history": history,
            "header": history.header,
            "config": _mapping(history.header.get("config")),
            "diagnosis": diagnosis,
            "starved": starved_share(run.latest),
            "ranks": _rank_table(ranks),
            "coverage": _number(run.latest.get("coverage")),
            "ledger": find_ledger_of(site.settings.ledgers, _mapping(history.header.get("config"))),
            "progress": _number(run.latest.get("progress")),
            "charts": line_charts(history),
            "left_out": describe_left_out(history),
            "time_chart": time_chart(history),
            "evaluation": [event for event in history.events if event.event == "evaluation"][-_MAX_EVENTS:],
            "events": [event for event in history.events if event.event not in {"diagnosis", "ranks"}][-_MAX_EVENTS:],
            "events_link": f"/api{_link(run)}/events" if run.state in {"running", "not responding"} else None,
        },
    )


async def stream_changes(site: Site, request: web.Request) -> web.StreamResponse:
    """Send an event whenever the log of a run has new parts or another state; end when the run has ended."""
    name, run_id = request.match_info["name"], request.match_info["id"]
    repository = await asyncio.to_thread(lambda: site.repo.repository)
    history = await asyncio.to_thread(site.runs.read, repository, name, run_id)

    async def changes(cursor: str, state: str) -> AsyncIterator[dict[str, Any]]:
        # The first event tells a page that was loaded before the stream began to load again.
        yield {"cursor": cursor, "state": state}
        while state in {"running", "not responding"}:
            await asyncio.sleep(_PAUSE_S)
            try:
                new = await asyncio.to_thread(site.runs.read, repository, name, run_id)
            except NotFoundError:
                return  # `gc` has deleted the log
            except DatasvcError:
                continue  # the store may respond again; until then the page keeps its values
            if (new.cursor, new.summary.state) != (cursor, state):
                cursor, state = new.cursor, new.summary.state
                yield {"cursor": cursor, "state": state}

    return await stream_events(request, changes(history.cursor, history.summary.state))


def _link(run: RunSummary) -> str:
    return run_link(run.name, run.id)


def _newest(events: Sequence[RunEvent], name: str) -> RunEvent | None:
    return next((event for event in reversed(events) if event.event == name), None)


def _problems(history: RunHistory, diagnosis: RunEvent | None, ranks: RunEvent | None) -> list[Problem]:
    """Return the problems of a run: those of its summary, its diagnosis and its stragglers."""
    run = history.summary
    verdict = "" if diagnosis is None else str(diagnosis.facts.get("verdict", ""))
    # Not links: they would lead to this page. The events of all attempts say more than the summary's warnings.
    problems = [replace(problem, link=None) for problem in run_problems(run) if problem.severity == "error"]
    share = starved_share(run.latest)
    if verdict.startswith("starved"):
        problems.append(Problem(verdict, severity="warning"))
    elif not verdict and run.state == "running" and share is not None and share >= STARVED_SHARE:
        text = f"it waits {share:.0%} of the time for data; the program has not reported a diagnosis yet"
        problems.append(Problem(text, severity="warning"))
    stragglers = [] if ranks is None else _list(ranks.facts.get("stragglers"))
    warnings = []
    if stragglers:
        listed = ", ".join(map(str, stragglers[:8])) + (" and more" if len(stragglers) > 8 else "")
        warnings.append(f"the other ranks wait for rank {listed}; the table of ranks has its host")
    counts = Counter(event.event for event in history.events)
    if counts["stall"]:
        warnings.append(f"{count_text(counts['stall'], 'step')} waited a second or longer for data")
    if counts["failed"]:
        warnings.append(f"{count_text(counts['failed'], 'checkpoint')} failed; the events have the errors")
    return [*problems, *(Problem(text, severity="warning") for text in warnings)]


def _rank_table(event: RunEvent | None) -> dict[str, Any] | None:
    """Return the newest comparison of the ranks as names of times and rows; None if there is none."""
    if event is None:
        return None
    facts = event.facts
    ranks = _list(facts.get("rank"))
    names = [name for name, values in facts.items() if name not in _COLUMNS and len(_list(values)) == len(ranks)]
    names.sort(key=lambda name: name != "own_s")
    hosts = _list(facts.get("host")) or [None] * len(ranks)
    stragglers = set(map(str, _list(facts.get("stragglers"))))
    columns = [_list(facts[name]) for name in names]
    rows = [
        (rank, host, str(rank) in stragglers, [_number(column[row]) for column in columns])
        for row, (rank, host) in enumerate(zip(ranks, hosts, strict=False))
    ]
    rows.sort(key=lambda row: not row[2])
    num_ranks = facts.get("num_ranks")
    num_ranks = num_ranks if isinstance(num_ranks, int) else len(ranks)
    return {"names": names, "rows": rows, "step": facts.get("step"), "num_ranks": num_ranks}


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _number(value: object) -> float | None:
    """Return a number of a log, in which any program may have written anything."""
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None
