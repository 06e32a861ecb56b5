"""Training runs, from their logs."""

from __future__ import annotations

from dataclasses import fields

from datasvc.runs import RunSummary, list_runs
from datasvc.ui.registry.records import RunFacts, RunsPage
from datasvc.ui.registry.route import cut_page, read_limit
from datasvc.ui.web.page import Parts, Query
from datasvc.ui.web.site import Site

_MAX_START = 100_000


def list_run_facts(site: Site, _: Parts, query: Query) -> RunsPage:
    """Return a page of the runs, newest first, or of those with `name`."""
    last = query.number("after", 0, high=_MAX_START) + read_limit(query) + 1
    runs, following = cut_page(list_runs(site.repo.repository, query.text("name"), last=last), query)
    return RunsPage(tuple(map(_describe, runs)), following)


def read_run_facts(site: Site, parts: Parts, _: Query) -> RunFacts:
    """Return one run."""
    return _describe(site.runs.read(site.repo.repository, parts["name"], parts["id"]).summary)


def _describe(run: RunSummary) -> RunFacts:
    return RunFacts(**{field.name: getattr(run, field.name) for field in fields(RunFacts)})
