"""Reads the copies of a version's objects from one or several repositories, with or without the node's cache.

`restore`, `load_version_into` and `DcpReader` create one `StoredCopies` per restore. They read tensor tables and
states from the repositories (`direct`), without the cache. They read tensors through the source that `open_source`
opens. The report of the restore has the number of bytes that were read from each place, and the bad copies.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from datasvc.cache import Cache
from datasvc.cache.cache import use_cache
from datasvc.cache.peers.peers import Peers
from datasvc.errors import ConfigError, UnavailableError
from datasvc.models.restoring.cached_source import DIRECT, CachedSource, count_bytes
from datasvc.models.restoring.failover_source import FailoverSource
from datasvc.models.restoring.report import RestoreReport
from datasvc.models.tensors.chunk_reader import ChunkSource
from datasvc.models.tensors.partial_read import PartialReader
from datasvc.models.tensors.read import load_tensors
from datasvc.models.tensors.tensor_table import TensorRecord
from datasvc.progress import NO_PROGRESS, Progress
from datasvc.repository import Repository, Storage

if TYPE_CHECKING:
    import torch


class StoredCopies:
    """Reads each object of a repository from the first place that has a good copy: cache, repository or fallback.

    For the arguments see `restore.restore`.

    Attributes:
        repository: see `restore.restore`.
        direct: source over the repository and the fallbacks, without the cache.

    Raises:
        ConfigError: `peers` is set without a cache; or with a Cache object, which has its own peers.
        NotFoundError: a fallback repository does not exist.
    """

    def __init__(
        self,
        repository: Repository,
        *,
        cache: Cache | str | Path | None = None,
        peers: Peers | None = None,
        fallback: Sequence[Repository | str] | Repository | str = (),
    ) -> None:
        if peers is not None and (cache is None or isinstance(cache, Cache)):
            raise ConfigError(
                "peers need a node's cache: pass the cache's folder as cache=, or pass a Cache that has peers"
            )
        self.repository = repository
        self._cache, self._peers = cache, peers
        fallbacks = [fallback] if isinstance(fallback, str | Repository) else fallback
        self._repositories = [repository, *map(_open_fallback, fallbacks)]
        self.direct = FailoverSource([repo.objects for repo in self._repositories])
        self._bytes_by_place: Counter[str] = Counter()

    @contextmanager
    def open_source(self, records: Sequence[TensorRecord]) -> Iterator[ChunkSource]:
        """Open a source for the bytes of tensors. The caller must read each chunk of `records` exactly once."""
        if self._cache is None:
            yield self.direct
            # Without a cache, the bytes that were read are those of `records`. After an error this line is not
            # reached, but then there is no report.
            self._bytes_by_place[DIRECT] += count_bytes(records).total()
            return
        with ExitStack() as opened:
            cache = opened.enter_context(use_cache(self._cache, peers=self._peers))
            source = opened.enter_context(closing(CachedSource(cache, self._repositories, self.direct, records)))
            yield source
            self._bytes_by_place.update(source.came_bytes)

    def load(
        self, records: Sequence[TensorRecord], *, progress: Progress = NO_PROGRESS, planes: int | None = None
    ) -> dict[str, torch.Tensor]:
        """Return the verified tensors of `records` by name. For errors see `load_tensors`.

        `planes`: read only so many high bytes of floating-point numbers, unverified, see `PartialReader`. None: all.
        """
        with self.open_source(records) as source:
            if planes is None:
                return load_tensors(source, records, progress=progress)
            partial = PartialReader(source, planes)
            tensors = load_tensors(source, records, progress=progress, partial=partial)
        self._bytes_by_place[DIRECT] -= partial.skipped_bytes
        return tensors

    def report(self, records: Sequence[TensorRecord], seconds: float) -> RestoreReport:
        """Return the report of a restore of `records` that took `seconds`."""
        # Add sizes of chunks, not `record.nbytes`: the load of a sharded checkpoint may read only some of the chunks.
        size_bytes = sum([record.chunk_bytes(chunk) for record in records for chunk in record.chunks])
        return RestoreReport(seconds, size_bytes, dict(self._bytes_by_place), self.direct.bad.listed(records))


def _open_fallback(place: Repository | str) -> Repository:
    """Open a fallback repository, even if it cannot be reached now. Raises NotFoundError: it does not exist."""
    if isinstance(place, Repository):
        return place
    try:
        return Repository.open(place)
    except (ConfigError, UnavailableError):
        # The fallback may never be needed. If it is, the read from it raises an error.
        return Repository(Storage(place))
