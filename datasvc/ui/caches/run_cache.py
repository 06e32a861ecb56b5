"""The logs of the runs that readers follow, read once for all of them."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from dataclasses import dataclass, field, replace
from typing import Final

from datasvc.repository import Repository
from datasvc.runs import RunHistory, follow_run, read_run

_MAX_RUNS: Final = 4  # of which each may take some megabytes
_MAX_AGE_S: Final = 0.25


@dataclass
class _FollowedRun:
    history: RunHistory | None = None
    read_s: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock)


class RunCache:
    """Logs of the last runs. Several threads may use it at once."""

    def __init__(self, max_age_s: float = _MAX_AGE_S) -> None:
        self._max_age_s = max_age_s
        self._runs: OrderedDict[tuple[str, str], _FollowedRun] = OrderedDict()
        self._lock = threading.Lock()

    def read(self, repository: Repository, name: str, run_id: str) -> RunHistory:
        """Return the log of a run as of a moment ago; for errors, see `read_run`.

        The parts of a log are read again only if it has new ones.
        """
        with self._lock:
            run = self._runs.setdefault((name, run_id), _FollowedRun())
            self._runs.move_to_end((name, run_id))
            while len(self._runs) > _MAX_RUNS:
                self._runs.popitem(last=False)
        with run.lock:
            if run.history is None or time.monotonic() - run.read_s > self._max_age_s:
                run.history = _read(repository, name, run_id, run.history)
                run.read_s = time.monotonic()
            return run.history


def _read(repository: Repository, name: str, run_id: str, old: RunHistory | None) -> RunHistory:
    if old is None:
        return read_run(repository, name, run_id)
    new = follow_run(repository, name, run_id, old.cursor)
    # Without new parts only the state may differ: a run that writes nothing is not responding after a time.
    return replace(old, summary=new.summary) if new.cursor == old.cursor else read_run(repository, name, run_id)
