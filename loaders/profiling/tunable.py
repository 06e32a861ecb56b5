"""`Loader.tune`: other decoding threads and prefetch at the end of an epoch.

Invariant: they stay within the processors of the rank, a part of the memory and the cache, and change no batch.
"""

from __future__ import annotations

import contextlib
import re
from abc import ABC, abstractmethod
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from datasvc.errors import CacheFullError
from datasvc.loaders.profiling.tuning import MIN_STEPS, LoaderSetting, LoaderTuning, choose_setting
from datasvc.threads import count_processors

if TYPE_CHECKING:
    from datasvc.loaders.profiling.bottleneck import Resources
    from datasvc.loaders.profiling.report import Report
    from datasvc.order import OrderConfig

_MAX_PREFETCH: Final = 32
_MEMORY_DIVISOR: Final = 8  # of the memory that is available to the node, for the batches of its ranks in progress


class TunableLoader(ABC):
    """What `tune` needs of a loader; see `Loader` for its attributes."""

    order: OrderConfig
    _batches: Any
    _cached_stores: list[Any]
    _prefetch: int
    _thread_guard: Any
    _tuning: LoaderTuning | None = None

    def tune(self, report: Report | None = None) -> LoaderTuning:
        """Change decoding threads or prefetch, if a report shows that the consumer waits for decoding.

        Call it at the end of each epoch. A call raises one of both, up to the processors of this rank and a part of
        the memory, or takes the last change back if that did not serve more samples. After a few epochs nothing
        changes any more. Batches are the same with any setting. A rank tunes its own loader, as others may have other
        processors. The loader of a decode group stays as it is, because the jobs of a group decode in turn.

        Args:
            report: report on the steps since the last call; None: that of the loader. Then a new one begins.

        Returns:
            The setting in use now, and why.

        Raises:
            ConfigError: another thread uses the loader.
            CorruptDataError, NotFoundError, UnavailableError: the cache or the repository fails; nothing changes.
        """
        report = self.report() if report is None else report
        resources = self._resources()
        now = LoaderSetting(resources.num_threads, self._prefetch)
        tuning = self._tuning or LoaderTuning(now)
        if resources.is_shared:
            return replace(tuning, reason="the jobs of the decode group decode in turn")
        tuning = choose_setting(tuning, report, _limits_of(resources, now))
        if tuning.setting != now:
            try:
                self._use(tuning.setting)
            except CacheFullError as error:
                tuning = tuning.reject(f"the cache cannot hold prefetch={tuning.setting.prefetch}: {error}")
        self._tuning = tuning
        if report.totals.num_steps >= MIN_STEPS:
            self.restart_report()
        return tuning

    def _use(self, setting: LoaderSetting) -> None:
        """Use another setting from the next batch on. Raises CacheFullError: the cache is too small for it."""
        with self._thread_guard:
            before, self._prefetch = self._prefetch, setting.prefetch
            opened = None
            if self._cached_stores and setting.prefetch > before:  # more batches need more shards at once
                try:
                    opened = self._open(self.order)
                except BaseException:  # such as a store that cannot be reached
                    self._prefetch = before
                    raise
            self._discard()
            if opened is not None:
                # Not by `_change_order`: the order stays, and so does the ledger, which a running loop needs.
                for store in self._cached_stores:
                    store.close()
                self._cached_stores, self._batches = opened
            self._configure(setting)

    def _configure(self, setting: LoaderSetting) -> None:  # noqa: B027 - for loaders whose decoders have settings
        """Make later decoders with a setting."""

    @abstractmethod
    def report(self) -> Report:
        """See `Loader`."""

    @abstractmethod
    def restart_report(self) -> None:
        """See `Loader`."""

    @abstractmethod
    def _resources(self) -> Resources: ...

    @abstractmethod
    def _discard(self) -> None: ...

    @abstractmethod
    def _open(self, order: OrderConfig) -> tuple[Any, Any]: ...


def _limits_of(resources: Resources, now: LoaderSetting) -> LoaderSetting:
    """Return the largest setting that fits the processors of this rank and the memory; at least that of `now`."""
    num_batches = _MAX_PREFETCH
    if resources.batch_bytes:
        # The rank has as large a part of the memory as of the processors.
        share = _free_bytes(resources.device_id) * resources.num_processors // (_MEMORY_DIVISOR * count_processors())
        num_batches = min(num_batches, share // resources.batch_bytes)
    return LoaderSetting(max(now.num_threads, resources.num_processors), max(now.prefetch, num_batches))


def _free_bytes(device_id: int | None) -> int:
    """Return the free memory of a GPU, or what programs of the node or of the container can have; 0 if unknown."""
    if device_id is not None:
        import torch

        return int(torch.cuda.mem_get_info(device_id)[0])
    sizes = []
    for path, pattern, unit in _MEMORY:
        with contextlib.suppress(OSError):
            found = re.search(pattern, Path(path).read_text(encoding="ascii"))
            sizes += [unit * int(found[1])] if found else []  # "max" is no limit
    return min(sizes, default=0)


_MEMORY: Final = (
    ("/proc/meminfo", r"MemAvailable:\s+(\d+)", 1024),
    ("/sys/fs/cgroup/memory.max", r"(\d+)", 1),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", r"(\d+)", 1),  # version 1
)
