"""The copies of a version's objects: in one or several repositories, with or without the node's cache.

Tensor tables and states are read whole and directly; tensors through a source that is opened for the chunks to be
read. A report lists how many bytes came from each place and which copies were bad.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Final, Protocol

from datasvc.errors import ConfigError, UnavailableError
from datasvc.models.restoring.failover_source import FailoverSource
from datasvc.models.restoring.report import RestoreReport
from datasvc.models.tensors.chunk_reader import ChunkSource
from datasvc.models.tensors.tensor_table import ChainLink, TensorRecord
from datasvc.repository import Digest, Repository, Storage

DIRECT: Final = "direct"
"""Place name of bytes that were read from a repository, not through a cache."""


class StagedSource(ChunkSource, Protocol):
    """A `ChunkSource` that counts where its bytes come from."""

    @property
    def came_bytes(self) -> Mapping[str, int]:
        """Stored bytes by the place that they came from, see `RestoreReport`."""


OpenCache = Callable[
    [Sequence[Repository], FailoverSource, Sequence[TensorRecord]], AbstractContextManager[StagedSource]
]
"""Opens a source over a node's cache, for given repositories, for their failover source as the direct way, and for
records of which each chunk is read once. `datasvc.models.restoring.restore.node_cache` makes one."""


class StoredCopies:
    """Reads the objects of a repository from the first place that has a good copy of each.

    Args:
        repository: repository that normally has the objects.
        fallback: one or several other repositories, or their URLs, that may have copies; tried in this order.
        cache: opens a source over the node's cache, which is tried first for tensors.

    Raises:
        NotFoundError: a fallback repository does not exist.
    """

    def __init__(
        self,
        repository: Repository,
        *,
        fallback: Sequence[Repository | str] | Repository | str = (),
        cache: OpenCache | None = None,
    ) -> None:
        fallbacks = [fallback] if isinstance(fallback, str | Repository) else fallback
        self._repositories = [repository, *map(_open_fallback, fallbacks)]
        self._direct = FailoverSource([repo.objects for repo in self._repositories])
        self._open_cache = cache
        self._bytes_by_origin: Counter[str] = Counter()

    def read(self, digest: Digest, max_bytes: int | None = None) -> bytes:
        """Return a whole object, verified, without a cache. Raises as `FailoverSource.read`."""
        return self._direct.read(digest, max_bytes)

    @contextmanager
    def open_source(self, records: Sequence[TensorRecord]) -> Iterator[ChunkSource]:
        """Open a source for the bytes of tensors; each chunk of `records` is then read once."""
        if self._open_cache is None:
            yield self._direct
            self._bytes_by_origin[DIRECT] += count_bytes(links_of(records)).total()
            return
        with self._open_cache(self._repositories, self._direct, records) as staged:
            yield staged
            self._bytes_by_origin.update(staged.came_bytes)

    def report(self, records: Sequence[TensorRecord], seconds: float) -> RestoreReport:
        """Return the report of a restore of `records` that took `seconds`."""
        size_bytes = sum(record.chunk_bytes(chunk) for record in records for chunk in record.chunks)
        return RestoreReport(seconds, size_bytes, dict(self._bytes_by_origin), self._direct.bad.listed(records))


def links_of(records: Iterable[TensorRecord]) -> list[ChainLink]:
    """Return the links of all chunks of the records."""
    return [link for record in records for chunk in record.chunks for link in chunk.chain]


def count_bytes(links: Iterable[ChainLink]) -> Counter[Digest]:
    """Return the number of bytes that will be read of each object; a shared range counts once."""
    every = list(links)
    counted = Counter[Digest]()
    # A shared range is read once for all chunks in it, a whole object once for each chunk.
    shared = {link for link in every if not link.is_whole_object}
    for link in [*shared, *(link for link in every if link.is_whole_object)]:
        counted[link.object] += link.length
    return counted


def _open_fallback(place: Repository | str) -> Repository:
    if isinstance(place, Repository):
        return place
    try:
        return Repository.open(place)
    except (ConfigError, UnavailableError):
        # A fallback may never be needed. If it is, reading from it raises why it is not available.
        return Repository(Storage(place))
