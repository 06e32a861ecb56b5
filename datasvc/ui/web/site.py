"""What the pages read: one repository and the nodes; and the commands that give the same answers."""

from __future__ import annotations

import shlex
import threading
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from datasvc.api import DataRepository
from datasvc.errors import DatasvcError
from datasvc.node.client import NodeClient
from datasvc.repository.store.redaction import redact_url
from datasvc.threads import map_in_threads
from datasvc.ui.settings import UiSettings
from datasvc.ui.thumbnails import ThumbnailCache
from datasvc.ui.web.split_cache import SplitCache
from datasvc.ui.web.unreadable import UnreadableVersions

_NODES_AT_ONCE = 16


class Site:
    """The sources of all pages. Several threads may use it at once.

    Args:
        settings: settings of the server.

    Attributes:
        settings: settings of the server.
        url: URL of the repository without secrets.
        unreadable: versions that listings have left out.
        splits: open splits of data sets.
    """

    def __init__(self, settings: UiSettings) -> None:
        self.settings = settings
        self.url = redact_url(settings.repository)
        self.unreadable = UnreadableVersions()
        self.splits = SplitCache()
        self._nodes = {url: NodeClient(url, token=settings.node_token) for url in settings.nodes}
        self._lock = threading.Lock()
        self._repo: DataRepository | None = None

    @property
    def repo(self) -> DataRepository:
        """The repository. Raise its errors until it can be opened for the first time."""
        # Opened at the first page, not at the start: a store that does not respond is shown as a page too.
        with self._lock:
            if self._repo is None:
                self._repo = DataRepository.open(self.settings.repository)
            return self._repo

    def node_statuses(self) -> dict[str, dict[str, Any]]:
        """Return the status document of each node by URL; of a node that fails, `{"error": message}`."""

        def read(url: str) -> dict[str, Any]:
            try:
                return self._nodes[url].status()
            except DatasvcError as error:
                return {"error": str(error)}

        return dict(zip(self._nodes, map_in_threads(read, self._nodes, _NODES_AT_ONCE), strict=True))

    @cached_property
    def thumbnails(self) -> ThumbnailCache:
        """The cache of thumbnails."""
        return ThumbnailCache(self.settings.thumbnails or Path.home() / ".cache" / "datasvc" / "thumbnails")

    def command(self, *words: str, options: Mapping[str, str | None] | None = None) -> str:
        """Return a command of `datasvc` on this repository, as text for a shell.

        Args:
            words: command and arguments, such as "models", "show" and a reference.
            options: options with their values, such as `{"--where": "label = 3"}`; None omits an option.
        """
        given = [word for name, value in (options or {}).items() if value is not None for word in (name, value)]
        return shlex.join(["datasvc", *words, *given, "--repo", self.url])

    def python(self, call: str, *arguments: Any, **options: Any) -> str:
        """Return a line of Python that calls a method of the opened repository, such as "datasets.describe"."""
        texts = [
            *map(repr, arguments),
            *(f"{name}={value!r}" for name, value in options.items() if value is not None),
        ]
        return f"datasvc.open({self.url!r}).{call}({', '.join(texts)})"
