"""The single commit of an ingest: a new version from its tables, or the newest version with its samples appended.

An ingest commits at most once: its log entry has an id. By that id, the same ingest finds the version that it
committed before it was killed, or that an identical ingest committed concurrently.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from functools import cached_property
from typing import Any, Final

import numpy as np

from datasvc.errors import ConflictError
from datasvc.repository import Entry, Repository
from datasvc.repository.objects.objects import digest_of
from datasvc.shards.format.shard_table import ShardTable
from datasvc.shards.versions.combine import OnCommon, append_splits, keep_splits
from datasvc.shards.versions.dataset import open_dataset
from datasvc.shards.versions.diff import find_partners
from datasvc.shards.versions.split_overlap import (
    ENTRY_FIELD,
    OnSplitOverlap,
    Overlap,
    accepted_counts,
    settle_overlaps,
)
from datasvc.shards.versions.version_entry import VAL_FRACTION, describe_tables, read_val_fraction

LEFT_OUT: Final = "left_out"
# Number of newest entries that are searched for the id.
_SEARCHED_ENTRIES: Final = 64


class IngestCommit:
    """Commits the tables exactly once, even if other writers or an identical ingest commit concurrently.

    Args:
        repository: the repository to commit to.
        name: name of the data set.
        tables: shard tables by split; all their shards are stored.
        about: further fields of the log entry.
        attempt: attempt of the ingest's journal.
        append: add the samples to those of the newest version.
        on_common: as in `ingest`.
        on_overlap: as in `ingest`.
        keys_are_places: as in `settle_overlaps`.

    Attributes:
        overlaps: samples that two splits share, in the last attempt.
    """

    def __init__(
        self,
        repository: Repository,
        name: str,
        tables: Mapping[str, ShardTable],
        about: Mapping[str, Any],
        *,
        attempt: str,
        append: bool,
        on_common: OnCommon,
        on_overlap: OnSplitOverlap,
        keys_are_places: bool,
    ) -> None:
        self.overlaps: list[Overlap] = []
        self._repository = repository
        self._name = name
        self._log = repository.versions("datasets", name)
        self._tables = tables
        self._append = append
        self._on_common: OnCommon = on_common
        self._on_overlap: OnSplitOverlap = on_overlap
        self._keys_are_places = keys_are_places
        names = [list(table.classes) for table in tables.values()]
        options = json.dumps(
            [append, on_common, on_overlap, names, about["message"], about["source"]], sort_keys=True
        )
        self._about = {**about, "ingest": f"{attempt}-{digest_of(options.encode())[:16]}"}

    def run(self) -> Entry:
        """Return the committed version. Raise as `ingest`."""
        # The comparison of splits takes long. Before the log is read, it does not give other writers time to commit
        # first, which would force a retry.
        if not (self._append and self._log.head()):
            _ = self._settled_new_version
        try:
            return self._log.append(self._build)
        except _CommittedError as already:
            return already.entry

    def _build(self, head: int) -> dict[str, Any]:
        # Checked for every attempt, as an identical ingest may have committed since the last one.
        committed = self._find_committed()
        if committed is not None:
            raise _CommittedError(committed)
        if self._append and head:
            return self._build_append(head)
        tables, shared, self.overlaps = self._settled_new_version
        added = {split: table.num_samples for split, table in tables.items()}
        splits = describe_tables(self._repository.objects, tables)
        return {**self._about, "added": added, ENTRY_FIELD: shared, "splits": splits}

    @cached_property
    def _settled_new_version(self) -> tuple[dict[str, ShardTable], dict[str, int], list[Overlap]]:
        """Result of `settle_overlaps` for this source alone; cached, because other commits cannot change it."""
        return settle_overlaps(
            self._repository.objects, self._tables, self._on_overlap, keys_are_places=self._keys_are_places
        )

    def _build_append(self, head: int) -> dict[str, Any]:
        objects = self._repository.objects
        newest = open_dataset(self._repository, f"{self._name}@{head}")
        if read_val_fraction(self._repository, newest.resolved) != self._about[VAL_FRACTION]:
            raise ConflictError(
                f"{newest.resolved}, which was committed meanwhile, holds out another fraction; run the same command "
                "again"
            )
        old = {name: split.table for name, split in newest.items()}
        accepted = accepted_counts(newest.entry.content)
        new = self._tables
        if not self._keys_are_places:
            new = keep_splits(objects, old, new, on_common=self._on_common)
        joined = append_splits(objects, old, new, on_common=self._on_common)
        joined, shared, self.overlaps = settle_overlaps(
            objects,
            joined,
            self._on_overlap,
            keys_are_places=self._keys_are_places,
            # Unless the old splits were never compared, only the new samples are compared with all others.
            checked=old if accepted is not None else None,
        )
        num_kept = {split: _count_kept(table, joined[split]) for split, table in old.items()}
        added = {split: joined[split].num_samples - num_kept.get(split, 0) for split in new}
        left_out = {split: table.num_samples - num_kept[split] for split, table in old.items()}
        # A split without new samples keeps its table, so that loader states which refer to the table stay valid.
        touched = {split: table for split, table in joined.items() if split in new or table is not old[split]}
        return {
            **self._about,
            "parent": str(newest.resolved),
            "change": {"kind": "append"},
            "added": added,
            LEFT_OUT: {split: count for split, count in left_out.items() if count},
            ENTRY_FIELD: dict(Counter(shared) + Counter(accepted or {})),
            "splits": {
                **newest.entry.content["splits"],
                **describe_tables(objects, touched, before=old.values()),
            },
        }

    def _find_committed(self) -> Entry | None:
        """Return the version that this ingest committed before an interruption, or an identical one concurrently."""
        for number in self._log.numbers()[: -_SEARCHED_ENTRIES - 1 : -1]:
            entry = self._log.read(number)
            if entry.content.get("ingest") == self._about["ingest"]:
                return entry
        return None


def _count_kept(old: ShardTable, new: ShardTable) -> int:
    """Return the number of samples of a split that its next version has too, counted by shard."""
    partners = find_partners(old, new)
    # Append only deletes samples of existing shards, so the smaller count of the two versions is what they share.
    before, after = old.samples_per_shard[list(partners)], new.samples_per_shard[list(partners.values())]
    return int(np.minimum(before, after).sum())


class _CommittedError(Exception):
    """Ends `Log.append` without a commit: the log already has the version of this ingest."""

    def __init__(self, entry: Entry) -> None:
        super().__init__()
        self.entry = entry
