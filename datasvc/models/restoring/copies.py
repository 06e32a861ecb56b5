"""Where a restore finds what a version is made of: in one repository or several, by way of a node's cache or past it.

Tables and states are read here whole, tensors through a source that is opened for the pieces that are wanted. How
much came from where, and which copies were bad, is told by a report.
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
"""What was read past a cache."""


class StagedSource(ChunkSource, Protocol):
    """An `ChunkSource` that knows where its bytes came from."""

    @property
    def came_bytes(self) -> Mapping[str, int]:
        """How many stored bytes came from where, see `RestoreReport`."""


OpenCache = Callable[
    [Sequence[Repository], FailoverSource, Sequence[TensorRecord]], AbstractContextManager[StagedSource]
]
"""Opens a node's cache over some repositories, and the same places in turn for what it cannot give; for tensors of
which each piece is read once. `datasvc.models.restoring.restore.node_cache` makes one."""


class StoredCopies:
    """What gives the objects of a repository, from the first place that has a good copy of each.

    Args:
        repository: has them as a rule.
        fallback: other repositories, or their URLs, or one, that may have copies; asked in this order.
        cache: opens a node's cache, which is asked first.

    Raises:
        NotFoundError: there is no such other repository.
    """

    def __init__(
        self,
        repository: Repository,
        *,
        fallback: Sequence[Repository | str] | Repository | str = (),
        cache: OpenCache | None = None,
    ) -> None:
        others = [fallback] if isinstance(fallback, str | Repository) else fallback
        self._repositories = [repository, *map(_open_fallback, others)]
        self._behind = FailoverSource([each.objects for each in self._repositories])
        self._open_cache = cache
        self._came: Counter[str] = Counter()

    def read(self, digest: Digest, most_bytes: int | None = None) -> bytes:
        """Return a whole object, verified, past any cache. Raises as `FailoverSource.read`."""
        return self._behind.read(digest, most_bytes)

    @contextmanager
    def opened(self, records: Sequence[TensorRecord]) -> Iterator[ChunkSource]:
        """Open what gives the bytes of tensors. `records`: with the pieces that will be read, each once."""
        if self._open_cache is None:
            yield self._behind
            self._came[DIRECT] += count_bytes(links_of(records)).total()
            return
        with self._open_cache(self._repositories, self._behind, records) as staged:
            yield staged
            self._came.update(staged.came_bytes)

    def report(self, records: Sequence[TensorRecord], seconds: float) -> RestoreReport:
        """Return how the reading of tensors went, which took so many seconds in all. `records` as of `opened`."""
        size_bytes = sum(record.piece_bytes(piece) for record in records for piece in record.pieces)
        return RestoreReport(seconds, size_bytes, dict(self._came), self._behind.bad.listed(records))


def links_of(records: Iterable[TensorRecord]) -> list[ChainLink]:
    """Return all links of all pieces of some tensors."""
    return [link for record in records for piece in record.pieces for link in piece.chain]


def count_bytes(links: Iterable[ChainLink]) -> Counter[Digest]:
    """Return how many bytes of each object will be read: of one that is shared each range once."""
    every = list(links)
    counted = Counter[Digest]()
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
        # It may never be needed; where it is, whoever asks it for an object hears why it gives none.
        return Repository(Storage(place))
