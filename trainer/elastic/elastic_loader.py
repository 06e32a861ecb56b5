"""Wraps a loader. In each new round, creates a new loader that continues at the position of the job.

Training functions put the wrapper into a `TorchState`, which calls `reset` in each new round: a period in which the
ranks of the job and their numbers do not change.
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
    each remaining sample exactly once. Create a new iterator in every call of the training function: an older one
    belongs to the loader before the change, or to an older position.

    Args:
        make_loader: factory, called as `make_loader(rank, size)` in each round. Loaders of `datasvc.loaders` take
            `ranks=DataRanks(rank, size)`. To keep the global batch size constant, divide it by `size` to get the
            batch size of the loader.
    """

    def __init__(self, make_loader: Callable[[int, int], ResumableLoader[B]]) -> None:
        self._make_loader = make_loader
        self._made_for: tuple[int, int, int] | None = None  # number of the `init`, rank, size
        self._loader: ResumableLoader[B] | None = None
        self._state: dict[str, Any] | None = None  # position of the job while there is no loader
        self.reset()

    @property
    def loader(self) -> ResumableLoader[B]:
        """The loader of the current round."""
        assert self._loader is not None
        return self._loader

    def reset(self) -> None:
        """In a new round, create a new loader at the same position of the job.

        Raises:
            HorovodInternalError: a rank was lost while the loader was made; call this again in the next round.
        """
        # Also if rank and size stay: the loaders of a round agree on values, and those of new ranks wait for all.
        made_for = (runtime.num_inits(), runtime.rank(), runtime.size())
        if made_for == self._made_for:
            return
        if self._loader is not None:
            self._state = self._loader.state_dict()
            self.close()
            # Keep only the position, because `_make_loader` fails if another rank is lost at that time.
            self._loader = self._made_for = None
        loader = self._make_loader(runtime.rank(), runtime.size())
        # The state is the position of the job, so it is valid for another rank and size.
        if self._state is not None:
            loader.load_state_dict(self._state)
        self._loader, self._made_for, self._state = loader, made_for, None

    def __iter__(self) -> Iterator[B]:
        return iter(self.loader)

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]  # TypeError if the loader has no length

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the job."""
        return self.loader.state_dict() if self._state is None else copy.deepcopy(self._state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at the position of a state."""
        copied = copy.deepcopy(dict(state))
        if self._loader is None:
            self._state = copied
        else:
            self._loader.load_state_dict(copied)

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
