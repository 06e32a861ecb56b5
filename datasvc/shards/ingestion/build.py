"""Classes to build one unit of an ingest: the work that a worker receives, its result, and the storage of shards.

`build_listed` and `build_streamed` use these classes. A unit is the work of one worker at a time, see `plan`. A
listed unit is one shard of known files; a streamed unit is read in order into several shards. A full shard is stored
in the background while the next one is built, and then recorded: an interrupted ingest continues after it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, BinaryIO, Final, Self, TypeAlias

import pyarrow as pa
from blake3 import blake3

from datasvc.repository import Digest, ObjectInfo, Objects, Repository, Storage
from datasvc.repository.objects.in_place import store_recipe
from datasvc.repository.objects.objects import ObjectWriter
from datasvc.shards.format.compressed_batches import CODEC
from datasvc.shards.format.sample_index import SampleIndex
from datasvc.shards.format.shard_table import TableRow
from datasvc.shards.format.writer import ShardStatistics, ShardWriter
from datasvc.shards.ingestion.plan import BuildOptions, IngestUnit
from datasvc.shards.ingestion.recipes import make_recipe
from datasvc.shards.sources.common.source import BadSample, Source

_MAX_PENDING: Final = 2  # maximum number of complete shards of a unit that are not stored yet


@dataclass(frozen=True)
class IngestWork:
    """Description of an ingest that is sent to every worker.

    Attributes:
        repository_url: the repository to store shards in.
        name: digest of the plan. This and the next two fields identify the journal, see `Repository.journal`.
        fingerprint: fingerprint of the source when it was listed.
        attempt: attempt of the journal, see `Journal.begin`.
        source: the source to read. A listed source is sent without its listing: the units have the files.
        schema: columns of the shards.
        options: how shards are built.
        classes: class names by stored label.
        labels: stored label of each label of the source; None if they are the same.
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
class BuiltShard:
    """A stored shard.

    Attributes:
        split: split of its samples.
        ordinal: its position among the shards of its unit and split.
        row: its row of the shard table.
    """

    split: str
    ordinal: int
    row: TableRow

    def to_dict(self) -> dict[str, Any]:
        """Return the shard as JSON values for the journal."""
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
            "saved_bytes": statistics.saved_bytes,
        }

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> BuiltShard:
        """Return the shard that `to_dict` described."""
        statistics = ShardStatistics(
            content["samples"],
            content["max_width"],
            content["max_height"],
            content["max_sample_bytes"],
            {int(label): count for label, count in content["label_counts"].items()},
            content["image_kinds"],
            content.get("saved_bytes"),
        )
        shard = ObjectInfo(Digest(content["digest"]), content["bytes"])
        return cls(content["split"], content["ordinal"], TableRow(shard, statistics, Digest(content["index"])))


EarlierShards: TypeAlias = Mapping[tuple[str, int], "BuiltShard | None"]
"""Shards of one unit that are not built, by split and ordinal: an interrupted run stored them; None: not needed."""


@dataclass(frozen=True)
class UnitResult:
    """The result of one unit.

    Attributes:
        number: number of the unit.
        shards: its shards that have samples, in table order.
        bad: samples that were left out.
    """

    number: int
    shards: Sequence[BuiltShard]
    bad: Sequence[BadSample]

    def to_dict(self) -> dict[str, Any]:
        """Return the result as JSON values for the journal."""
        return {
            "unit": self.number,
            "shards": [shard.to_dict() for shard in self.shards],
            "bad": [[sample.split, sample.key, sample.reason] for sample in self.bad],
        }

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> UnitResult:
        """Return the result that `to_dict` described."""
        shards = [BuiltShard.from_dict(shard) for shard in content["shards"]]
        return cls(content["unit"], shards, [BadSample(*sample) for sample in content["bad"]])


def describe_compressed(splits: Mapping[str, Sequence[TableRow]]) -> dict[str, dict[str, Any]]:
    """Return how the new shards of each split with compressed columns were compressed, for the log entry."""
    saved = {
        split: [row.statistics.saved_bytes for row in rows if row.statistics.saved_bytes is not None]
        for split, rows in splits.items()
    }
    return {
        split: {"codec": CODEC, "bytes": sum(row.shard.size_bytes for row in rows), "saved_bytes": sum(saved[split])}
        for split, rows in splits.items()
        if saved[split]
    }


class HashedObjects(Objects):
    """Objects of which new shards are hashed and not stored.

    Args:
        storage: file tree of the repository, for the objects that `put` stores.
        sink: receives the bytes of new shards; None: they are dropped.
    """

    def __init__(self, storage: Storage, sink: BinaryIO | None = None) -> None:
        super().__init__(storage)
        self._sink = sink

    def begin(self) -> ObjectWriter:
        """Open a new shard."""
        return _HashingWriter(self._sink)

    def finish(self, writer: ObjectWriter) -> ObjectInfo:
        """Return digest and size of the shard."""
        return writer.info

    def abandon(self, writer: ObjectWriter) -> None:
        """Do nothing: there is no file."""


class _HashingWriter(ObjectWriter):
    """Hashes what is written, and passes it to a sink; see `HashedObjects`."""

    def __init__(self, sink: BinaryIO | None) -> None:
        self._sink, self._hash, self._size_bytes = sink, blake3(), 0

    def write(self, content: bytes | memoryview) -> int:
        view = memoryview(content).cast("B")
        self._hash.update(view)
        if self._sink is not None:
            self._sink.write(view)
        self._size_bytes += view.nbytes
        return view.nbytes


class ShardOutput:
    """A shard that is being built.

    Attributes:
        writer: receives the samples.
        keys, samples, payloads: keys, sample digests and payload digests for the sample index, set before `store`.
        image_kinds: number of images by format; the builder counts them, because `writer` does not read images.
    """

    def __init__(self, objects: Objects, schema: pa.Schema) -> None:
        self._objects = objects
        self._object = objects.begin()
        self.writer = ShardWriter(self._object, schema)
        self.keys: Sequence[str] | pa.Array = []
        self.samples: Sequence[bytes] | pa.Array = []
        self.payloads: Sequence[bytes] | pa.Array = []
        self.image_kinds: Counter[str] = Counter()

    def close(self) -> ShardStatistics:
        """Write the remaining samples and return the statistics. The object is not stored yet."""
        return replace(self.writer.close(), image_kinds=dict(sorted(self.image_kinds.items())))

    def store(self, statistics: ShardStatistics) -> TableRow:
        """Store the closed shard and its index. Call this once, from any thread. Raise UnavailableError."""
        index = SampleIndex.build(self.keys, self.samples, self.payloads, self.writer.layout)
        stored = self._objects.put(index.encode())
        return TableRow(self._objects.finish(self._object), statistics, stored.digest)

    @property
    def digest(self) -> Digest:
        """Digest of the bytes written so far."""
        return self._object.info.digest

    def abandon(self) -> None:
        """Remove the bytes written so far."""
        self._objects.abandon(self._object)


class ShardFinisher:
    """Opens the shards of a unit, stores each full shard in the background, and records it in the journal.

    Shards that are not stored when the `with` block ends are removed.

    Attributes:
        needs_index: whether `ShardOutput.store` is called, which needs keys and digests.
    """

    needs_index = True

    def __init__(self, work: IngestWork, unit: IngestUnit, repository: Repository) -> None:
        self._work = work
        self._unit = unit
        self._objects = HashedObjects(repository.storage) if work.options.in_place else repository.objects
        self._journal = repository.journal(work.name, work.fingerprint, work.attempt)
        # Only streamed units have parts. A listed unit has one shard, so the record of the unit is enough.
        self._records_shards = bool(unit.parts)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="datasvc-store")
        self._pending: list[Future[BuiltShard]] = []
        self._unfinished: list[ShardOutput] = []
        self._stored: list[BuiltShard] = []

    def open(self) -> ShardOutput:
        """Return a new, empty shard, which is removed at the end unless `add` stores it. Raise UnavailableError."""
        output = ShardOutput(self._objects, self._work.schema)
        self._unfinished.append(output)
        return output

    def add(self, split: str, ordinal: int, output: ShardOutput) -> None:
        """Store a complete shard in the background. Raise the error of an earlier shard that could not be stored."""
        statistics = output.close()
        # Wait if storage is slower than the build, to bound the memory of buffered shards.
        while len(self._pending) >= _MAX_PENDING:
            self._stored.append(self._pending.pop(0).result())
        self._pending.append(self._pool.submit(self._store, split, ordinal, output, statistics))

    def keep(self, shard: BuiltShard | None) -> None:
        """Add a shard that an interrupted run stored; it is not stored again."""
        assert shard is not None
        self._stored.append(shard)

    def finish(self, bad: Sequence[BadSample]) -> UnitResult:
        """Wait until every shard is stored, record the unit and return its result."""
        self._stored += [future.result() for future in self._pending]
        result = UnitResult(
            self._unit.number, sorted(self._stored, key=lambda shard: (shard.split, shard.ordinal)), bad
        )
        # Record the unit only after all shards are stored, because a recorded unit is never built again.
        self._journal.write(f"{self._unit.number:08d}", result.to_dict())
        return result

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
        for output in self._unfinished:
            output.abandon()

    def _store(self, split: str, ordinal: int, output: ShardOutput, statistics: ShardStatistics) -> BuiltShard:
        built = BuiltShard(split, ordinal, output.store(statistics))
        self._unfinished.remove(output)
        if self._work.options.in_place:
            recipe = make_recipe(
                self._work.source,
                self._unit,
                self._work.options,
                schema=self._work.schema,
                split=split,
                classes=self._work.classes,
                labels=self._work.labels,
                size_bytes=built.row.shard.size_bytes,
            )
            store_recipe(self._objects.storage, built.row.shard.digest, recipe)
        if self._records_shards:
            # Record the shard only after it is stored, because the next run does not build a recorded shard again.
            self._journal.write(f"{self._unit.number:08d}-{split}-{ordinal:06d}", built.to_dict())
        return built
