"""From a unit of work to stored shards. What a worker process needs for it, and what it gives back.

A shard is synced or uploaded in the background while the next one is made, and recorded in the journal afterwards.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Final, Self

import pyarrow as pa

from datasvc.repository import Digest, ObjectInfo, Repository
from datasvc.repository.logs.journal import Journal
from datasvc.shards.format.sample_index import SampleIndex
from datasvc.shards.format.shard_table import TableRow
from datasvc.shards.format.writer import ShardStatistics, ShardWriter
from datasvc.shards.ingestion.build_options import BuildOptions
from datasvc.shards.sources.common.source import BadSample, Source

_FINISHING: Final = 2  # shards being synced or uploaded, beside the one being made


@dataclass(frozen=True)
class IngestWork:
    """What every worker of an ingest knows. It travels to worker processes.

    Attributes:
        repository_url: where shards are stored.
        name: of the work, for its journal.
        fingerprint: of the source, as it was listed.
        attempt: of the journal.
        source: what is read; of a listed one without its listing, which the units carry.
        schema: columns of the shards.
        options: how shards are made.
        classes: names of the stored labels, index by index.
        labels: stored label of each label of the source; None where they are the same.
    """

    repository_url: str
    name: str
    fingerprint: str
    attempt: str
    source: Source
    schema: pa.Schema
    options: BuildOptions
    classes: tuple[str, ...] = ()
    labels: tuple[int, ...] | None = None


@dataclass(frozen=True)
class IngestProgress:
    """What was done since the last report."""

    num_samples: int = 0
    size_bytes: int = 0
    num_shards: int = 0


Report = Callable[[IngestProgress], None]


@dataclass(frozen=True)
class BuiltShard:
    """A stored shard.

    Attributes:
        split: of its samples.
        ordinal: its place among the shards of its unit and split.
        row: what the shard table will say of it.
    """

    split: str
    ordinal: int
    row: TableRow

    def to_dict(self) -> dict[str, Any]:
        """Return the shard as JSON values."""
        statistics = self.row.statistics
        return {
            "split": self.split,
            "ordinal": self.ordinal,
            "digest": self.row.shard.digest,
            "bytes": self.row.shard.size_bytes,
            "index": self.row.index,
            "samples": statistics.num_samples,
            "max_width": statistics.max_width,
            "max_height": statistics.max_height,
            "max_sample_bytes": statistics.max_sample_bytes,
            "label_counts": {str(label): count for label, count in statistics.label_counts.items()},
            "image_kinds": dict(statistics.image_kinds),
        }

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> BuiltShard:
        """Return what `to_dict` gave."""
        statistics = ShardStatistics(
            content["samples"],
            content["max_width"],
            content["max_height"],
            content["max_sample_bytes"],
            {int(label): count for label, count in content["label_counts"].items()},
            content["image_kinds"],
        )
        shard = ObjectInfo(Digest(content["digest"]), content["bytes"])
        return cls(content["split"], content["ordinal"], TableRow(shard, statistics, Digest(content["index"])))


@dataclass(frozen=True)
class UnitResult:
    """What came of a unit.

    Attributes:
        number: of the unit.
        shards: those with samples in them, in table order.
        bad: samples that were left out.
    """

    number: int
    shards: Sequence[BuiltShard]
    bad: Sequence[BadSample]

    def to_dict(self) -> dict[str, Any]:
        """Return the result as JSON values."""
        return {
            "unit": self.number,
            "shards": [shard.to_dict() for shard in self.shards],
            "bad": [[sample.split, sample.key, sample.reason] for sample in self.bad],
        }

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> UnitResult:
        """Return what `to_dict` gave."""
        shards = [BuiltShard.from_dict(shard) for shard in content["shards"]]
        return cls(content["unit"], shards, [BadSample(*sample) for sample in content["bad"]])


class ShardOutput:
    """A shard being made: its samples, and what its index will say of them.

    Args:
        repository: where it is stored.
        schema: its columns.
    """

    def __init__(self, repository: Repository, schema: pa.Schema) -> None:
        self._objects = repository.objects
        self._object = repository.objects.begin()
        self.writer = ShardWriter(self._object, schema)
        self.keys: Sequence[str] | pa.Array = []
        self.samples: Sequence[bytes] | pa.Array = []
        self.payloads: Sequence[bytes] | pa.Array = []
        self.image_kinds: Counter[str] = Counter()

    def close(self) -> ShardStatistics:
        """Write what is left; returns the statistics. The object is not stored yet."""
        return replace(self.writer.close(), image_kinds=dict(sorted(self.image_kinds.items())))

    def store(self, statistics: ShardStatistics) -> TableRow:
        """Store the closed shard and its index. Called once, from any thread. Raises UnavailableError."""
        index = SampleIndex.build(self.keys, self.samples, self.payloads, self.writer.layout)
        stored = self._objects.put(index.encode())
        return TableRow(self._objects.finish(self._object), statistics, stored.digest)

    def abandon(self) -> None:
        """Remove what was written."""
        self._objects.abandon(self._object)


class ShardFinisher:
    """Opens the shards of a unit, stores each in the background once it is full, and records it in the journal.

    A bounded number is under way at once. Whatever is not stored when the block ends is removed.

    Args:
        work: what is done.
        unit: number of the unit whose shards these are.
        repository: where they are stored.
        journal: of the ingest.
        records_shards: record every shard; without it only the whole unit is.
    """

    def __init__(
        self, work: IngestWork, unit: int, repository: Repository, journal: Journal, *, records_shards: bool
    ) -> None:
        self._schema = work.schema
        self._unit = unit
        self._repository = repository
        self._journal = journal
        self._records_shards = records_shards
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="datasvc-store")
        self._under_way: list[Future[BuiltShard]] = []
        self._unfinished: list[ShardOutput] = []
        self._stored: list[BuiltShard] = []

    def open(self) -> ShardOutput:
        """Return a new, empty shard. Raises UnavailableError."""
        output = ShardOutput(self._repository, self._schema)
        self._unfinished.append(output)
        return output

    def add(self, split: str, ordinal: int, output: ShardOutput) -> None:
        """Take a shard with all its samples over. Raises what storing an earlier one met."""
        statistics = output.close()
        while len(self._under_way) >= _FINISHING:
            self._stored.append(self._under_way.pop(0).result())
        self._under_way.append(self._pool.submit(self._store, split, ordinal, output, statistics))

    def keep(self, shard: BuiltShard) -> None:
        """Count a shard in that an earlier, interrupted run has stored."""
        self._stored.append(shard)

    def finish(self, bad: Sequence[BadSample]) -> UnitResult:
        """Wait for every shard, record the unit and return what came of it."""
        self._stored += [future.result() for future in self._under_way]
        result = UnitResult(self._unit, sorted(self._stored, key=lambda shard: (shard.split, shard.ordinal)), bad)
        self._journal.write(f"{self._unit:08d}", result.to_dict())
        return result

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
        for output in self._unfinished:
            output.abandon()

    def _store(self, split: str, ordinal: int, output: ShardOutput, statistics: ShardStatistics) -> BuiltShard:
        built = BuiltShard(split, ordinal, output.store(statistics))
        self._unfinished.remove(output)
        if self._records_shards:
            self._journal.write(shard_record(self._unit, split, ordinal), built.to_dict())
        return built


def shard_record(unit: int, split: str, ordinal: int) -> str:
    """Return the name of the journal's record of one shard of a streamed unit."""
    return f"{unit:08d}-{split}-{ordinal:06d}"
