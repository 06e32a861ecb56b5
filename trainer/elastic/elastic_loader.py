"""Wraps a loader. When rank or size change, creates a new loader that continues at the position of the job.

Training functions put the wrapper into a `TorchState`, which calls `reset` after each change of the ranks.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, Protocol, TypeVar

from datasvc.trainer.job import runtime

B = TypeVar("B")
B_co = TypeVar("B_co", covariant=True)


class ResumableLoader(Protocol[B_co]):
    """The interface that `ElasticLoader` requires; the loaders of `datasvc.loaders` and torchdata have it."""

    def __iter__(self) -> Iterator[B_co]:
        """Yield the remaining batches of the epoch."""

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the job after the batches delivered so far; it is the same on every rank."""

    def load_state_dict(self, state: dict[str, Any], /) -> object:
        """Continue from a state, which may have been saved at another rank and size."""


class ElasticLoader(Generic[B]):
    """A wrapper of a loader for the current rank and size. Attributes not defined here are those of the loader.

    Its state is the position of the whole job, not of one rank. So after a change of size, the ranks together deliver
    each remaining sample exactly once. Create a new iterator in every call of the training function,
    because an older one belongs to the loader or the position before the change.

    Args:
        make_loader: factory, called as `make_loader(rank, size)` after each change. Loaders of `datasvc.loaders` take
            `ranks=DataRanks(rank, size)`. To keep the global batch size constant, divide it by `size` to get the
            batch size of the loader.
    """

    def __init__(self, make_loader: Callable[[int, int], ResumableLoader[B]]) -> None:
        self._make_loader = make_loader
        self._rank_and_size: tuple[int, int] | None = None
        self._loader: ResumableLoader[B] | None = None
        self.reset()

    @property
    def loader(self) -> ResumableLoader[B]:
        """The loader for the current rank and size."""
        assert self._loader is not None
        return self._loader

    def reset(self) -> None:
        """If rank or size have changed, create a new loader at the same position of the job."""
        rank_and_size = (runtime.rank(), runtime.size())
        if rank_and_size == self._rank_and_size:
            return
        state = None if self._loader is None else self._loader.state_dict()
        self.close()
        self._loader, self._rank_and_size = self._make_loader(*rank_and_size), rank_and_size
        # The state is the position of the job, so it is valid for another rank and size.
        if state is not None:
            self._loader.load_state_dict(state)

    def __iter__(self) -> Iterator[B]:
        return iter(self.loader)

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]  # TypeError if the loader has no length

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the job."""
        return self.loader.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at the position of a state."""
        self.loader.load_state_dict(copy.deepcopy(dict(state)))

    def close(self) -> None:
        """Close the loader, if it has a `close` method."""
        close = getattr(self._loader, "close", None)
        if close is not None:
            close()

    def __getattr__(self, name: str) -> Any:
        # Reject names with an underscore: before `_loader` is set, a lookup of it would call this method endlessly.
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._loader, name)
