"""What the pages read: one repository and the nodes; and the commands that give the same answers."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

from datasvc.api import DataRepository
from datasvc.models.provenance.evaluated import EvaluationOverlap
from datasvc.repository import Repository
from datasvc.repository.store.redaction import redact_url
from datasvc.shards.images.thumbnail_cache import DEFAULT_FOLDER, ThumbnailCache
from datasvc.ui.caches import MeasuredChanges, RecentResults, RecentRuns, RunCache, SeparateResults, SplitCache
from datasvc.ui.settings import UiSettings
from datasvc.ui.web.node_monitor import NodeMonitor
from datasvc.ui.web.page import Page, Parts, Query, RawResponse
from datasvc.ui.web.seen_faults import SeenFaults
from datasvc.views.replayed import ReplaySheet


class Site:
    """The sources of all pages. Several threads may use it at once.

    Args:
        settings: settings of the server.

    Attributes:
        settings: settings of the server.
        url: URL of the repository without secrets.
        started_s: when the server was started, in seconds since 1970.
        splits: open splits of data sets.
        runs: logs of the runs that readers follow.
        recent_runs: the newest runs, which Home follows.
        changes: comparisons of model versions with the change of each tensor.
        batches: replayed batches.
        overlaps: evaluation samples in the training data of model versions, see `count_evaluated`.
        owners: shards that each node owns, by version of a data set, URLs of the nodes, and those that fail.
        faults: corrupt and missing objects that pages have met.
        nodes: status and history of the nodes.
    """

    def __init__(self, settings: UiSettings) -> None:
        self.settings = settings
        self.url = redact_url(settings.repository)
        self.started_s = time.time()
        self.splits = SplitCache()
        self.owners: RecentResults[dict[str, Any]] = RecentResults(32)
        self.faults = SeenFaults()
        self.runs = RunCache()
        self.recent_runs = RecentRuns()
        self.changes = MeasuredChanges(settings.repository)
        self.batches: SeparateResults[ReplaySheet] = SeparateResults(
            settings.repository, "datasvc.views.replayed:make_sheet"
        )
        self.overlaps: SeparateResults[tuple[EvaluationOverlap, dict[str, tuple[int, int]]]] = SeparateResults(
            settings.repository, "datasvc.models.provenance.evaluated:count_evaluated"
        )
        self.nodes = NodeMonitor(settings.nodes, token=settings.node_token)
        self._repo: DataRepository | None = None

    @property
    def repo(self) -> DataRepository:
        """The repository. Raise its errors until it can be opened for the first time."""
        # Opened at the first page, not at the start: a store that does not respond is shown as a page too. Without a
        # lock: requests to such a store would wait for it one after the other. Two that open it at once do no harm.
        repo = self._repo
        if repo is None:
            # Read-only: no page may change the repository, not even an index that is derived from it.
            repo = self._repo = DataRepository(Repository.open(self.settings.repository, read_only=True))
        return repo

    @cached_property
    def thumbnails(self) -> ThumbnailCache:
        """The cache of thumbnails."""
        return ThumbnailCache(self.settings.thumbnails or DEFAULT_FOLDER)

    def first_dataset(self) -> str | None:
        """Return the name of the first data set of which not all versions are removed; None if there is none."""
        repository = self.repo.repository
        return next(
            (name for name in repository.names("datasets") if repository.state("datasets", name).living), None
        )

    def command(self, *words: str, options: Mapping[str, str | None] | None = None, last: Sequence[str] = ()) -> str:
        """Return a command of `datasvc` on this repository, as text for a shell.

        Args:
            words: command and arguments, such as "models", "show" and a reference.
            options: options with their values, such as `{"--where": "label = 3"}`; None omits an option.
            last: arguments after `words`, which may begin with "-".
        """
        given = [word for name, value in (options or {}).items() if value is not None for word in (name, value)]
        if any(word.startswith("-") for word in last):
            return shlex.join(["datasvc", *words, *given, "--repo", self.url, "--", *last])
        return shlex.join(["datasvc", *words, *last, *given, "--repo", self.url])

    def python(self, call: str, *arguments: Any, **options: Any) -> str:
        """Return a line of Python that calls a method of the opened repository, such as "datasets.describe"."""
        texts = [
            *map(repr, arguments),
            *(f"{name}={value!r}" for name, value in options.items() if value is not None),
        ]
        return f"datasvc.open({self.url!r}).{call}({', '.join(texts)})"


Load = Callable[[Site, Parts, Query], Page | RawResponse]
"""Returns a page, or another content. It is called in a thread, and several calls may run at the same time."""
