"""Replaces the bad objects of a version by copies from other repositories, or deletes the samples that are lost.

A shard is verified as a whole, so one changed byte makes all its samples unreadable. `delete_damaged` stores its
intact samples, those that match the sample index, as a new shard.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
import pyarrow as pa

from datasvc.errors import ConfigError, CorruptDataError, NotFoundError
from datasvc.progress import NO_PROGRESS, Progress
from datasvc.repository import Digest, ObjectInfo, Objects, Repository, Resolved
from datasvc.repository.logs.references import refuse_text
from datasvc.repository.repair import Repair, repair_objects
from datasvc.shards.format.overlaid_shard import open_table_shard
from datasvc.shards.format.reader import Shard
from datasvc.shards.format.salvage import readable_batches, sample_identities
from datasvc.shards.format.sample_index import SampleIndex
from datasvc.shards.format.schema import LABEL, with_redacted
from datasvc.shards.format.shard_table import ShardTable, read_stored_index
from datasvc.shards.lines.commit import check_newest, commit_on_line, find_line, head_of_line
from datasvc.shards.versions.combine import write_shard
from datasvc.shards.versions.dataset import open_dataset
from datasvc.shards.versions.delete import DeleteReport
from datasvc.shards.versions.deletions import Flags, load_deletions, with_deletions
from datasvc.shards.versions.verify import DatasetProblem, VerifyReport, read_unverified, verify
from datasvc.shards.versions.version_entry import changed_entry

# Not "contradictory": such an object matches its digest, so a copy has the same bytes.
_REPAIRABLE: Final = ("missing", "truncated", "changed")


@dataclass(frozen=True)
class DatasetRepairReport:
    """Result of `repair_dataset`.

    Attributes:
        verified: report of the last pass, to which the problems of earlier passes were added.
        repairs: result for each object whose repair was tried.
        remaining: problems that could not be repaired.
    """

    verified: VerifyReport
    repairs: tuple[Repair, ...]
    remaining: tuple[DatasetProblem, ...]


def repair_dataset(
    repository: Repository,
    ref: str,
    copies: Sequence[Repository | str],
    *,
    deep: bool = False,
    progress: Progress = NO_PROGRESS,
) -> DatasetRepairReport:
    """Verify a version and repair its bad objects, in passes, until a pass finds nothing that was not tried.

    Several passes are needed because a bad shard table hides its shards.

    Args:
        repository: repository of the version.
        ref: the version.
        copies: other repositories or their URLs, in the order of their use; without any, nothing is repaired.
        deep: read every byte, see `verify`. Without it, a changed byte of a blob is not found.
        progress: counts the bytes of each checked shard and of each copied part; `begin` is called in each pass.

    Raises:
        ConfigError: this repository is not writable; or see `verify`.
        NotFoundError, CorruptDataError, UnavailableError: see `verify` and `Repository.open`.
    """
    refuse_text(copies, "copies", "repositories")
    version = str(repository.resolve("datasets", ref))
    opened = [copy if isinstance(copy, Repository) else Repository.open(copy) for copy in copies]
    last_pass = verify(repository, version, deep=deep, progress=progress)
    problems = dict.fromkeys(last_pass.problems)  # an ordered set of the problems of all passes
    repairs: dict[Digest, Repair] = {}
    while opened:
        # Each object is tried once: the same copies would fail again.
        untried = [
            problem.digest
            for problem in last_pass.problems
            if problem.kind in _REPAIRABLE and problem.digest not in repairs
        ]
        tried = repair_objects(repository, untried, opened, progress)
        repairs |= {result.digest: result for result in tried}
        if all(result.failure is not None for result in tried):
            break
        last_pass = verify(repository, version, deep=deep, progress=progress)
        problems |= dict.fromkeys(last_pass.problems)
    # The last pass has read the repaired objects, so it counts shards that the first one could not.
    verified = replace(last_pass, problems=tuple(problems))
    return DatasetRepairReport(verified, tuple(repairs.values()), last_pass.problems)


def delete_damaged(
    repository: Repository,
    ref: str,
    *,
    dry_run: bool = False,
    message: str = "",
    progress: Progress = NO_PROGRESS,
) -> DeleteReport:
    """Commit the next version of a data set without the samples that cannot be read.

    Every byte of the version is read. Damaged shards are stored again with their intact samples.

    Args:
        repository: the repository that stores the data set.
        ref: the version to continue, which must be the newest of its line.
        dry_run: only count the lost samples, and store nothing.
        message: text stored with the version.
        progress: counts the bytes of each shard.

    Raises:
        ConfigError: all samples of a split are lost; nothing was committed.
        ConflictError: `ref` is not the newest version of its line; or see `Log.append`.
        NotFoundError, CorruptDataError: a shard table or the deletions cannot be read: repair the version first.
        UnknownOutcomeError, UnavailableError: see `Log.append`, `Objects.read`.
    """
    base, line = find_line(repository, ref)
    head = repository.versions("datasets", base.name).head()
    check_newest(base, line, head_of_line(repository, line, head))
    dataset = open_dataset(repository, str(base))
    progress.begin(sum(split.table.size_bytes for split in dataset.values()))
    results = {
        split.name: _Salvage(repository.objects, split.table, dry_run=dry_run).run(progress)
        for split in dataset.values()
    }
    changed = {split: result.table for split, result in results.items() if result.table is not None}
    deleted = {split: results[split].num_lost for split in changed}
    for split, result in results.items():
        if result.num_lost and result.num_lost == dataset[split].table.num_samples:
            raise ConfigError(f"all samples of split {split!r} of {base} are lost: nothing was committed")
    if dry_run or not changed:
        return DeleteReport(base, deleted, dry_run=dry_run)

    def build(newest: Resolved | None) -> Mapping[str, Any]:
        check_newest(base, line, newest)
        change = {"kind": "delete", "deleted": sum(deleted.values()), "damaged": True}
        return changed_entry(dataset, changed, change, message=message)

    committed = commit_on_line(repository, line, build, head=head)
    return DeleteReport(Resolved("datasets", base.name, committed.number), deleted)


@dataclass(frozen=True)
class _Salvaged:
    """The table of a split without its lost samples (None: nothing is damaged), and their number."""

    table: ShardTable | None
    num_lost: int


@dataclass
class _Salvage:
    """Replaces the damaged shards of a split."""

    objects: Objects
    table: ShardTable
    dry_run: bool
    _flags: dict[int, Flags] = field(default_factory=dict)
    _labels: Counter[int] = field(default_factory=Counter)

    def run(self, progress: Progress) -> _Salvaged:
        """Read all shards; unless it is a dry run, store the intact live samples of damaged ones as new shards."""
        deletions = load_deletions(self.objects, self.table)
        stored, num_live = self.table.stored_per_shard.tolist(), self.table.num_samples
        overlays = self.table.overlay_numbers
        infos: list[ObjectInfo] = []
        indexes: list[Digest | None] = []
        is_damaged, num_kept = False, 0
        for number in range(self.table.num_shards):
            if number in deletions.shards:
                self._flags[number] = deletions.flags(number)
            live = ~self._flags.get(number, np.zeros(stored[number], np.bool_))
            info, index = self.table.shard(number), self.table.index(number)
            batches = self._intact(number, live)
            if batches is None:
                num_kept += int(live.sum())
            else:
                is_damaged = True
                overlays[number] = -1  # the new shard has the values of the overlay
                self._flags.pop(number, None)
                stored[number] = sum(batch.num_rows for batch in batches)
                num_kept += stored[number]
                if stored[number] and not self.dry_run:
                    # The new shard has no purged samples, and thus no bitmap of them.
                    schema = with_redacted(batches[0].schema, np.zeros(stored[number], np.bool_))
                    batches = [batch.replace_schema_metadata(schema.metadata) for batch in batches]
                    info, index = write_shard(self.objects, schema, batches)
                elif not stored[number]:
                    # Count it as a shard of one sample, which is deleted: `with_deletions` leaves out such a shard.
                    stored[number] = 1
                    self._flags[number] = np.ones(1, np.bool_)
            infos.append(info)
            indexes.append(index)
            progress.advance(self.table.shard(number).size_bytes)
        if not is_damaged:
            return _Salvaged(None, 0)
        if not num_kept or self.dry_run:  # the caller refuses an empty split
            return _Salvaged(self.table, num_live - num_kept)
        table = self.table.with_column("digest", [bytes.fromhex(info.digest) for info in infos])
        table = table.with_column("bytes", [info.size_bytes for info in infos])
        table = table.with_column("index", [bytes.fromhex(index) if index else None for index in indexes])
        table = table.with_column("samples", stored).with_overlays(overlays, self.table.overlays)
        labels = dict(sorted(self._labels.items())) if self.table.label_counts else {}
        salvaged = with_deletions(self.objects, replace(table, label_counts=labels), self._flags)
        return _Salvaged(salvaged, num_live - num_kept)

    def _intact(self, number: int, live: Flags) -> list[pa.RecordBatch] | None:
        """Return the intact live samples of a damaged shard; None if the shard and its index are good.

        Purged samples are left out.
        """
        live = live.copy()
        live[self.table.redacted_rows(number)] = False
        index: SampleIndex | None = None
        with suppress(NotFoundError, CorruptDataError):
            index = read_stored_index(self.objects, self.table, number)
        is_index_good = (index is None) == (self.table.index(number) is None)  # good, or there is none
        try:
            shard = open_table_shard(self.objects, self.table, number)
            shard.check_texts()
        except NotFoundError:
            return []
        except CorruptDataError:
            return self._find_intact(number, index, live)
        batches = _select_rows(shard, live)
        self._count_labels(batches)
        # Without its index, a good shard is stored again with a new one.
        return None if is_index_good else batches

    def _find_intact(self, number: int, index: SampleIndex | None, live: Flags) -> list[pa.RecordBatch]:
        """Return the live samples of a damaged shard whose key and digests are in its sample index."""
        if index is None:
            return []  # nothing shows which of the samples that still parse are intact
        columns = (index.table.column(name).to_pylist() for name in index.table.schema.names)
        listed = enumerate(zip(zip(*columns, strict=True), live, strict=True))
        wanted = {identity: row for row, (identity, is_live) in listed if is_live}
        overlay, split = self.table.overlay(self.objects, number), self.table.sample_schema
        batches = []
        for batch in readable_batches(read_unverified(self.objects, self.table.shard(number))):
            try:
                found = sample_identities(batch, index)
                kept = {
                    row: wanted[each] for row, identities in enumerate(found) for each in identities if each in wanted
                }
            except (CorruptDataError, pa.ArrowException, ValueError, LookupError, ArithmeticError):
                continue
            if kept:
                intact = batch.take(pa.array(list(kept)))
                if overlay is not None:
                    rows = np.array(list(kept.values()), np.int64)
                    intact = overlay.apply(intact, rows, overlay.fields(batch.schema, split))
                batches.append(intact)
        self._count_labels(batches)
        return batches

    def _count_labels(self, batches: list[pa.RecordBatch]) -> None:
        if self.table.label_counts:
            for batch in batches:
                if LABEL in batch.schema.names:
                    self._labels.update(label for label in batch.column(LABEL).to_pylist() if label is not None)


def _select_rows(shard: Shard, live: Flags) -> list[pa.RecordBatch]:
    """Return the live samples of a shard; its batches are not copied if all are live."""
    batches, start = [], 0
    for batch in shard.batches:
        flags = live[start : start + batch.num_rows]
        batches.append(batch if flags.all() else batch.filter(pa.array(flags)))
        start += batch.num_rows
    return [batch for batch in batches if batch.num_rows]
