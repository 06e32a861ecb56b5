"""The first batches of a cold start: single samples, read by range and checked, while their shards are on the way.

A shard takes a second or more to arrive, a sample some milliseconds. But each byte read early comes twice, so only a
small share of the data is read so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from datasvc.errors import CorruptDataError, DatasvcError
from datasvc.repository import Digest, Objects
from datasvc.shards import Shard, ShardRequest
from datasvc.shards.format.partial_reader import PartialShard, open_partial

_SHARE = 0.02
_MAX_BYTES = 512 << 20
_REQUESTS_AT_ONCE = 16


class PartialShardReader:
    """Reads samples of shards that are not here, as long as the allowance lasts. For one thread.

    Args:
        objects: where the shards are.
        split_bytes: of all shards; two per cent of it may be read early, by all ranks together.
        num_ranks: of the job.
        count: adds to the cache's counters.
    """

    def __init__(
        self, objects: Objects, split_bytes: int, *, num_ranks: int = 1, count: Callable[[str, int], None]
    ) -> None:
        self._objects = objects
        # It lies in memory until the shards are here.
        self._left_bytes = min(int(split_bytes * _SHARE) // num_ranks, _MAX_BYTES)
        self._count = count
        self._partial: dict[Digest, PartialShard | None] = {}

    def read(self, wanted: Sequence[ShardRequest]) -> Mapping[Digest, Shard]:
        """Return the shards, good for the wanted rows; {} when the allowance is used up, or it cannot be done."""
        if not wanted or not self._left_bytes:
            return {}
        try:
            with ThreadPoolExecutor(_REQUESTS_AT_ONCE, thread_name_prefix="datasvc-early") as pool:
                return self._read(wanted, pool)
        except DatasvcError as error:
            # Whoever fetches the whole shard meets the same, tries other sources, and says what is wrong.
            if isinstance(error, CorruptDataError):
                self._count("corrupt", 1)
            self.end()
            return {}

    def forget(self, digest: Digest) -> None:
        """Drop what was read of a shard that is here now."""
        self._partial.pop(digest, None)

    def end(self) -> None:
        """Read nothing early from here on."""
        self._left_bytes = 0
        self._partial.clear()

    def _read(self, wanted: Sequence[ShardRequest], pool: ThreadPoolExecutor) -> Mapping[Digest, Shard]:
        unknown = [each for each in wanted if each.info.digest not in self._partial]
        for each, partial in zip(unknown, pool.map(self._open, unknown), strict=True):
            self._partial[each.info.digest] = partial
        found = {each: partial for each in wanted if (partial := self._partial[each.info.digest]) is not None}
        reads = [(partial, read) for each, partial in found.items() for read in partial.plan(each.rows)]
        size_bytes = sum(read.size_bytes for _, read in reads)
        if len(found) < len(wanted) or size_bytes > self._left_bytes:
            self.end()
            return {}
        self._left_bytes -= size_bytes
        # All requests of all shards side by side.
        spans = [(partial.info.digest, span) for partial, read in reads for span in read.spans]
        contents = pool.map(lambda pair: self._objects.read_range(pair[0], pair[1].offset, pair[1].length), spans)
        for partial, read in reads:
            partial.add(read, [next(contents) for _ in read.spans])
        self._count("early_bytes", size_bytes)
        self._count("origin_bytes", size_bytes)
        return {each.info.digest: partial for each, partial in found.items()}

    def _open(self, wanted: ShardRequest) -> PartialShard | None:
        return open_partial(self._objects, wanted.info, wanted.index)
