"""`RecentResults`: keeps the results of a function that are used most, for as long as its owner lives."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

_T = TypeVar("_T")


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
