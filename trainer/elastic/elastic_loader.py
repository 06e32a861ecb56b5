"""A loader that is made anew whenever rank and size change, and goes on where the job stands."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, Protocol, TypeVar

from datasvc.trainer.job import runtime

B = TypeVar("B")
B_co = TypeVar("B_co", covariant=True)


class ResumableLoader(Protocol[B_co]):
    """What this file needs of a loader; ours have it, and so do torchdata's."""

    def __iter__(self) -> Iterator[B_co]:
        """Yields the rest of the epoch."""

    def state_dict(self) -> dict[str, Any]:
        """Where the job stands after the batches handed over so far, the same on every rank."""

    def load_state_dict(self, state: dict[str, Any], /) -> object:
        """Goes on from a state, whatever the rank and size that it was saved at."""


class ElasticLoader(Generic[B]):
    """Holds the loader of this rank and size; every other attribute is that loader's own.

    The loader's state says how far the job is, so that after a resize each sample that was not committed is served
    once. Iterate anew in every call of the training function.

    Args:
        make_loader: called as `make_loader(rank, size)` after each change of these; with one of our loaders, give
            them as `data_rank` and `data_world_size`. For a loss that does not depend on the number of ranks,
            divide a constant global batch by `size`.
    """

    def __init__(self, make_loader: Callable[[int, int], ResumableLoader[B]]) -> None:
        self._make_loader = make_loader
        self._share: tuple[int, int] | None = None
        self._loader: ResumableLoader[B] | None = None
        self.reset()

    @property
    def loader(self) -> ResumableLoader[B]:
        """The loader of now."""
        assert self._loader is not None
        return self._loader

    def reset(self) -> None:
        """Makes the loader anew if rank or size have changed; where the job stands stays."""
        share = (runtime.rank(), runtime.size())
        if share == self._share:
            return
        state = None if self._loader is None else self._loader.state_dict()
        self.close()
        self._loader, self._share = self._make_loader(*share), share
        if state is not None:
            self._loader.load_state_dict(state)

    def __iter__(self) -> Iterator[B]:
        return iter(self.loader)

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]  # if the loader has a length

    def state_dict(self) -> dict[str, Any]:
        """Where the job stands."""
        return self.loader.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from there."""
        self.loader.load_state_dict(copy.deepcopy(dict(state)))

    def close(self) -> None:
        """Closes the loader, if it can be closed."""
        close = getattr(self._loader, "close", None)
        if close is not None:
            close()

    def __getattr__(self, name: str) -> Any:
        # Only for names that are not found here; the loader itself is one until it is made.
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._loader, name)
