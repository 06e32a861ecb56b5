"""Serves one order of batches from two loaders in turn: one that prefetches, and one that does not."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from datasvc.loaders.core.loader import Loader


class LoadersInTurn:
    """Yields batches over endless epochs; `turn_to` selects the loader.

    The selected loader continues at the position of the other one. Both therefore read shards that neither has read
    before, and their costs can be compared. Only one loader is open at a time, so a cache needs one window.

    Args:
        at_call: loader without prefetching; selected at first.
        ahead: loader of the same order, with prefetching.
    """

    def __init__(self, at_call: Loader[Any], ahead: Loader[Any]) -> None:
        self._at_call, self._ahead = at_call, ahead
        self._current = at_call
        self._batches = _endless_batches(at_call)

    @property
    def current(self) -> Loader[Any]:
        """The selected loader."""
        return self._current

    def turn_to(self, *, ahead: bool) -> None:
        """Select a loader; if it is another one, earlier batches are no longer valid."""
        selected = self._ahead if ahead else self._at_call
        if selected is self._current:
            return
        self._batches.close()
        self._current.close()
        selected.load_state_dict(self._current.state_dict())
        self._current, self._batches = selected, _endless_batches(selected)

    def __next__(self) -> Any:
        """Return the next batch."""
        return next(self._batches)

    def close(self) -> None:
        """Close the selected loader."""
        self._batches.close()
        self._current.close()


def _endless_batches(loader: Loader[Any]) -> Generator[Any, None, None]:
    while True:
        yield from loader
