"""One order of batches, handed over by two loaders in turn: one that works ahead, and one that does not."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from datasvc.loaders.core.loader import Loader


class LoadersInTurn:
    """Yields batches, epoch after epoch; `turn_to` says who loads them from here on.

    Whoever comes next goes on where the other stopped. So the shards are as new to the one as to the other, and what
    they cost can be compared; and as only one of them is open, a cache needs room for one window.

    Args:
        at_call: loader that prefetches nothing; it begins.
        ahead: of the same order, prefetches.
    """

    def __init__(self, at_call: Loader[Any], ahead: Loader[Any]) -> None:
        self._at_call, self._ahead = at_call, ahead
        self._current = at_call
        self._batches = _for_ever(at_call)

    @property
    def current(self) -> Loader[Any]:
        """Who loads now."""
        return self._current

    def turn_to(self, *, ahead: bool) -> None:
        """Choose the loader; batches handed over until now are no longer valid if it is another."""
        wanted = self._ahead if ahead else self._at_call
        if wanted is self._current:
            return
        self._batches.close()
        self._current.close()
        wanted.load_state_dict(self._current.state_dict())
        self._current, self._batches = wanted, _for_ever(wanted)

    def __next__(self) -> Any:
        """Return the next batch."""
        return next(self._batches)

    def close(self) -> None:
        """Let go of everything."""
        self._batches.close()
        self._current.close()


def _for_ever(loader: Loader[Any]) -> Generator[Any, None, None]:
    while True:
        yield from loader
