"""A loader's side of a decode group: the settings that its jobs compare, and the decoder that shares batches.

`ImageLoader` has a `Sharing` if its argument `decode_group` is given.
"""

from __future__ import annotations

import dataclasses
import hashlib
import pickle  # only to compare settings
from collections.abc import Mapping
from types import FunctionType
from typing import Any, Final, Generic, TypeVar

from datasvc.errors import ConfigError
from datasvc.loaders.core.batches import BatchDecoder
from datasvc.loaders.core.loader import Loader
from datasvc.loaders.decode_sharing.decoder import Pace, SharedDecoder, SharingCounts
from datasvc.loaders.decode_sharing.group_folder import GroupFolder
from datasvc.loaders.decode_sharing.settings import DecodeGroup

B = TypeVar("B")

# Fields of `DecodeConfig` that may differ between the jobs of a group, because they do not affect the batches.
_MAY_DIFFER: Final = {"num_threads", "prefetch"}
# Arguments that `_describe` takes from the loader, which has their final values.
_TAKEN_FROM_LOADER: Final = {"tail", "ranks"}


class Sharing(Generic[B]):
    """Makes the decoders of one loader that is in a decode group. All of them use one `GroupFolder`.

    Args:
        loader: the loader.
        group: settings of the decode group.
        arguments: arguments of the loader that affect its batches, by name. `decode` is a `DecodeConfig`.

    Attributes:
        counts: counters of shared batches, own batches and waits that failed, see `SharingCounts`.

    Raises:
        ConfigError: `prefetch` is larger than the group's lag; an argument cannot be compared across jobs.
    """

    def __init__(self, loader: Loader[B], group: DecodeGroup, arguments: Mapping[str, Any]) -> None:
        prefetch = arguments["decode"].prefetch
        if prefetch > group.lag:
            raise ConfigError(
                f"prefetch is {prefetch}, more than the lag of {group.lag} of the decode group {group.name!r}, so "
                "equally fast jobs with a smaller prefetch would fall behind; give a larger lag or a smaller prefetch"
            )
        self.counts = SharingCounts()
        self._group, self._ranks, self._profiler = group, loader.ranks, loader.profiler
        global_batch = loader.batch_size * loader.ranks.world_size
        self._sizes = {"steps_per_epoch": len(loader), "global_batch": global_batch}
        self._settings = _describe(loader, arguments) | group.common
        self._kind: dict[str, str] = {}
        self._folder: GroupFolder | None = None
        self._pace: Pace | None = None

    def make_decoder(self, inner: BatchDecoder[B], **kind: str) -> SharedDecoder[B]:
        """Return a decoder that shares its batches with the other jobs.

        Args:
            inner: decoder of the batches that this job decodes; see `SharedDecoder`.
            kind: other settings that affect the batches: the array type and the backend.
        """
        # The jobs of a group compare `kind` too, so this job leaves and joins again if it changes. Otherwise keep the
        # folder, which has mappings of other jobs' batches, and the pace, which counts the waits that are left.
        if self._folder is None or self._pace is None or self._kind != kind:
            self.close()
            self._kind = kind
            # Keep more mappings than a group usually has batches, because a new mapping costs as much as a copy.
            num_kept = 4 * self._group.lag + 8
            self._folder = GroupFolder(self._group.name, self._ranks, self._settings | kind, num_kept)
            self._pace = Pace(self._group, self._folder, self.counts, **self._sizes)
        return SharedDecoder(
            inner,
            folder=self._folder,
            pace=self._pace,
            group=self._group,
            counts=self.counts,
            profiler=self._profiler,
        )

    def close(self) -> None:
        """Leave the decode group. The next batch of a decoder joins it again."""
        if self._folder is not None:
            self._folder.leave()


def _describe(loader: Loader[Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return all settings that affect the content of batches, and no others, as JSON values."""
    # The state without epoch and position describes the data and their order.
    state = {name: value for name, value in loader.state_dict().items() if name not in {"epoch", "position"}}
    compared = {name: value for name, value in arguments.items() if name not in _TAKEN_FROM_LOADER}
    settings = {name: _to_json(name, value) for name, value in compared.items()}
    ranks = {"data_rank": loader.ranks.rank, "data_world_size": loader.ranks.world_size}
    return {"loader": type(loader).__qualname__, "tail": loader.tail, **ranks, **state, **settings}


def _to_json(name: str, value: object) -> Any:
    """Return a setting as JSON values. Equal settings give equal values in all processes, different ones do not.

    Raises:
        ConfigError: the setting cannot be compared across processes.
    """
    if value is None or isinstance(value, str | int | float | bool):
        return value
    if isinstance(value, list | tuple):
        return [_to_json(name, element) for element in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value) if field.name not in _MAY_DIFFER]
        return {field: _to_json(f"{name}.{field}", getattr(value, field)) for field in names}
    try:
        content = pickle.dumps(value)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"decode_group cannot compare {name} with that of other jobs: {error}; use functions and classes of a "
            "module, no lambdas"
        ) from error
    if isinstance(value, FunctionType):
        # The pickle of a function has only its name. Two scripts, both `__main__`, may have different functions with
        # the same name.
        code = value.__code__
        constants = [constant for constant in code.co_consts if isinstance(constant, str | int | float | bytes)]
        content += code.co_code + repr((code.co_names, constants)).encode()
    named = value if isinstance(value, FunctionType | type) else type(value)
    return f"{named.__module__}.{named.__qualname__} {hashlib.blake2b(content, digest_size=8).hexdigest()}"
