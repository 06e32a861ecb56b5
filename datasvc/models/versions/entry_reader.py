"""Reads entries of models along their ancestry: each log listed once, each entry read once, neighbours together."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from typing import Any, Final

from datasvc.repository import Entry, Repository

# The versions of a run continue each other: whoever asks for one will ask for those before it.
_BATCH: Final = 32


class EntryReader:
    """Entries of the models of a repository, as they were when each was first asked for.

    Args:
        repository: where they are.
    """

    def __init__(self, repository: Repository) -> None:
        self._repository = repository
        self._numbers: dict[str, Mapping[int, int]] = {}
        self._entries: dict[str, dict[int, Entry]] = {}

    def numbers(self, model: str) -> Mapping[int, int]:
        """Return the versions of a model, ascending, each with its place in the log. Raises UnavailableError."""
        if model not in self._numbers:
            listed = self._repository.versions("models", model).numbers()
            self._numbers[model] = {number: place for place, number in enumerate(listed)}
        return self._numbers[model]

    def entry(self, model: str, number: int) -> Entry:
        """Return the entry of a version. Raises as `Log.read`."""
        known = self._entries.setdefault(model, {})
        if number not in known:
            listed = list(self.numbers(model))
            stop = bisect_right(listed, number)
            # One that came since the log was listed stands alone.
            self._read(model, {*listed[max(0, stop - _BATCH) : stop], number})
        return known[number]

    def entries(self, model: str) -> list[Entry]:
        """Return all entries of a model, oldest first. Raises as `Log.read`."""
        listed = list(self.numbers(model))
        self._read(model, listed)
        return [self._entries[model][number] for number in listed]

    def content(self, model: str, number: int) -> Mapping[str, Any]:
        """Return what `entry` says. Raises as `Log.read`."""
        return self.entry(model, number).content

    def _read(self, model: str, numbers: Iterable[int]) -> None:
        known = self._entries.setdefault(model, {})
        missing = [number for number in numbers if number not in known]
        known |= {each.number: each for each in self._repository.versions("models", model).entries(missing)}
