"""The newest runs of the repository, which Home follows: read once for all of its readers."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Final

from datasvc.repository import Repository
from datasvc.runs import RunSummary, list_runs

MAX_RUNS: Final = 50
"""Number of runs that are read, to find live ones and problems."""
# Each reading takes a listing and a small file of each run. Requests to other stores than a folder cost money.
_MAX_AGE_LOCAL_S: Final = 1.0
_MAX_AGE_REMOTE_S: Final = 5.0


class RecentRuns:
    """The summaries of the newest runs. Several threads may use it at once."""

    def __init__(self) -> None:
        self._runs: Sequence[RunSummary] = ()
        self._read_s: float | None = None
        self._lock = threading.Lock()

    def read(self, repository: Repository) -> Sequence[RunSummary]:
        """Return the runs as of a moment ago, the newest first; for errors, see `list_runs`."""
        max_age_s = _MAX_AGE_LOCAL_S if repository.storage.is_local else _MAX_AGE_REMOTE_S
        with self._lock:
            if self._read_s is None or time.monotonic() - self._read_s > max_age_s:
                self._runs = list_runs(repository, last=MAX_RUNS)
                self._read_s = time.monotonic()
            return self._runs
