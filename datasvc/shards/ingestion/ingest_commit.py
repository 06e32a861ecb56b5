"""The one commit of an ingest: a version is made from its tables, on top of the newest one where it appends.

An ingest commits at most once: its entry has an id, by which the same ingest finds what it committed before it was
killed, or what an equal ingest committed at the same time.
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
_LOOKED_BACK: Final = 64


class IngestCommit:
    """Commits the tables once, whoever else commits meanwhile, a twin of this ingest included.

    Args:
        repository: where to.
        name: of the data set.
        tables: by split, all of whose shards are stored.
        about: further fields of the entry.
        attempt: of the ingest's journal.
        append: add the samples to those of the newest version.
        on_common: see `ingest`.
        on_overlap: see `ingest`.
        keys_are_places: see `settle_overlaps`.

    Attributes:
        overlaps: samples that two splits share, of the last attempt.
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
        """Return the committed version. Raises as `ingest`."""
        # Before the log is read: whoever compares for long in between loses to others that commit.
        if not (self._append and self._log.head()):
            _ = self._settled_alone
        try:
            return self._log.append(self._build)
        except _CommittedError as already:
            return already.entry

    def _build(self, head: int) -> dict[str, Any]:
        committed = self._find_committed()
        if committed is not None:
            raise _CommittedError(committed)
        if self._append and head:
            return self._build_append(head)
        tables, shared, self.overlaps = self._settled_alone
        added = {split: table.num_samples for split, table in tables.items()}
        splits = describe_tables(self._repository.objects, tables)
        return {**self._about, "added": added, ENTRY_FIELD: shared, "splits": splits}

    @cached_property
    def _settled_alone(self) -> tuple[dict[str, ShardTable], dict[str, int], list[Overlap]]:
        """The splits of a version of this source alone: no other commit changes them, so they are compared once."""
        return settle_overlaps(
            self._repository.objects, self._tables, self._on_overlap, keys_are_places=self._keys_are_places
        )

    def _build_append(self, head: int) -> dict[str, Any]:
        objects = self._repository.objects
        before = open_dataset(self._repository, f"{self._name}@{head}")
        if read_val_fraction(self._repository, before.resolved) != self._about[VAL_FRACTION]:
            raise ConflictError(
                f"{before.resolved}, committed meanwhile, holds out another share; run this once more"
            )
        old = {split: each.table for split, each in before.items()}
        accepted = accepted_counts(before.entry.content)
        new = self._tables
        if not self._keys_are_places:
            new = keep_splits(objects, old, new, on_common=self._on_common)
        joined = append_splits(objects, old, new, on_common=self._on_common)
        joined, shared, self.overlaps = settle_overlaps(
            objects,
            joined,
            self._on_overlap,
            keys_are_places=self._keys_are_places,
            # What is new is compared with all, whatever was accepted before.
            checked=old if accepted is not None else None,
        )
        stayed = {split: _count_stayed(table, joined[split]) for split, table in old.items()}
        added = {split: joined[split].num_samples - stayed.get(split, 0) for split in new}
        left_out = {split: table.num_samples - stayed[split] for split, table in old.items()}
        # A split that nothing is added to keeps its table, and with it the loader states that refer to it.
        touched = {split: table for split, table in joined.items() if split in new or table is not old[split]}
        return {
            **self._about,
            "parent": str(before.resolved),
            "change": {"kind": "append"},
            "added": added,
            LEFT_OUT: {split: count for split, count in left_out.items() if count},
            ENTRY_FIELD: dict(Counter(shared) + Counter(accepted or {})),
            "splits": {
                **before.entry.content["splits"],
                **describe_tables(objects, touched, before=old.values()),
            },
        }

    def _find_committed(self) -> Entry | None:
        """Return the version that this very ingest committed: before it was interrupted, or its twin just now."""
        for number in self._log.numbers()[: -_LOOKED_BACK - 1 : -1]:
            entry = self._log.read(number)
            if entry.content.get("ingest") == self._about["ingest"]:
                return entry
        return None


def _count_stayed(old: ShardTable, new: ShardTable) -> int:
    """Return how many samples of a split are in its next version too: in the same shard, so an equal shard counts."""
    partners = find_partners(old, new)
    before, after = old.samples_per_shard[list(partners)], new.samples_per_shard[list(partners.values())]
    return int(np.minimum(before, after).sum())


class _CommittedError(Exception):
    """Ends a commit: the log holds this very ingest already."""

    def __init__(self, entry: Entry) -> None:
        super().__init__()
        self.entry = entry
