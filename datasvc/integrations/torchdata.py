"""torchdata: a loader of datasvc as the source of `torchdata.nodes`, which resumes with the nodes behind it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from datasvc.extras import explain_missing

with explain_missing("datasvc.integrations.torchdata"):
    from torchdata.nodes import BaseNode

__all__ = ["LoaderNode"]

_STATE: Final = "loader"


class LoaderNode(BaseNode):
    """The batches of a loader of datasvc, for `torchdata.nodes.Loader(Prefetcher(LoaderNode(loader), 2))`.

    The state of the nodes has the position after the last batch that they handed over; batches that are prefetched
    are not counted. Each `for` reads to the end of the epoch, and the next one reads the next epoch, also after a
    `break`.

    Args:
        loader: loader of datasvc. From now on only the node uses it: with a `Prefetcher` it is ahead of the training.
    """

    def __init__(self, loader: Any) -> None:
        super().__init__()
        self.loader = loader
        self._batches: Iterator[Any] | None = None

    def reset(self, initial_state: Mapping[str, Any] | None = None) -> None:
        """Start at a state; without one at the position of the loader, and later at the next epoch."""
        super().reset(initial_state)
        state = self.loader.state_dict()
        if initial_state is not None:
            self.loader.load_state_dict(initial_state[_STATE])
        elif self._batches is not None and state["position"]:
            # The epoch was read to its end or left: batches that were prefetched are not handed over.
            self.loader.load_state_dict(state | {"epoch": state["epoch"] + 1, "position": 0})
        self._batches = iter(self.loader)

    def next(self) -> Any:
        """Return the next batch of the epoch."""
        assert self._batches is not None
        return next(self._batches)

    def get_state(self) -> dict[str, Any]:
        """Return the position after the last batch that `next` returned."""
        return {_STATE: self.loader.state_dict()}
