"""Is every object that a data-set version names there, whole and unchanged? If not, which samples are hit?"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, Literal

import numpy as np
import pyarrow as pa

from datasvc.errors import CorruptDataError, NotFoundError
from datasvc.keyed_random import Integers
from datasvc.repository import Digest, ObjectInfo, Objects, Repository
from datasvc.repository.objects.objects import digest_of
from datasvc.repository.store.retries import map_exceptions
from datasvc.shards.format.salvage import marks_of, readable_marks, rows_not_among
from datasvc.shards.format.sample_index import SampleIndex
from datasvc.shards.versions.dataset import Split, open_dataset
from datasvc.shards.versions.deletions import Deletions
from datasvc.shards.versions.split_overlap import (
    Overlap,
    accepted_counts,
    count_overlaps,
    count_unchecked,
    find_overlaps,
)

# Each holds one shard at most, in memory where the repository is remote.
_SHARDS_AT_ONCE = 4
_NAMED_KEYS: Final = 10

Role = Literal["shard table", "deletions", "sample index", "shard"]
Kind = Literal["missing", "truncated", "changed", "contradictory"]


@dataclass(frozen=True)
class DatasetProblem:
    """One object that is not what the version says.

    Attributes:
        kind: "contradictory" is unchanged since it was written, but says something else than what names it.
        role: what the object is.
        split: whose.
        digest: its name.
        detail: what was expected and found.
        shard: number of the shard in its table; None for what belongs to a whole split.
        num_samples: samples that cannot be trusted, deleted ones left out; all that may be hit where nobody can tell.
        keys: the first of them; empty where nobody can tell.
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
        which = f"{self.role} {self.shard}" if self.role == "shard" else self.role
        which += f" of shard {self.shard}" if self.role == "sample index" else ""
        named = ", ".join(self.keys) + (", ..." if len(self.keys) < self.num_samples else "")
        hit = f"{self.num_samples} samples hit" + (f": {named}" if self.keys else "")
        return f"{self.split}: {which} ({self.digest}) is {self.kind}: {self.detail}; {hit}"


@dataclass(frozen=True)
class VerifyReport:
    """What `verify` found.

    Attributes:
        version: the data-set version, "pets@3".
        deep: whether all bytes were read.
        num_shards: shards looked at.
        num_samples: samples of the version.
        size_bytes: bytes of the shards.
        problems: by split and shard; none when all is well.
        overlaps: samples that two splits share, unless so many were accepted when the version was committed.
        num_unchecked: samples without a sample index, whose blobs were not compared with those of other splits.
        accepted: how many shared samples of each kind ("key", "payload") were found and had been accepted.
    """

    version: str
    deep: bool
    num_shards: int
    num_samples: int
    size_bytes: int
    problems: tuple[DatasetProblem, ...]
    overlaps: tuple[Overlap, ...] = ()
    num_unchecked: int = 0
    accepted: Mapping[str, int] = field(default_factory=dict)


def verify(
    repository: Repository,
    ref: str,
    *,
    deep: bool = False,
    begin: Callable[[int], None] | None = None,
    report: Callable[[int], None] | None = None,
) -> VerifyReport:
    """Look for missing, truncated and changed objects of a data-set version, and for samples that splits share.

    All are looked at, whatever is found. What splits share is looked for where all that tells is whole.

    Args:
        repository: where it is.
        ref: the version.
        deep: read every byte: hash each shard, open it, and compare each sample with the sample index. Without it
            shards are looked at by their size; tables, deletions and indexes are always hashed.
        begin: called once, with the bytes of all shards.
        report: called with the bytes of each shard once it was looked at, from several threads.

    Raises:
        ConfigError, NotFoundError: `ref` does not resolve, or something has a later format.
        CorruptDataError: the version's entry was changed.
        UnavailableError: the store did not answer, which says nothing about the data.
    """
    dataset = open_dataset(repository, ref)
    problems: list[DatasetProblem] = []
    readable = []
    for split in dataset.values():
        try:
            readable.append((split, split.table))
        except (NotFoundError, CorruptDataError) as error:
            samples = int(dataset.entry.content["splits"][split.name]["samples"])
            kind = _kind_of(error)
            problems.append(
                DatasetProblem(kind, "shard table", split.name, split.digest, str(error), num_samples=samples)
            )
    size_bytes = sum(table.size_bytes for _, table in readable)
    if begin is not None:
        begin(size_bytes)
    for split, _ in readable:
        problems += _SplitCheck(split, deep=deep).run(report)
    overlaps: list[Overlap] = []
    tables = {split.name: table for split, table in readable}
    accepted = accepted_counts(dataset.entry.content) or {}
    # Where an index, or a shard without one, cannot be read, that is a problem which is named already.
    with suppress(*((NotFoundError, CorruptDataError) if problems else ())):
        overlaps = find_overlaps(repository.objects, tables)
    counts = count_overlaps(overlaps)
    settled = {kind: count for kind, count in counts.items() if count <= accepted.get(kind, 0)}
    return VerifyReport(
        str(dataset.resolved),
        deep,
        sum(table.num_shards for _, table in readable),
        sum(int(each["samples"]) for each in dataset.entry.content["splits"].values()),
        size_bytes,
        tuple(problems),
        tuple(overlap for overlap in overlaps if overlap.kind not in settled),
        count_unchecked(tables) if len(tables) > 1 else 0,
        settled,
    )


class _SplitCheck:
    """Looks at the shards of one split whose table could be read."""

    def __init__(self, split: Split, *, deep: bool) -> None:
        self._split = split
        self._table = split.table
        self._stored = split.table.stored_per_shard
        self._objects: Objects = split.repository.objects
        self._deep = deep
        self._deletions = Deletions.build({})

    def run(self, report: Callable[[int], None] | None) -> list[DatasetProblem]:
        problems = self._check_deletions()

        def check(number: int) -> list[DatasetProblem]:
            found = list(self._check_shard(number))
            if report is not None:
                report(self._table.shard(number).size_bytes)
            return found

        pool = ThreadPoolExecutor(_SHARDS_AT_ONCE, thread_name_prefix="datasvc-verify")
        try:
            for found in pool.map(check, range(self._table.num_shards)):
                problems += found
        finally:
            # A store that does not answer ends this now, not after every other shard was asked for.
            pool.shutdown(cancel_futures=True)
        return problems

    def _check_deletions(self) -> list[DatasetProblem]:
        try:
            self._deletions = self._split.deletions
        except (NotFoundError, CorruptDataError) as error:
            assert self._table.deletions is not None
            kind, samples = _kind_of(error), self._table.num_samples
            digest = self._table.deletions
            return [DatasetProblem(kind, "deletions", self._split.name, digest, str(error), num_samples=samples)]
        return []

    def _check_shard(self, number: int) -> Iterator[DatasetProblem]:
        index: SampleIndex | None = None
        try:
            index = self._read_index(number)
        except (NotFoundError, CorruptDataError) as error:
            digest = self._table.index(number)
            assert digest is not None
            yield DatasetProblem(_kind_of(error), "sample index", self._split.name, digest, str(error), number)
        check = self._check_content if self._deep else self._check_size
        problem = check(number, self._table.shard(number), index)
        if problem is not None:
            yield problem

    def _read_index(self, number: int) -> SampleIndex | None:
        digest = self._table.index(number)
        if digest is None:
            return None
        index = SampleIndex.decode(self._objects.read(digest), self._objects.location(digest))
        if index.num_samples != self._stored[number]:
            raise CorruptDataError(f"it lists {index.num_samples} samples, the shard table {self._stored[number]}")
        return index

    def _check_size(self, number: int, shard: ObjectInfo, index: SampleIndex | None) -> DatasetProblem | None:
        size_bytes = self._objects.size(shard.digest)
        if size_bytes is None:
            return self._problem("missing", number, f"nothing is at {self._objects.location(shard.digest)}", index)
        if size_bytes != shard.size_bytes:
            kind: Kind = "truncated" if size_bytes < shard.size_bytes else "changed"
            return self._problem(kind, number, f"{size_bytes} bytes, expected {shard.size_bytes}", index)
        return None

    def _check_content(self, number: int, shard: ObjectInfo, index: SampleIndex | None) -> DatasetProblem | None:
        problem = self._check_size(number, shard, index)
        if problem is not None and problem.kind == "missing":
            return problem
        try:
            content = _read(self._objects, shard)
        except NotFoundError as error:  # removed since its size was asked for
            return self._problem("missing", number, str(error), index)
        if problem is None and digest_of(memoryview(content)) == shard.digest:
            return self._compare(number, content, index)
        kind = problem.kind if problem else "changed"
        detail = problem.detail if problem else "its bytes do not hash to its name"
        rows = None if index is None else rows_not_among(index, readable_marks(content))
        if rows is not None and not len(rows):
            detail += ", though every sample in it is as it was"
        return self._problem(kind, number, detail, index, rows)

    def _compare(self, number: int, content: pa.Buffer, index: SampleIndex | None) -> DatasetProblem | None:
        """Compare the samples of an unchanged shard with the sample index and the shard table."""
        try:
            reader = pa.ipc.open_file(pa.BufferReader(content))
            batches = (reader.get_batch(batch) for batch in range(reader.num_record_batches))
            marks = [mark for batch in batches for mark in marks_of(batch)]
        except (pa.ArrowException, KeyError) as error:
            return self._problem("contradictory", number, f"it is no shard: {error}", index)
        if len(marks) != self._stored[number]:
            detail = f"it holds {len(marks)} samples, the shard table says {self._stored[number]}"
            return self._problem("contradictory", number, detail, index)
        rows = rows_not_among(index, marks) if index is not None else np.empty(0, np.int64)
        if len(rows):
            return self._problem("contradictory", number, "its samples are not those of its index", index, rows)
        return None

    def _problem(
        self, kind: Kind, number: int, detail: str, index: SampleIndex | None, rows: Integers | None = None
    ) -> DatasetProblem:
        """Describe a bad shard; `rows` of the stored samples are hit, all of them for None."""
        hit = np.zeros(self._stored[number], np.bool_)
        hit[slice(None) if rows is None else rows] = True
        if number in self._deletions.shards:
            hit &= ~self._deletions.flags(number)
        first = np.flatnonzero(hit)[:_NAMED_KEYS]
        keys = index.table.column("key").take(pa.array(first)).to_pylist() if index is not None else []
        digest = self._table.shard(number).digest
        count = int(np.count_nonzero(hit))
        return DatasetProblem(kind, "shard", self._split.name, digest, detail, number, count, tuple(keys))


def _read(objects: Objects, shard: ObjectInfo) -> pa.Buffer:
    """Return whatever bytes lie under a shard's name: mapped where they are local."""
    path = objects.local_path(shard.digest)
    if path is not None:
        with map_exceptions("read", str(path)), pa.memory_map(str(path)) as mapped:
            return mapped.read_buffer()
    sink = io.BytesIO()
    with suppress(CorruptDataError):  # the caller hashes what arrived
        objects.fetch(shard.digest, objects.size(shard.digest) or 0, sink)
    return pa.py_buffer(sink.getbuffer())


def _kind_of(error: Exception) -> Kind:
    return "missing" if isinstance(error, NotFoundError) else "changed"
