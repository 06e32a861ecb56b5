"""Reads log entries of models, for lineage and transfers. Each log is listed once, and each entry is read once."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Final

from datasvc.repository import Entry, Repository, Resolved

# Entries to read at once. Lineage goes from a version to its parent, usually the version before, so an entry is read
# together with those before it.
_BATCH: Final = 32


class EntryReader:
    """Reads the entries of models in a repository, and keeps each entry in memory as it was at its first read."""

    def __init__(self, repository: Repository) -> None:
        self._repository = repository
        self._numbers: dict[str, Mapping[int, None]] = {}
        self._entries: dict[str, dict[int, Entry]] = {}

    def numbers(self, model: str) -> Collection[int]:
        """Return the numbers, ascending, of all versions that existed at the first call for the model.

        Raises UnavailableError: the log cannot be listed.
        """
        if model not in self._numbers:
            # A dict is an ordered set here: callers iterate in order, and often test whether it contains a number.
            self._numbers[model] = dict.fromkeys(self._repository.versions("models", model).numbers())
        return self._numbers[model].keys()

    def entry(self, model: str, number: int) -> Entry:
        """Return the entry of a version. For errors see `Log.read`."""
        cached = self._entries.setdefault(model, {})
        if number not in cached:
            listed = list(self.numbers(model))
            stop = bisect_right(listed, number)
            # Add `number` itself: a version that was committed after the listing is not in `listed`.
            self._fill_cache(model, {*listed[max(0, stop - _BATCH) : stop], number})
        # A damaged entry is not in the cache: read it again, to raise its error.
        return cached[number] if number in cached else self._repository.entry(Resolved("models", model, number))

    def entries(self, model: str) -> list[Entry]:
        """Return all entries of a model, oldest first. For errors see `Log.read`."""
        self._fill_cache(model, self.numbers(model))
        return [self.entry(model, number) for number in self.numbers(model)]

    def content(self, model: str, number: int) -> Mapping[str, Any]:
        """Return the content of the entry of a version. For errors see `Log.read`."""
        return self.entry(model, number).content

    def _fill_cache(self, model: str, numbers: Iterable[int]) -> None:
        """Read those entries that are not in the cache yet. Damaged entries are left out."""
        cached = self._entries.setdefault(model, {})
        missing = [number for number in numbers if number not in cached]
        readable, _ = self._repository.versions("models", model).try_entries(missing)
        cached |= {entry.number: entry for entry in readable}
