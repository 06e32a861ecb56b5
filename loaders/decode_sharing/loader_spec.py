"""A loader that another process can make, and that stands wherever it is wanted."""

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
    """Where a node's cache is: a cache itself is never sent to another process."""

    folder: Path
    tenant: str
    peers: Peers | None

    @classmethod
    def of(cls, cache: Cache | None) -> CachePlace | None:
        """Return the place of an open cache; None where there is none."""
        return None if cache is None else cls(cache.folder, cache.tenant, cache.peers)


@dataclass(frozen=True)
class LoaderSpec:
    """How a loader is made; it pickles where its settings do.

    Attributes:
        loader: its class, or a function of a module, called with the samples, `cache` and the settings.
        samples: a split, or what else the loader reads.
        cache: where they are staged, if anywhere.
        settings: keyword arguments.
        iterate: returns the rest of the loader's epoch.
    """

    loader: Callable[..., Loader[Any]]
    samples: Any
    cache: CachePlace | None
    settings: Mapping[str, Any]
    iterate: Callable[[Loader[Any]], Iterator[Any]] = iter

    def make(self) -> Loader[Any]:
        """Return a new loader, which owns its cache. Raises what making it raises."""
        place = self.cache
        cache = None if place is None else Cache(place.folder, tenant=place.tenant, peers=place.peers)
        return self.loader(self.samples, cache=cache, **self.settings)


class Positioned(Generic[B]):
    """A loader that is made when it is needed first, and gives the batch at any place of a run.

    Args:
        make: makes it.
        iterate: returns the rest of its epoch.
    """

    def __init__(self, make: Callable[[], Loader[B]], iterate: Callable[[Loader[B]], Iterator[B]]) -> None:
        self._make = make
        self._iterate = iterate
        self._loader: Loader[B] | None = None
        self._stream: Iterator[B] | None = None
        self._next: Cursor | None = None

    def open(self) -> Loader[B]:
        """Return the loader. Raises what making it raises."""
        if self._loader is None:
            self._loader = self._make()
        return self._loader

    def read(self, cursor: Cursor) -> B:
        """Return the batch of the step that starts at `cursor`; in turn is fast, elsewhere starts anew.

        Raises:
            DatasvcError: what the loader raises; the next call starts anew.
        """
        loader = self.open()
        if self._next != cursor or self._stream is None:
            loader.load_state_dict(loader.state_dict() | {"epoch": cursor.epoch, "position": cursor.position})
            self._stream = self._without_end(loader)
        self._next = None
        batch = next(self._stream)
        self._next = Cursor(loader.epoch, int(loader.state_dict()["position"]))
        if not loader.steps_left:
            self._next = Cursor(loader.epoch + 1, 0)
        return batch

    def close(self) -> None:
        """Let go of the loader; it is made again when needed."""
        if self._loader is not None:
            self._loader.close()
        self._loader = self._stream = self._next = None

    def _without_end(self, loader: Loader[B]) -> Iterator[B]:
        while True:
            yield from self._iterate(loader)
