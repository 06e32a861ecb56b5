"""Run logs: the events of training runs, in a few immutable files of the repository. See docs/how-to/runs.md."""

from datasvc.runs.facts import RunEvent
from datasvc.runs.history import RunHistory, RunSummary
from datasvc.runs.reader import follow_run, list_runs, read_run, resolve_run
from datasvc.runs.run_log import RunLog
from datasvc.runs.step_table import Series

__all__ = [
    "RunEvent",
    "RunHistory",
    "RunLog",
    "RunSummary",
    "Series",
    "follow_run",
    "list_runs",
    "read_run",
    "resolve_run",
]
