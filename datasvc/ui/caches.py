"""What pages have read or rendered, kept in memory for all readers of one server; each cache is bounded."""

from __future__ import annotations

import threading
import time
import zlib
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Generic, TypeVar

from datasvc.errors import ConfigError, UnavailableError
from datasvc.models.registry.diff import ModelDifference
from datasvc.repository import Repository
from datasvc.repository.logs.redactions import redaction_log
from datasvc.repository.logs.references import split_selection
from datasvc.repository.separate_process import call_in_process
from datasvc.runs import RunHistory, RunSummary, follow_run, list_runs, read_run
from datasvc.shards.query.histogram import MAX_SHARDS, Histogram, histogram_of
from datasvc.shards.query.sample_reader import NumberedSamples
from datasvc.shards.versions.dataset import DatasetVersion, Split, open_dataset
from datasvc.shards.views.reference import ViewedDataset, is_digests

# The server aims at 300 MB of memory. The shard table of 100 million samples takes up to some 20 MB.
_MAX_VERSIONS: Final = 4
_MAX_BYTES_OF_SPLIT: Final = 16 << 20
_MAX_HISTOGRAMS: Final = 256
_T = TypeVar("_T")
_MAX_KEPT_BYTES: Final = 16 << 20
_MAX_KEPT: Final = 8
_PATIENCE_S: Final = 4.0  # less than that of a page before it is shown as late
_MAX_FOLLOWED: Final = 4  # runs, of which each may take some megabytes
_MAX_AGE_S: Final = 0.25
MAX_RUNS: Final = 50
"""Number of runs that are read, to find live ones and problems."""
# Each reading takes a listing and a small file of each run. Requests to other stores than a folder cost money.
_MAX_AGE_LOCAL_S: Final = 1.0
_MAX_AGE_REMOTE_S: Final = 5.0


class RecentResults(Generic[_T]):
    """The last used results of a function by key. Several threads may use it at once.

    Args:
        max_results: number of results that are kept.
    """

    def __init__(self, max_results: int) -> None:
        self._max_results = max_results
        self._results: OrderedDict[Hashable, _T] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Hashable, make: Callable[[], _T]) -> _T:
        """Return the result of `key`; call `make` for it if it is not kept."""
        with self._lock:
            if key in self._results:
                self._results.move_to_end(key)
                return self._results[key]
        # Made without the lock: a slow result does not delay the others.
        result = make()
        with self._lock:
            self._results[key] = result
            while len(self._results) > self._max_results:
                self._results.popitem(last=False)
        return result


class SplitCache:
    """Versions with their splits, and histograms, of the last pages. Several threads may use it at once.

    What was read before a purge is not used after it, in a remote repository at the latest some seconds after it.
    """

    def __init__(self) -> None:
        self._read_redactions_s: float | None = None
        self._versions: RecentResults[DatasetVersion] = RecentResults(_MAX_VERSIONS)
        self._samples: RecentResults[NumberedSamples] = RecentResults(_MAX_VERSIONS)
        self._histograms: RecentResults[Histogram] = RecentResults(_MAX_HISTOGRAMS)

    def version(self, repository: Repository, ref: str) -> DatasetVersion:
        """Return the version that `ref` resolves to now, or a view of it. For errors, see `open_dataset`."""
        reference, selection = split_selection(ref)
        if selection is not None and not is_digests(selection):
            opened = open_dataset(repository, ref)
            if isinstance(opened, ViewedDataset) and not opened.is_stored:
                # Each request would evaluate the condition, also that which is the name of a column.
                raise ConfigError(
                    f"{ref[:200]!r}: a page opens views by name; give a condition as where=, or name it"
                )
            return opened
        resolved = repository.resolve("datasets", reference)
        exact = str(resolved) if selection is None else f"{resolved}[{selection}]"
        return self._versions.get((exact, self.last_redaction(repository)), lambda: open_dataset(repository, exact))

    def last_redaction(self, repository: Repository) -> int:
        """Return the number of the newest entry of the log of redactions, as of a moment ago."""
        max_age_s = 0.0 if repository.storage.is_local else _MAX_AGE_REMOTE_S
        log = redaction_log(repository.objects)
        if self._read_redactions_s is None or time.monotonic() - self._read_redactions_s >= max_age_s:
            log.read()
            self._read_redactions_s = time.monotonic()
        return log.known.head

    def samples(self, dataset: DatasetVersion, split: str) -> NumberedSamples:
        """Return the samples of a split. Raise NotFoundError if there is no such split."""
        chosen = dataset[split]
        return self._samples.get(
            (*_name(chosen), chosen.dataset), lambda: NumberedSamples(chosen, _MAX_BYTES_OF_SPLIT)
        )

    def histogram(
        self,
        dataset: DatasetVersion,
        split: str,
        column: str,
        where: str | None,
        *,
        bins: int = 30,
        max_shards: int = MAX_SHARDS,
    ) -> Histogram:
        """Return the histogram of a column; for arguments and errors, see `histogram_of`."""
        chosen = dataset[split]

        def count() -> Histogram:
            return histogram_of(chosen, column, bins=bins, where=where, max_shards=max_shards)

        # Versions whose split has the same shard table share the result.
        counted = self._histograms.get((*_name(chosen), column, where, bins, max_shards), count)
        return replace(counted, version=chosen.dataset, split=split)


def _name(split: Split) -> tuple[Hashable, ...]:
    """Return what names the samples of a split: another value after a purge."""
    return split.digest, split.name, redaction_log(split.repository.objects).known.head


class KeptPages:
    """HTML of pages by address, compressed; the least recently shown ones are dropped. Thread-safe.

    Args:
        max_bytes: size of all compressed pages together.
    """

    def __init__(self, max_bytes: int = _MAX_KEPT_BYTES) -> None:
        self._max_bytes = max_bytes
        self._pages: OrderedDict[str, tuple[bytes, float]] = OrderedDict()
        self._num_bytes = 0
        self._lock = threading.Lock()

    def put(self, address: str, html: str) -> None:
        """Keep a page that was made now."""
        content = zlib.compress(html.encode(), 1)
        with self._lock:
            old, _ = self._pages.pop(address, (b"", 0.0))
            self._pages[address] = content, time.time()
            self._num_bytes += len(content) - len(old)
            while self._num_bytes > self._max_bytes:
                _, (dropped, _) = self._pages.popitem(last=False)
                self._num_bytes -= len(dropped)

    def get(self, address: str) -> tuple[str, float] | None:
        """Return the HTML of a page, and its age in seconds; None if it is not kept."""
        with self._lock:
            kept = self._pages.get(address)
        return None if kept is None else (zlib.decompress(kept[0]).decode(), time.time() - kept[1])


class SeparateResults(Generic[_T]):
    """The last results of a function that runs in a process of its own, one at a time.

    Each takes a processor and hundreds of megabytes.

    Args:
        url: URL of the repository.
        function: the function, see `call_in_process`.
    """

    def __init__(self, url: str, function: str) -> None:
        self._url = url
        self._function = function
        self._kept: RecentResults[_T] = RecentResults(_MAX_KEPT)
        self._running = threading.Lock()

    def get(self, *arguments: Hashable, what: str, command: str, at: Hashable = None) -> _T:
        """Return the result for these arguments.

        Args:
            arguments: of the function.
            what: what it finds, for the message that others wait.
            command: see `call_in_process`.
            at: state of the repository, whose results are not those of another one.

        Raises:
            UnavailableError: another result is computed.
            DatasvcError: see `call_in_process`.
        """
        key = (arguments, at)

        def run() -> _T:
            result: _T = call_in_process(self._url, self._function, *arguments, command=command)
            return result

        def wait_and_run() -> _T:
            if not self._running.acquire(timeout=_PATIENCE_S):
                raise UnavailableError(
                    f"{what} is not ready yet: another one is computed, and one at a time; load the page again later"
                )
            try:
                return self._kept.get(key, run)  # another request may have made it in the meantime
            finally:
                self._running.release()

        return self._kept.get(key, wait_and_run)


class MeasuredChanges:
    """The last comparisons of model versions, with the change of each tensor.

    Args:
        url: URL of the repository.
    """

    def __init__(self, url: str) -> None:
        self._results: SeparateResults[ModelDifference] = SeparateResults(url, "datasvc.models.registry.diff:diff")

    def diff(self, a: str, b: str) -> ModelDifference:
        """Compare two versions, which are resolved: their tensors never change. For errors, see `SeparateResults`."""
        what = f"the change of each layer from {a} to {b}"
        return self._results.get(a, b, what=what, command=f"datasvc models diff {a} {b}")


@dataclass
class _FollowedRun:
    history: RunHistory | None = None
    read_s: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock)


class RunCache:
    """Logs of the last runs. Several threads may use it at once."""

    def __init__(self, max_age_s: float = _MAX_AGE_S) -> None:
        self._max_age_s = max_age_s
        self._runs: RecentResults[_FollowedRun] = RecentResults(_MAX_FOLLOWED)

    def read(self, repository: Repository, name: str, run_id: str) -> RunHistory:
        """Return the log of a run as of a moment ago; for errors, see `read_run`.

        The parts of a log are read again only if it has new ones.
        """
        run = self._runs.get((name, run_id), _FollowedRun)
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
