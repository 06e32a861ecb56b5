"""Open splits, and their histograms, that pages share. Versions never change, so results stay valid."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Final, Generic, TypeVar

from datasvc.repository import Repository
from datasvc.shards.query.histogram import MAX_SHARDS, Histogram, histogram_of
from datasvc.shards.query.sample_reader import NumberedSamples
from datasvc.shards.versions.dataset import DatasetVersion, open_dataset

# The server aims at 300 MB of memory. The shard table of 100 million samples takes up to some 20 MB.
_MAX_VERSIONS: Final = 4
_MAX_BYTES_OF_SPLIT: Final = 16 << 20
_MAX_HISTOGRAMS: Final = 256


_T = TypeVar("_T")


class SplitCache:
    """Versions with their splits, and histograms, of the last pages. Several threads may use it at once."""

    def __init__(self) -> None:
        self._versions: RecentResults[DatasetVersion] = RecentResults(_MAX_VERSIONS)
        self._samples: RecentResults[NumberedSamples] = RecentResults(_MAX_VERSIONS)
        self._histograms: RecentResults[Histogram] = RecentResults(_MAX_HISTOGRAMS)

    def version(self, repository: Repository, ref: str) -> DatasetVersion:
        """Return the version that `ref` resolves to now. For errors, see `open_dataset`."""
        resolved = repository.resolve("datasets", ref)
        return self._versions.get(str(resolved), lambda: open_dataset(repository, str(resolved)))

    def samples(self, dataset: DatasetVersion, split: str) -> NumberedSamples:
        """Return the samples of a split. Raise NotFoundError if there is no such split."""
        chosen = dataset[split]
        return self._samples.get((chosen.dataset, split), lambda: NumberedSamples(chosen, _MAX_BYTES_OF_SPLIT))

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
        counted = self._histograms.get((chosen.digest, column, where, bins, max_shards), count)
        return replace(counted, version=chosen.dataset, split=split)


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
