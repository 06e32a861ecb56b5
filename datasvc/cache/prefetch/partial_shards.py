"""Reads and verifies single samples, by ranged requests, while their shards are in transfer: a run starts sooner.

`PrefetchingShardStore` uses this module. A shard takes a second or more to arrive, and a sample takes some
milliseconds. But each byte that is read early arrives again with its shard, so only a small share is read early.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from datasvc.errors import CorruptDataError, DatasvcError
from datasvc.repository import Digest, Objects
from datasvc.shards import Shard, ShardRequest
from datasvc.shards.format.partial_reader import PartialShard, open_partial

_MAX_SHARE = 0.02  # of the bytes of a split, for all ranks together
_MAX_BYTES = 512 << 20  # per process: samples stay in memory until their shards are resident
_MAX_REQUESTS = 16


class PartialShardReader:
    """Reads samples of shards that are not resident, up to a limit of bytes. For one thread.

    Args:
        objects: store of the shards.
        split_bytes: size of all shards; all ranks together may read 2 % of it early.
        num_ranks: number of ranks of the job.
        count: called with the name of a counter of the cache and the number to add.
    """

    def __init__(
        self, objects: Objects, split_bytes: int, *, num_ranks: int = 1, count: Callable[[str, int], None]
    ) -> None:
        self._objects = objects
        self._remaining_bytes = min(int(split_bytes * _MAX_SHARE) // num_ranks, _MAX_BYTES)
        self._count = count
        self._partial: dict[Digest, PartialShard | None] = {}  # None: the shard cannot be read by samples

    def read(self, requests: Sequence[ShardRequest]) -> Mapping[Digest, Shard]:
        """Return shards that contain the requested rows.

        If the limit is reached, or a row cannot be read, return {}. Every later call then returns {} too.
        """
        if not requests or not self._remaining_bytes:
            return {}
        try:
            with ThreadPoolExecutor(_MAX_REQUESTS, thread_name_prefix="datasvc-early") as pool:
                return self._read(requests, pool)
        except DatasvcError as error:
            # Not raised: the fetch of the complete shard meets the same error, tries other sources, and reports it.
            if isinstance(error, CorruptDataError):
                self._count("corrupt", 1)
            self.stop()
            return {}

    def forget(self, digest: Digest) -> None:
        """Discard the samples of a shard that is resident now."""
        self._partial.pop(digest, None)

    def stop(self) -> None:
        """Read no more samples, and discard those that were read."""
        self._remaining_bytes = 0
        self._partial.clear()

    def _read(self, requests: Sequence[ShardRequest], pool: ThreadPoolExecutor) -> Mapping[Digest, Shard]:
        """See `read`; `pool` sends the ranged requests in parallel."""
        unopened = [request for request in requests if request.info.digest not in self._partial]
        for request, partial in zip(unopened, pool.map(self._open, unopened), strict=True):
            self._partial[request.info.digest] = partial
        opened = {
            request: partial for request in requests if (partial := self._partial[request.info.digest]) is not None
        }
        reads = [(partial, read) for request, partial in opened.items() for read in partial.plan(request.rows)]
        size_bytes = sum(read.size_bytes for _, read in reads)
        # If one shard cannot be read by samples, the batch waits for it anyway: early reads of the other shards do
        # not make the batch ready sooner.
        if len(opened) < len(requests) or size_bytes > self._remaining_bytes:
            self.stop()
            return {}
        self._remaining_bytes -= size_bytes
        # The spans (byte ranges) of all shards are read in parallel; `contents` is in their order.
        spans = [(partial.info.digest, span) for partial, read in reads for span in read.spans]
        contents = pool.map(lambda pair: self._objects.read_range(pair[0], pair[1].offset, pair[1].length), spans)
        for partial, read in reads:
            partial.add(read, [next(contents) for _ in read.spans])
        self._count("early_bytes", size_bytes)
        self._count("origin_bytes", size_bytes)
        return {request.info.digest: partial for request, partial in opened.items()}

    def _open(self, request: ShardRequest) -> PartialShard | None:
        return open_partial(self._objects, request.info, request.index)
