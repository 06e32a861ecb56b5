"""Runs: the list of training runs, and one run while it trains or after it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from datasvc.errors import ConfigError
from datasvc.ledger.audit import find_ledgers
from datasvc.ledger.signals import list_signals
from datasvc.runs import RunHistory, RunSummary, list_runs
from datasvc.runs.forecast import LossForecast
from datasvc.ui.pages.audit import audit_current_epoch, find_ledger_of
from datasvc.ui.pages.histogram_charts import CHART_WIDTH
from datasvc.ui.pages.problems import STARVED_SHARE, run_problems, starved_share
from datasvc.ui.web.links import run_link, runs_link
from datasvc.ui.web.live import PageState
from datasvc.ui.web.page import Crumb, Page, Panel, Parts, Problem, Query, RawResponse
from datasvc.ui.web.site import Site
from datasvc.ui.web.table_view import Column, TableView, view_table
from datasvc.views.run_charts import describe_left_out, line_charts, time_chart
from datasvc.views.run_words import (
    STEP_PARTS,
    RankComparison,
    as_mapping,
    as_number,
    facts,
    newest_event,
    newest_fact,
    rank_times,
    warnings,
)

_RUNS_PER_PAGE: Final = 100
_MAX_SORTED: Final = 1000  # runs whose logs are read to sort them
_MAX_EVENTS: Final = 100
_LIVE: Final = frozenset({"running", "not responding"})
_COLUMNS: Final = (
    Column("run", "name"),
    Column("state", "state"),
    Column("step", "step", "number"),
    Column("progress", "progress", "number", "%"),
    Column("loss", "loss", "number"),
    Column("waits, newest step", "waits", "number", "%"),
    Column("data"),
    Column("versions"),
    Column("ranks", "ranks", "number"),
    Column("started", "started", "time"),
)


def load_list(site: Site, parts: Parts, query: Query) -> Page | RawResponse:  # noqa: ARG001 - the signature of all pages
    """Return a page of the runs, newest first, or of those with `name`; those that go on come first.

    With `sort` in the address, all of the newest 1,000 runs are sorted by a column.
    """
    name, number, is_sorted = query.text("name"), query.number("page", 0, high=1000), query.text("sort") is not None
    first = 0 if is_sorted else number * _RUNS_PER_PAGE
    last, folder = _MAX_SORTED if is_sorted else first + _RUNS_PER_PAGE, site.settings.ledgers
    found = list_runs(site.repo.repository, name, last=last + 1)
    runs = found[first:last]
    # A page of runs in order is read without those of later pages, so that the newest ones are shown at once.
    in_order = sorted(runs, key=lambda run: run.state != "running")
    table = runs_table(in_order, query if is_sorted else Query({**query, "page": ""}), path=runs_link())
    shown = [row["run"] for row in table.rows]
    return Page(
        template="runs.html",
        title="Runs" if name is None else f"Runs: {name}",
        section="runs",
        crumbs=(Crumb("Runs", runs_link()), *([Crumb(name, runs_link(name=name))] if name else [])),
        problems=tuple(problem for run in shown for problem in run_problems(run)),
        panels={
            "runs": runs_panel(site, runs, name, last=last, skip=first),
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


def runs_table(runs: Sequence[RunSummary], query: Query, *, path: str, prefix: str = "") -> TableView:
    """Return the page of the table of runs that the address names; for arguments and errors, see `view_table`."""
    return view_table(list(map(_row, runs)), _COLUMNS, query, path=path, prefix=prefix)


def _row(run: RunSummary) -> dict[str, Any]:
    share, progress = starved_share(run.latest), _number(run.latest.get("progress"))
    return {
        "run": run,
        "name": run.ref,
        "state": run.state,
        "step": run.step,
        "progress": None if progress is None else 100 * progress,
        "loss": _number(run.latest.get("loss")),
        "waits": None if share is None else 100 * share,
        "ranks": run.world_size,
        "started": run.started_s,
    }


def _number(value: object) -> float | None:
    """Return a number of a log; None for NaN, which is a text there, and for anything else."""
    return value if isinstance(value, (int, float)) else None


def runs_panel(site: Site, runs: Sequence[RunSummary], name: str | None = None, *, last: int, skip: int = 0) -> Panel:
    """Return the panel of a list of runs: those of the newest `last` without the first `skip`."""
    options = {"--last": str(last), "--skip": str(skip) if skip else None}
    command = site.command("runs", "ls", *([name] if name else []), "--json", options=options)
    python = site.python("runs.ls", *([name] if name else []), last=last)
    return Panel([run.to_dict() for run in runs], command, f"{python}[{skip}:]" if skip else python)


def load(site: Site, parts: Parts, query: Query) -> Page | RawResponse:
    """Return one run."""
    history = site.runs.read(site.repo.repository, parts["name"], parts["id"])
    run, ranks = history.summary, rank_times(history)
    is_live = run.state in _LIVE
    folder = site.settings.ledgers
    ledger = find_ledger_of(folder, as_mapping(history.header.get("config")))
    current = audit_current_epoch(folder, ledger) if folder is not None and ledger is not None else None
    forecast, problems = None, _problems(history)
    try:
        if (target := query.decimal("target")) is not None:
            forecast = history.forecast(target)
    except ConfigError as error:
        problems.append(Problem(str(error), severity="warning"))
    expected = {} if forecast is None else {"forecast": _forecast_panel(site, run, forecast)}
    audited = {} if current is None or current.panel is None else {"ledger": current.panel}
    return Page(
        template="run.html",
        title=run.ref,
        section="runs",
        crumbs=(Crumb("Runs", runs_link()), Crumb(run.name, runs_link(name=run.name)), Crumb(run.ref, _link(run))),
        problems=tuple(problems),
        panels={
            "run": Panel(
                history.to_dict(),
                site.command("runs", "show", run.ref, "--json"),
                site.python("runs.read", run.ref),
            ),
            "signals": Panel(
                list_signals(site.repo.repository, run.ref),
                site.command("runs", "signal", run.ref, "--json"),
                site.python("runs.signals", run.ref),
            ),
            **audited,
            **expected,
        },
        view={
            "site": site,
            "run": run,
            "history": history,
            "facts": facts(history),
            "header": history.header,
            "config": as_mapping(history.header.get("config")),
            "diagnosis": newest_event(history, "diagnosis"),
            "starved": starved_share(run.latest),
            "ranks": ranks,
            "rank_table": None if ranks is None else _rank_table(ranks, query, _link(run)),
            "coverage": as_number(run.latest.get("coverage")),
            "current_epoch": current,
            "is_live": is_live,
            "progress": as_number(run.latest.get("progress")),
            "charts": line_charts(history, width=CHART_WIDTH),
            "left_out": describe_left_out(history),
            "target": query.text("target"),
            "forecast": forecast,
            "time_chart": time_chart(history, width=CHART_WIDTH),
            "evaluation": [event for event in history.events if event.event == "evaluation"][-_MAX_EVENTS:],
            "events": [event for event in history.events if event.event not in {"diagnosis", "ranks"}][-_MAX_EVENTS:],
            "events_link": f"/api{_link(run)}/events" if is_live else None,
        },
    )


def _forecast_panel(site: Site, run: RunSummary, forecast: LossForecast) -> Panel:
    target = repr(forecast.target)
    command = site.command("runs", "forecast", run.ref, "--json", last=[target])
    return Panel(forecast.to_dict(), command, f"{site.python('runs.read', run.ref)}.forecast({target})")


def state_of(site: Site, parts: Parts) -> PageState:
    """Return the state of the page of a run: another one with each new part of its log."""
    history = site.runs.read(site.repo.repository, parts["name"], parts["id"])
    state = history.summary.state
    return PageState(f"{history.cursor} {state}", is_over=state not in _LIVE)


def _link(run: RunSummary) -> str:
    return run_link(run.name, run.id)


def _rank_table(ranks: RankComparison, query: Query, path: str) -> TableView:
    """Return the page of the table of ranks that the address names; its times are in milliseconds."""
    times = [Column(_time_title(name), name, "number", "ms") for name in ranks.names]
    columns = [Column("rank", "rank", "number"), Column("host", "host"), Column("state"), *times]
    rows = [
        {
            "rank": rank,
            "host": host,
            "is_straggler": is_straggler,
            "times": values,
            **{
                name: None if value is None else 1000 * value for name, value in zip(ranks.names, values, strict=True)
            },
        }
        for rank, host, is_straggler, values in ranks.rows
    ]
    return view_table(rows, columns, query, path=path, prefix="ranks_")


def _time_title(name: str) -> str:
    known = {"own_s": "own time", "step_s": "whole step", **STEP_PARTS}
    return f"{known.get(name, name.removesuffix('_s').replace('_', ' '))}, ms"


def _problems(history: RunHistory) -> list[Problem]:
    """Return the problems of a run: those of its summary, of its events, and of its log."""
    run = history.summary
    # Not links: they would lead to this page. The events of all attempts say more than the summary's warnings.
    problems = [replace(problem, link=None) for problem in run_problems(run) if problem.severity == "error"]
    share = starved_share(run.latest)
    texts = [text for text in warnings(history) if not any(text in problem.text for problem in problems)]
    has_verdict = bool(newest_fact(history, "diagnosis", "verdict"))
    if not has_verdict and run.state == "running" and share is not None and share >= STARVED_SHARE:
        texts = [f"it waits {share:.0%} of the time for data; the program has not reported a diagnosis yet", *texts]
    if run.state not in _LIVE:
        # The log of a run that has ended says what happened, not what happens.
        texts = [f"while it ran: {text}" for text in texts]
    return [*problems, *(Problem(text, severity="warning") for text in texts), *map(Problem, history.problems)]
