"""The table of runs on the pages Runs and Home."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from datasvc.runs import RunSummary
from datasvc.ui.pages.problems import starved_share
from datasvc.ui.web.page import Query
from datasvc.ui.web.table_view import Column, TableView, view_table

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
