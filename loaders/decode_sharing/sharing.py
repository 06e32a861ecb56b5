"""What a loader does otherwise whose batches come from a share: it plans steps, reads no shard, and asks."""

from __future__ import annotations

import dataclasses
import hashlib
import pickle  # to tell settings apart
from collections.abc import Callable, Iterator, Mapping
from types import FunctionType
from typing import Any, Generic, TypeVar

from datasvc.cache import Cache
from datasvc.errors import ConfigError
from datasvc.loaders.core.loader import Loader
from datasvc.loaders.core.mixture import Mixture
from datasvc.loaders.decode_sharing.consumer import ShareCounts, SharedBatches
from datasvc.loaders.decode_sharing.decoder import SharedDecoder
from datasvc.loaders.decode_sharing.loader_spec import CachePlace, LoaderSpec
from datasvc.loaders.decode_sharing.planned import PlannedBatches
from datasvc.loaders.decode_sharing.settings import DecodeGroup
from datasvc.loaders.decode_sharing.step_index import StepIndex

B = TypeVar("B")

# Of a loader's arguments: what is passed on otherwise, belongs to this process alone, or is in its order and state.
_OWN = frozenset({"self", "__class__", "split", "cache", "share", "ledger", "mesh", "mesh_axis"})
_IN_ORDER = frozenset({"seed", "shuffle", "lanes", "block", "sticky", "tail", "data_rank", "data_world_size"})
_WITHOUT_EFFECT_ON_BATCHES = frozenset({"num_threads", "prefetch"})


class Sharing(Generic[B]):
    """A loader's part in a share.

    Args:
        loader: whose part; it reads `planned` instead of samples.
        share: which.
        arguments: of the loader's class, by name; those that are of no use elsewhere are left out.
        cache: of the loader.

    Attributes:
        planned: the steps of its run.
        counts: how it went so far.

    Raises:
        ConfigError: the arguments cannot be sent to another process; the loader prefetches more than the share's lag.
    """

    def __init__(
        self, loader: Loader[B], share: DecodeGroup, arguments: Mapping[str, Any], cache: Cache | None
    ) -> None:
        prefetch = arguments.get("prefetch", 0)
        if prefetch > share.lag:
            raise ConfigError(
                f"prefetch is {prefetch}, more than the lag of {share.lag} of the share {share.name!r}: jobs of "
                "equal pace that prefetch less would fall behind; give it a larger lag, or a smaller prefetch"
            )
        self.counts = ShareCounts()
        self._share, self._ranks, self._cache = share, loader.ranks, cache
        self._loader, self._samples = type(loader), loader.split
        self._stopwatch = loader.stopwatch
        self._path = StepIndex(len(loader.split), loader.batch_size * loader.ranks.world_size, loader.tail)
        lanes = 1 if isinstance(loader.split, Mixture) else loader.order.lanes
        self.planned = PlannedBatches(self._path, loader.ranks, lanes)
        ranks = {"data_rank": loader.ranks.rank, "data_world_size": loader.ranks.world_size}
        self._settings = {name: value for name, value in arguments.items() if name not in _OWN} | ranks
        self._fingerprint = self._describe(loader)
        self._batches: SharedBatches | None = None
        self._iterate: Callable[[Loader[B]], Iterator[Any]] = iter

    def make_decoder(self, iterate: Callable[[Loader[B]], Iterator[Any]], kind: str) -> SharedDecoder[Any]:
        """Return a decoder for `planned`.

        Args:
            iterate: returns the rest of a loader's epoch: `iter`, or another way of it that pickles.
            kind: of batches that gives; those of another kind are not shared with these.
        """
        if self._batches is None or self._batches.kind != kind:
            self.close()
            self._iterate = iterate
            recipe = LoaderSpec(self._loader, self._samples, CachePlace.of(self._cache), self._settings, iterate)
            self._batches = SharedBatches(
                self._share,
                ranks=self._ranks,
                recipe=recipe,
                path=self._path,
                fingerprint=self._fingerprint,
                kind=kind,
                counts=self.counts,
            )
        return SharedDecoder(self._batches, self._make_alone, iterate, stopwatch=self._stopwatch)

    def status(self) -> dict[str, Any]:
        """Return what the decoding process says of itself and counted: {} while this loader has none."""
        return {} if self._batches is None else self._batches.status()

    def close(self) -> None:
        """Leave the share; a new decoder joins again."""
        if self._batches is not None:
            self._batches.close()
            self._batches = None

    def _make_alone(self) -> Loader[Any]:
        return self._loader(self._samples, cache=self._cache, **self._settings)

    def _describe(self, loader: Loader[B]) -> dict[str, Any]:
        """Return what decides on the content of batches, and nothing that does not."""
        state = {name: value for name, value in loader.state_dict().items() if name not in {"epoch", "position"}}
        settings = {
            name: _name(value)
            for name, value in self._settings.items()
            if name not in _IN_ORDER | _WITHOUT_EFFECT_ON_BATCHES
        }
        return {"loader": self._loader.__qualname__, "tail": loader.tail, **state, **settings}


def _name(value: object) -> Any:
    """Return a setting as JSON values, equal in all processes for what is equal."""
    if value is None or isinstance(value, str | int | float | bool):
        return value
    if isinstance(value, list | tuple):
        return [_name(each) for each in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _name(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, FunctionType | type):
        return f"{value.__module__}.{value.__qualname__}"
    try:
        content = pickle.dumps(value)
    except (pickle.PicklingError, AttributeError, TypeError):
        content = b""  # refused, with a reason, where it is sent
    return f"{type(value).__qualname__} {hashlib.blake2b(content, digest_size=8).hexdigest()}"
