"""Verification of a data-set version: find missing and corrupt objects, and the samples that they affect.

An error of the store is raised; every other problem is collected, so that one report names all damage.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from typing import Final, Literal

import numpy as np
import pyarrow as pa

from datasvc.errors import ConfigError, CorruptDataError, NotFoundError, SourceChangedError
from datasvc.keyed_random import Integers
from datasvc.printable import count_text
from datasvc.progress import NO_PROGRESS, Progress
from datasvc.repository import Digest, ObjectInfo, Objects, Repository
from datasvc.repository.objects.objects import digest_of
from datasvc.repository.store.retries import map_exceptions
from datasvc.shards.format.ipc_reader import PARSE_ERRORS, IpcReader, ObjectFiles
from datasvc.shards.format.overlaid_shard import overlaid
from datasvc.shards.format.reader import Shard
from datasvc.shards.format.salvage import missing_rows, readable_identities, sample_identities
from datasvc.shards.format.sample_index import SampleIndex
from datasvc.shards.format.schema import check_shard_schema
from datasvc.shards.format.shard_table import read_stored_index
from datasvc.shards.versions.dataset import Split, read_version
from datasvc.shards.versions.deletions import Deletions
from datasvc.shards.versions.label_conflicts import LabelConflict, find_label_conflicts
from datasvc.shards.versions.split_overlap import (
    Overlap,
    accepted_counts,
    count_overlaps,
    count_unchecked,
    find_overlaps,
)
from datasvc.threads import map_in_threads

# Number of threads that check shards. Each holds one shard at a time, in memory if the repository is remote.
_SHARDS_AT_ONCE = 4
# The same without `deep`. There are more, because a shard of a remote repository then takes small requests only.
_STRUCTURES_AT_ONCE = 16
_MAX_LISTED_KEYS: Final = 10

Role = Literal["shard table", "deletions", "weights", "packs", "aspects", "columns", "sample index", "shard"]
Kind = Literal["missing", "truncated", "changed", "contradictory"]


@dataclass(frozen=True)
class DatasetProblem:
    """One object that does not match the version that refers to it.

    Attributes:
        kind: the problem. "contradictory": the object matches its digest, but not the object that refers to it.
        role: the type of the object.
        split: name of the split that refers to it; with the name of a view, such as "train[small]", if the view does.
        digest: digest of the object.
        detail: the expected and the actual state.
        shard: number of the shard in its table; None for an object that belongs to a whole split.
        num_samples: number of live (not deleted) samples that are affected, or an upper bound.
        keys: keys of the first affected samples; empty if the keys cannot be read.
    """

    kind: Kind
    role: Role
    split: str
    digest: Digest
    detail: str
    shard: int | None = None
    num_samples: int = 0
    keys: tuple[str, ...] = ()

    def __str__(self) -> str:
        subject = f"{self.role} {self.shard}" if self.role == "shard" else self.role
        subject += f" of shard {self.shard}" if self.role == "sample index" else ""
        keys = ", ".join(self.keys) + (", ..." if len(self.keys) < self.num_samples else "")
        affected = f"{count_text(self.num_samples, 'sample')} affected" + (f": {keys}" if self.keys else "")
        return f"{self.split}: {subject} ({self.digest}) is {self.kind}: {self.detail}; {affected}"


@dataclass(frozen=True)
class VerifyReport:
    """The result of `verify`.

    Attributes:
        version: the data-set version, such as "pets@3".
        deep: whether every byte was read.
        num_shards: number of shards checked.
        num_samples: number of live samples in the version.
        size_bytes: bytes of all shards checked.
        problems: in the order of splits and shards; empty for an intact version.
        overlaps: samples that two splits share, without the kinds in `accepted`.
        conflicts: samples whose label contradicts that of an equal sample.
        num_unchecked: number of samples without a sample index; their blobs were not compared with other splits.
        accepted: number of shared samples by kind: "key" or "payload" (an image or other blobs). It has only the
            kinds with no more shared samples than the commit accepted.
    """

    version: str
    deep: bool
    num_shards: int
    num_samples: int
    size_bytes: int
    problems: tuple[DatasetProblem, ...]
    overlaps: tuple[Overlap, ...] = ()
    conflicts: tuple[LabelConflict, ...] = ()
    num_unchecked: int = 0
    accepted: Mapping[str, int] = field(default_factory=dict)


def verify(repository: Repository, ref: str, *, deep: bool = False, progress: Progress = NO_PROGRESS) -> VerifyReport:
    """Find missing and changed objects of a data-set version and its named views, and samples shared by two splits.

    A problem does not end the check: every object is checked.

    Args:
        repository: the repository that stores the version.
        ref: the version.
        deep: read every byte: hash each shard, open it, and compare each sample with the sample index. Without
            `deep`, only the size and the structure of a shard are checked: its footer and the headers of its record
            batches, and for a local shard also the offsets and texts in the batches. If the structure is wrong, the
            shard is read as with `deep`. Tables, deletions and indexes are always hashed; weights of views
            only with `deep`, otherwise they must exist.
        progress: counts the bytes of each shard that was checked.

    Raises:
        ConfigError, NotFoundError: `ref` does not resolve, or an object has a newer format than this datasvc reads.
        CorruptDataError: the log entry of the version, or of a view, is corrupt; or the splits cannot be compared.
        UnavailableError: the store did not respond, so the state of the data is unknown.
    """
    dataset = read_version(repository, repository.resolve("datasets", ref))
    problems: list[DatasetProblem] = []
    readable = []
    for split in dataset.values():
        try:
            readable.append((split, split.table))
        except (NotFoundError, CorruptDataError) as error:
            kind = _kind_of(error)
            samples = int(dataset.entry.content["splits"][split.name]["samples"])
            problem = DatasetProblem(kind, "shard table", split.name, split.digest, str(error), num_samples=samples)
            problems.append(problem)
    # Shards of an unreadable table are unknown, so their bytes are not counted.
    size_bytes = sum(table.size_bytes for _, table in readable)
    progress.begin(size_bytes)
    for split, _ in readable:
        problems += _SplitCheck(split, deep=deep).run(progress)
    overlaps: list[Overlap] = []
    conflicts: list[LabelConflict] = []
    tables = {split.name: table for split, table in readable}
    accepted = accepted_counts(dataset.entry.content) or {}
    # The comparison of splits ends at an index or shard that cannot be read. If there are `problems`, they include
    # this object, so the error is suppressed. Otherwise it is new, and is raised.
    suppressed: tuple[type[Exception], ...] = (NotFoundError, CorruptDataError) if problems else ()
    with suppress(*suppressed):
        overlaps = find_overlaps(repository.objects, tables)
        conflicts = find_label_conflicts(repository.objects, tables)
    with suppress(*suppressed):
        problems.extend(_check_views(repository, str(dataset.resolved), deep=deep))
    counts = count_overlaps(overlaps)
    # Later deletions do not lower the accepted number in the log entry, so a lower count is accepted too.
    within_accepted = {kind: count for kind, count in counts.items() if count <= accepted.get(kind, 0)}
    return VerifyReport(
        str(dataset.resolved),
        deep,
        sum(table.num_shards for _, table in readable),
        sum(int(split["samples"]) for split in dataset.entry.content["splits"].values()),
        size_bytes,
        tuple(problems),
        tuple(overlap for overlap in overlaps if overlap.kind not in within_accepted),
        tuple(conflicts),
        count_unchecked(tables) if len(tables) > 1 else 0,
        within_accepted,
    )


def _check_views(repository: Repository, version: str, *, deep: bool) -> Iterator[DatasetProblem]:
    """Check what the named views of a version have beside its shards: their tables, deletions and weights."""
    # A static import would make versions depend on their views.
    views = import_module("datasvc.shards.views.named").read_views(repository, version.partition("@")[0])
    for view in views.values():
        if view.dataset == version:
            split = Split(f"{view.split}[{view.name}]", version, repository, view.table)
            try:
                check = _SplitCheck(split, deep=deep)
            except (NotFoundError, CorruptDataError) as error:
                kind, samples = _kind_of(error), view.samples
                yield DatasetProblem(kind, "shard table", split.name, view.table, str(error), num_samples=samples)
            else:
                yield from check.run_view()


class _SplitCheck:
    """Checks the deletions, sample indexes and shards of one split whose shard table is readable."""

    def __init__(self, split: Split, *, deep: bool) -> None:
        self._split = split
        self._table = split.table
        self._stored = split.table.stored_per_shard  # samples in each shard's file, including deleted ones
        self._objects: Objects = split.repository.objects
        self._deep = deep
        self._can_overlay = True
        self._deletions = Deletions.build({})  # none, until `_check_deletions` has read them

    def run(self, progress: Progress) -> list[DatasetProblem]:
        problems = [*self._check_deletions(), *self._check_overlays()]

        def check(number: int) -> list[DatasetProblem]:
            shard_problems = list(self._check_shard(number))
            progress.advance(self._table.shard(number).size_bytes)
            return shard_problems

        num_threads = _SHARDS_AT_ONCE if self._deep else _STRUCTURES_AT_ONCE
        for shard_problems in map_in_threads(check, range(self._table.num_shards), num_threads):
            problems += shard_problems
        return problems

    def run_view(self) -> Iterator[DatasetProblem]:
        """Check the objects that only a view has."""
        yield from self._check_deletions()
        for pack in self._table.packs:
            try:
                if self._deep or self._objects.size(pack.digest) is None:
                    self._objects.read(pack.digest)  # raises for wrong bytes
            except (NotFoundError, CorruptDataError) as error:
                name, samples = self._split.name, self._table.num_samples
                what: Role = "weights" if self._table.packing is None else "packs"
                if pack not in self._table.weights and self._table.grouping is not None:
                    what = "aspects"
                yield DatasetProblem(_kind_of(error), what, name, pack.digest, str(error), num_samples=samples)

    def _check_deletions(self) -> list[DatasetProblem]:
        try:
            self._deletions = self._split.deletions
        except (NotFoundError, CorruptDataError) as error:
            digest = self._table.deletions
            assert digest is not None, "a split without a deletions object reads none"
            # Without the bitmaps, it is unknown which samples are live: all count as affected.
            kind, samples = _kind_of(error), self._table.num_samples
            return [DatasetProblem(kind, "deletions", self._split.name, digest, str(error), num_samples=samples)]
        return []

    def _check_overlays(self) -> Iterator[DatasetProblem]:
        """Check the objects with values of columns; packs by their size alone without `deep`."""
        small = {info for part in self._table.overlays.parts() for info in part.small}
        for info in self._table.overlays.objects():
            try:
                if self._deep or info in small or self._objects.size(info.digest) != info.size_bytes:
                    self._objects.read(info.digest)  # raises for wrong bytes
            except (NotFoundError, CorruptDataError) as error:
                self._can_overlay = False
                name, samples = self._split.name, self._table.num_samples
                yield DatasetProblem(_kind_of(error), "columns", name, info.digest, str(error), num_samples=samples)

    def _checked(self, number: int, shard: Shard) -> Shard:
        """Return a shard after a check against the table, unless overlays that it needs for it are damaged."""
        if self._can_overlay:
            overlaid(self._objects, self._table, number, shard)
        return shard

    def _check_shard(self, number: int) -> Iterator[DatasetProblem]:
        index: SampleIndex | None = None
        try:
            index = read_stored_index(self._objects, self._table, number)
        except (NotFoundError, CorruptDataError) as error:
            digest = self._table.index(number)
            assert digest is not None, "nothing is read for a shard without an index"
            yield DatasetProblem(_kind_of(error), "sample index", self._split.name, digest, str(error), number)
        check = self._check_content if self._deep else self._check_structure
        problem = check(number, self._table.shard(number), index)
        if problem is not None:
            yield problem

    # `index` in the methods below is the sample index of the shard; None if there is none, or if it cannot be read.

    def _check_size(self, number: int, shard: ObjectInfo, index: SampleIndex | None) -> DatasetProblem | None:
        size_bytes = self._objects.size(shard.digest)
        if size_bytes is None:
            return self._shard_problem(
                "missing", number, f"nothing is at {self._objects.location(shard.digest)}", index
            )
        if size_bytes != shard.size_bytes:
            kind: Kind = "truncated" if size_bytes < shard.size_bytes else "changed"
            return self._shard_problem(kind, number, f"{size_bytes} bytes, expected {shard.size_bytes}", index)
        return None

    def _check_structure(self, number: int, shard: ObjectInfo, index: SampleIndex | None) -> DatasetProblem | None:
        """Check a shard without reading its blobs; if this finds a fault, as `_check_content` does."""
        problem = self._check_size(number, shard, index)
        if problem is not None:
            return problem
        path = self._objects.local_path(shard.digest)
        try:
            if path is not None:
                self._checked(number, Shard.map(path)).check_texts()
            else:
                with ObjectFiles(self._split.repository.storage, {shard.digest: shard.size_bytes}, builds=False).open(
                    shard.digest
                ) as file:
                    reader = IpcReader(file, self._objects.location(shard.digest), compressed=True)
                    check_shard_schema(reader.schema, self._objects.location(shard.digest))
                    for batch in range(reader.num_batches):
                        reader.check(batch)
        except (NotFoundError, CorruptDataError) as error:
            try:
                if isinstance(error, NotFoundError) and self._objects.build(shard.digest, None):
                    return None  # attached, and its file is there; only a deep check reads it
            except (NotFoundError, SourceChangedError) as changed:
                return self._shard_problem(_kind_of(changed), number, str(changed), index)
            # Read the whole shard, to find whether its bytes changed and which samples are affected.
            return self._check_content(number, shard, index)
        return None

    def _check_content(self, number: int, shard: ObjectInfo, index: SampleIndex | None) -> DatasetProblem | None:
        """Check every byte of a shard against its digest, and its samples against index and table."""
        problem = self._check_size(number, shard, index)
        # Read even a shard of the wrong size, to find which of its samples are intact.
        if problem is not None and problem.kind == "missing":
            return problem
        try:
            content = read_unverified(self._objects, shard)
        except NotFoundError as error:  # deleted after `_check_size` found it, or its file in place is
            return self._shard_problem("missing", number, str(error), index)
        except SourceChangedError as error:
            return self._shard_problem("changed", number, str(error), index)
        if problem is None and digest_of(memoryview(content)) == shard.digest:
            return self._compare(number, content, index)
        kind = problem.kind if problem else "changed"
        detail = problem.detail if problem else "its bytes do not match its digest"
        # Without the index, it is unknown which samples are intact: all count as affected.
        rows = None if index is None else missing_rows(index, readable_identities(content, index))
        if rows is not None and not len(rows):
            detail += ", but every sample in it is intact"
        return self._shard_problem(kind, number, detail, index, rows)

    def _compare(self, number: int, content: pa.Buffer, index: SampleIndex | None) -> DatasetProblem | None:
        """Compare the samples of a shard that matches its digest with the sample index and the shard table."""
        try:
            reader = IpcReader(pa.BufferReader(content), "the shard", compressed=True)
            opened = self._checked(number, Shard(reader.schema, reader.batches(), "it"))
            identities = {each for batch in opened.batches for row in sample_identities(batch, index) for each in row}
        except (CorruptDataError, *PARSE_ERRORS) as error:
            if isinstance(error, ConfigError):
                raise
            return self._shard_problem("contradictory", number, f"it is not a valid shard: {error}", index)
        rows = missing_rows(index, identities) if index is not None else np.empty(0, np.int64)
        if len(rows):
            detail = "its samples do not match its sample index"
            return self._shard_problem("contradictory", number, detail, index, rows)
        return None

    def _shard_problem(
        self, kind: Kind, number: int, detail: str, index: SampleIndex | None, rows: Integers | None = None
    ) -> DatasetProblem:
        """Describe a bad shard. `rows` are the affected rows in its file; None stands for all rows."""
        if rows is None and number not in self._deletions.shards:
            # Do not make an array of all rows: a wrong table may list more rows than fit in memory.
            count, first_rows = int(self._stored[number]), np.arange(min(self._stored[number], _MAX_LISTED_KEYS))
        else:
            affected = np.zeros(self._stored[number], np.bool_)
            affected[slice(None) if rows is None else rows] = True
            if number in self._deletions.shards:
                affected &= ~self._deletions.flags(number)
            count, first_rows = int(np.count_nonzero(affected)), np.flatnonzero(affected)[:_MAX_LISTED_KEYS]
        keys = index.table.column("key").take(pa.array(first_rows)).to_pylist() if index is not None else []
        digest = self._table.shard(number).digest
        return DatasetProblem(kind, "shard", self._split.name, digest, detail, number, count, tuple(keys))


def read_unverified(objects: Objects, shard: ObjectInfo) -> pa.Buffer:
    """Return the bytes stored under a shard's digest, which may be corrupt; they are mapped if the file is local."""
    path = objects.local_path(shard.digest)
    if path is not None and path.exists():
        with map_exceptions("read", str(path)), pa.memory_map(str(path)) as mapped:
            return mapped.read_buffer()
    sink = io.BytesIO()
    # `fetch` writes all bytes before it raises an error about their digest.
    with suppress(CorruptDataError):
        objects.fetch(shard.digest, objects.size(shard.digest) or 0, sink)
    return pa.py_buffer(sink.getbuffer())


def _kind_of(error: Exception) -> Kind:
    return "missing" if isinstance(error, NotFoundError) else "changed"
