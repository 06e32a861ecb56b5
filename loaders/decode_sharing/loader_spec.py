"""Description of a loader that another process can create, and a loader that reads the batch at any cursor."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from datasvc.cache import Cache
from datasvc.cache.peers.peers import Peers
from datasvc.loaders.core.loader import Loader
from datasvc.loaders.core.split_reader import Cursor

B = TypeVar("B")


@dataclass(frozen=True)
class CachePlace:
    """Arguments that open a node's cache in another process; an open `Cache` cannot be pickled.

    Attributes:
        folder: folder of the cache.
        tenant: tenant that the cache is opened for.
        peers: the other nodes of the cache, if any.
    """

    folder: Path
    tenant: str
    peers: Peers | None

    @classmethod
    def of(cls, cache: Cache | None) -> CachePlace | None:
        """Return the arguments that open `cache`; None for None."""
        return None if cache is None else cls(cache.folder, cache.tenant, cache.peers)


@dataclass(frozen=True)
class LoaderSpec:
    """Arguments that create a loader. It can be pickled if its settings can.

    Attributes:
        loader: the loader's class, or a module-level function, called with `samples`, `cache` and `settings`.
        samples: a split or a mixture.
        cache: cache of the node; None: no cache.
        settings: further keyword arguments.
        iterate: function that returns an iterator over the rest of a loader's epoch.
    """

    loader: Callable[..., Loader[Any]]
    samples: Any
    cache: CachePlace | None
    settings: Mapping[str, Any]
    iterate: Callable[[Loader[Any]], Iterator[Any]] = iter

    def make(self) -> Loader[Any]:
        """Return a new loader with a cache of its own. Raises the errors of the loader's constructor."""
        place = self.cache
        cache = None if place is None else Cache(place.folder, tenant=place.tenant, peers=place.peers)
        return self.loader(self.samples, cache=cache, **self.settings)


class Positioned(Generic[B]):
    """A loader that is created at its first use, and that reads the batch at any cursor.

    Args:
        make: function that creates the loader.
        iterate: function that returns an iterator over the rest of the loader's epoch.
    """

    def __init__(self, make: Callable[[], Loader[B]], iterate: Callable[[Loader[B]], Iterator[B]]) -> None:
        self._make = make
        self._iterate = iterate
        self._loader: Loader[B] | None = None
        self._stream: Iterator[B] | None = None
        self._next: Cursor | None = None

    def open(self) -> Loader[B]:
        """Return the loader; create it at the first call. Raises the errors of `make`."""
        if self._loader is None:
            self._loader = self._make()
        return self._loader

    def read(self, cursor: Cursor) -> B:
        """Return the batch of the step that starts at `cursor`.

        Consecutive steps use the loader's prefetched batches. Any other cursor restarts the loader there.

        Raises:
            DatasvcError: the loader cannot read the batch; the next call restarts it.
        """
        loader = self.open()
        if self._next != cursor or self._stream is None:
            loader.load_state_dict(loader.state_dict() | {"epoch": cursor.epoch, "position": cursor.position})
            self._stream = self._repeat_epochs(loader)
        # An error in next() leaves None here, so that the next call loads the state again.
        self._next = None
        batch = next(self._stream)
        self._next = Cursor(loader.epoch, int(loader.state_dict()["position"]))
        if not loader.steps_left:
            self._next = Cursor(loader.epoch + 1, 0)
        return batch

    def close(self) -> None:
        """Close the loader; the next use creates a new one."""
        if self._loader is not None:
            self._loader.close()
        self._loader = self._stream = self._next = None

    def _repeat_epochs(self, loader: Loader[B]) -> Iterator[B]:
        while True:
            yield from self._iterate(loader)
