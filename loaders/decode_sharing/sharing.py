"""A loader's membership in a decode group: the loader plans steps, reads no shards and requests decoded batches."""

from __future__ import annotations

import dataclasses
import hashlib
import pickle  # to tell settings apart
from collections.abc import Callable, Iterator, Mapping
from types import FunctionType
from typing import Any, Generic, TypeVar

import numpy as np

from datasvc.cache import Cache
from datasvc.errors import ConfigError
from datasvc.loaders.core.batches import SampleBatch
from datasvc.loaders.core.data_ranks import DataRanks
from datasvc.loaders.core.loader import Loader
from datasvc.loaders.core.mixture import Mixture
from datasvc.loaders.core.split_reader import Cursor
from datasvc.loaders.decode_sharing.consumer import SharedBatches, SharingCounts
from datasvc.loaders.decode_sharing.decoder import SharedDecoder
from datasvc.loaders.decode_sharing.loader_spec import CachePlace, LoaderSpec
from datasvc.loaders.decode_sharing.settings import DecodeGroup
from datasvc.loaders.decode_sharing.step_index import StepIndex
from datasvc.order import plan_step, slice_step

B = TypeVar("B")

# Arguments that the server's loader does not get: they belong to this process or are passed separately.
_NOT_SENT = frozenset({"self", "__class__", "split", "cache", "decode_group", "ledger", "mesh", "mesh_axis"})
# The fingerprint has these as part of the loader's state.
_IN_STATE = frozenset({"seed", "shuffle", "lanes", "block", "sticky", "tail", "data_rank", "data_world_size"})
_WITHOUT_EFFECT_ON_BATCHES = frozenset({"num_threads", "prefetch"})


class Sharing(Generic[B]):
    """A loader's membership in a decode group.

    Args:
        loader: the loader; it reads `planned` instead of samples.
        group: the decode group.
        arguments: arguments of the loader's constructor by name; those for this process alone are left out.
        cache: cache of the loader.

    Attributes:
        planned: the steps of the loader's run.
        counts: counters of shared batches, batches decoded alone, and losses.

    Raises:
        ConfigError: `prefetch` is larger than the group's lag.
    """

    def __init__(
        self, loader: Loader[B], group: DecodeGroup, arguments: Mapping[str, Any], cache: Cache | None
    ) -> None:
        prefetch = arguments.get("prefetch", 0)
        if prefetch > group.lag:
            raise ConfigError(
                f"prefetch is {prefetch}, more than the lag of {group.lag} of the decode group {group.name!r}, so "
                "equally fast jobs with a smaller prefetch would fall behind; give a larger lag or a smaller prefetch"
            )
        self.counts = SharingCounts()
        self._group, self._ranks, self._cache = group, loader.ranks, cache
        self._loader, self._samples = type(loader), loader.split
        self._profiler = loader.profiler
        self._step_index = StepIndex(len(loader.split), loader.batch_size * loader.ranks.world_size, loader.tail)
        lanes = 1 if isinstance(loader.split, Mixture) else loader.order.lanes
        self.planned = PlannedBatches(self._step_index, loader.ranks, lanes)
        ranks = {"data_rank": loader.ranks.rank, "data_world_size": loader.ranks.world_size}
        self._settings = {name: value for name, value in arguments.items() if name not in _NOT_SENT} | ranks
        self._fingerprint = self._describe(loader)
        self._batches: SharedBatches | None = None
        self._iterate: Callable[[Loader[B]], Iterator[Any]] = iter

    def make_decoder(self, iterate: Callable[[Loader[B]], Iterator[Any]], kind: str) -> SharedDecoder[Any]:
        """Return a decoder for `planned`.

        Args:
            iterate: picklable function that returns an iterator over the rest of a loader's epoch, such as `iter`.
            kind: kind of the batches that `iterate` yields; jobs share batches of the same kind only.
        """
        if self._batches is None or self._batches.kind != kind:
            self.close()
            self._iterate = iterate
            spec = LoaderSpec(self._loader, self._samples, CachePlace.of(self._cache), self._settings, iterate)
            self._batches = SharedBatches(
                self._group,
                ranks=self._ranks,
                spec=spec,
                step_index=self._step_index,
                fingerprint=self._fingerprint,
                kind=kind,
                counts=self.counts,
            )
        return SharedDecoder(self._batches, self._make_alone, iterate, profiler=self._profiler)

    def status(self) -> dict[str, Any]:
        """Return the process id and counters of the decoding process; {} while this loader is not connected."""
        return {} if self._batches is None else self._batches.status()

    def close(self) -> None:
        """Leave the decode group; a new decoder joins it again."""
        if self._batches is not None:
            self._batches.close()
            self._batches = None

    def _make_alone(self) -> Loader[Any]:
        return self._loader(self._samples, cache=self._cache, **self._settings)

    def _describe(self, loader: Loader[B]) -> dict[str, Any]:
        """Return all settings that affect the content of batches, and no others, as JSON values."""
        state = {name: value for name, value in loader.state_dict().items() if name not in {"epoch", "position"}}
        settings = {
            name: _to_json(value)
            for name, value in self._settings.items()
            if name not in _IN_STATE | _WITHOUT_EFFECT_ON_BATCHES
        }
        return {"loader": self._loader.__qualname__, "tail": loader.tail, **state, **settings}


def _to_json(value: object) -> Any:
    """Return a setting as JSON values, equal in all processes for equal settings."""
    if value is None or isinstance(value, str | int | float | bool):
        return value
    if isinstance(value, list | tuple):
        return [_to_json(element) for element in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _to_json(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, FunctionType | type):
        return f"{value.__module__}.{value.__qualname__}"
    try:
        content = pickle.dumps(value)
    except (pickle.PicklingError, AttributeError, TypeError):
        content = b""  # `ServerJob.plan` raises the error, with a reason
    return f"{type(value).__qualname__} {hashlib.blake2b(content, digest_size=8).hexdigest()}"


class PlannedBatches:
    """A `BatchSource` of one rank's steps, epoch after epoch, that opens no shards.

    Args:
        step_index: the steps of a run.
        ranks: data rank of this process.
        lanes: number of lanes of the access order.
    """

    def __init__(self, step_index: StepIndex, ranks: DataRanks, lanes: int) -> None:
        self._step_index = step_index
        self._ranks = ranks
        self._lanes = lanes

    def stream(self, cursor: Cursor) -> Iterator[SampleBatch]:
        """Yield batches from `cursor` on without end, with positions and mask and no data from shards."""
        step_index, ranks = self._step_index, self._ranks
        nothing = np.empty(0, np.int64)
        while True:
            step = plan_step(cursor.position, step_index.num_samples, step_index.global_batch, step_index.tail)
            if step is None:
                cursor = Cursor(cursor.epoch + 1, 0)
                continue
            positions, mask = slice_step(step, rank=ranks.rank, world_size=ranks.world_size, lanes=self._lanes)
            batch = SampleBatch(cursor.epoch, step, positions, mask, nothing, nothing, [], {}, [], nothing)
            yield batch
            cursor = batch.after

    def retire(self, batch: SampleBatch) -> None:
        """Do nothing: no shard is open."""

    def close(self) -> None:
        """Do nothing: no shard is open."""
