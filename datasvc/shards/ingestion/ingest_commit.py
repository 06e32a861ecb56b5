"""The single commit of an ingest: a new version from its tables, or the newest version with its samples appended.

An ingest commits at most once, because its log entry has an id. The ingest searches the log for this id, and so finds
the version that it committed before it was killed, or that an identical ingest committed concurrently.
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final

import numpy as np

from datasvc.errors import ConfigError, ConflictError
from datasvc.repository import Entry, Repository, Resolved
from datasvc.repository.logs.references import LineName
from datasvc.repository.objects.objects import digest_of
from datasvc.shards.format.shard_table import ShardTable
from datasvc.shards.images.header import Reencoding
from datasvc.shards.ingestion.options import IngestSettings
from datasvc.shards.ingestion.plan import BuildOptions
from datasvc.shards.lines.commit import commit_on_line
from datasvc.shards.sources.common.options import DEFAULT_SPLIT, HELD_OUT_SPLIT, SourceOptions
from datasvc.shards.sources.common.source import ListedSource, Source, StreamedSource
from datasvc.shards.versions.combine import append_splits, keep_splits
from datasvc.shards.versions.dataset import open_dataset
from datasvc.shards.versions.diff import find_partners
from datasvc.shards.versions.label_conflicts import LabelConflict, describe_conflicts, find_label_conflicts
from datasvc.shards.versions.split_overlap import ENTRY_FIELD, Overlap, accepted_counts, settle_overlaps
from datasvc.shards.versions.version_entry import (
    PLACE_KEYS,
    VAL_FRACTION,
    describe_tables,
    has_place_keys,
    read_ingest_options,
    read_val_fraction,
)

LEFT_OUT: Final = "left_out"
_OPTIONS_OF_ONE_SOURCE: Final = frozenset(
    {"format", "split", "manifest", "ground_truth", "synsets", "tokenizer", "chat_template"}
    | {"key_prefix", "seed", "limit", "on_bad"}
) | {VAL_FRACTION}
# Number of newest entries that are searched for the id.
_SEARCHED_ENTRIES: Final = 64


def choose_val_fractions(
    repository: Repository | None, newest: Resolved | None, source: Source, requested: float | None
) -> tuple[float, float]:
    """Return two fractions of "train" to hold out as "val": one to record with the version, one for this source.

    The first is `requested`. If that is None, it is the recorded fraction for an append, and otherwise 0. The second
    equals the first, but it is 0 if `requested` is None and the source has "val" or no "train".

    Raises:
        ConfigError: `requested` differs from the recorded fraction of the data set appended to.
        CorruptDataError, UnavailableError: the entries of the data set cannot be read.
    """
    recorded = requested or 0.0
    if newest is not None and repository is not None:
        recorded = read_val_fraction(repository, newest)
        if requested is not None and requested != recorded:
            raise ConfigError(
                f"{newest} holds out {recorded:g} of {DEFAULT_SPLIT!r} as {HELD_OUT_SPLIT!r}, and an append must "
                f"hold out the same fraction: got --val-fraction {requested:g}; leave out --val-fraction"
            )
    if isinstance(source, ListedSource):
        splits = set(source.splits)
    else:
        assert isinstance(source, StreamedSource)
        splits = {part.split for part in source.parts}
    can_hold_out = DEFAULT_SPLIT in splits and HELD_OUT_SPLIT not in splits
    # `plan_units` raises an error for such a source if the fraction is not 0. Only a requested fraction is an error.
    if requested is None and not can_hold_out:
        return recorded, 0.0
    return recorded, recorded


def choose_build_options(
    repository: Repository | None, newest: Resolved | None, source: Source, settings: IngestSettings
) -> tuple[float, BuildOptions]:
    """Return the fraction of "train" to record with the version, and how the shards of `source` are built.

    Images are made smaller, and columns compressed, as requested, or else as in `newest`, the version that an append
    continues: otherwise half of the images of a data set would have another size. Raise what `choose_val_fractions`
    and `read_ingest_options` raise.
    """
    recorded_fraction, held_out = choose_val_fractions(repository, newest, source, settings.val_fraction)
    recorded = read_ingest_options(repository, newest) if repository is not None and newest is not None else {}
    reencoding = Reencoding(
        recorded.get("max_side") if settings.max_side is None else settings.max_side,
        recorded.get("quality") if settings.quality is None else settings.quality,
    )
    compress_columns = settings.compress_columns or recorded.get("compress_columns", "none")
    return recorded_fraction, BuildOptions(
        settings.shard_bytes,
        settings.decode_check,
        reencoding,
        settings.keep_order,
        settings.seed,
        held_out,
        settings.limit,
        compress_columns=compress_columns,
    )


def changed_options(
    repository: Repository | None, newest: Resolved | None, current: Mapping[str, Any]
) -> dict[str, tuple[Any, Any]]:
    """Return the options of an append that differ from those of `newest`: by name, the value before and now.

    Only options that decide how samples are read and stored are compared, not those that describe one source. Raise
    what `read_ingest_options` raises.
    """
    recorded = read_ingest_options(repository, newest) if repository is not None and newest is not None else {}
    defaults = dataclasses.asdict(SourceOptions())  # an entry has only what differs from them
    before, now = ({**defaults, **options} for options in (recorded, current))
    names = sorted((before.keys() & now.keys()) - _OPTIONS_OF_ONE_SOURCE) if recorded else []
    # As in the entry: JSON has no tuples.
    return {name: (before[name], now[name]) for name in names if json.dumps(before[name]) != json.dumps(now[name])}


@dataclass(kw_only=True, eq=False)
class IngestCommit:
    """Commits the tables at most once, even if an interrupted run or an identical ingest committed them already.

    Attributes:
        repository: the repository to commit to.
        line: what to commit to: the main line of a data set, or a branch.
        tables: shard tables by split; all their shards are stored.
        metadata: further fields of the log entry.
        attempt: identifies the attempt of the ingest, see `Journal.begin`.
        settings: the options of the ingest.
        has_duplicates: whether samples of one split have the same content.
        keys_are_places: as in `settle_overlaps`.
        overlaps: samples that two splits share, as found by the last call of `_build`.
        conflicts: samples of this ingest whose label contradicts an equal sample, as found by the last call.
    """

    repository: Repository
    line: LineName
    tables: Mapping[str, ShardTable]
    metadata: dict[str, Any]
    attempt: str
    settings: IngestSettings
    keys_are_places: bool
    has_duplicates: bool
    overlaps: list[Overlap] = field(default_factory=list)
    conflicts: list[LabelConflict] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._log = self.repository.versions("datasets", self.line.name)
        names = [list(table.classes) for table in self.tables.values()]
        settings = self.settings
        choices = [settings.append, settings.on_common, settings.on_split_overlap, names]
        target = [] if self.line.branch is None else [self.line.branch]
        options = json.dumps([*choices, self.metadata["message"], self.metadata["source"], *target], sort_keys=True)
        # Other options make another version of the same shards, so they are part of the id.
        self.metadata["ingest"] = f"{self.attempt}-{digest_of(options.encode())[:16]}"

    def run(self) -> Entry:
        """Return the committed version. Raise what `ingest` raises."""
        # Compare the splits before `Log.append` reads the log. The comparison takes long, and a commit by another
        # writer after the read forces a retry. `_build` compares an append, because it needs the newest version.
        if not (self.settings.append and self._log.head()):
            _ = self._settled_new_version
        try:
            return commit_on_line(self.repository, self.line, self._build, continues=self.settings.append)
        except _CommittedError as already:
            return already.entry

    def _build(self, newest: Resolved | None) -> dict[str, Any]:
        """Return the log entry that follows `newest`. Raise _CommittedError if the log has this ingest already."""
        # Checked at every call, because an identical ingest may have committed since the last call.
        committed = self._find_committed()
        if committed is not None:
            raise _CommittedError(committed)
        if self.settings.append and newest is not None:
            return self._build_append(newest)
        # `shared` is the number of samples that two splits share, by kind: by key, or by equal blobs.
        tables, shared, self.overlaps = self._settled_new_version
        # Only equal samples can contradict each other: `ingest` has found those of one split.
        if self.has_duplicates or self.overlaps:
            self.conflicts = find_label_conflicts(self.repository.objects, tables)
        self._check_conflicts()
        added = {split: table.num_samples for split, table in tables.items()}
        splits = describe_tables(self.repository.objects, tables)
        return {
            **self.metadata,
            **({PLACE_KEYS: True} if self.keys_are_places else {}),
            "added": added,
            ENTRY_FIELD: shared,
            "splits": splits,
        }

    def _check_conflicts(self) -> None:
        """Raise ConflictError if labels contradict each other and equal samples are errors."""
        if self.conflicts and self.settings.duplicates == "fail":
            raise ConflictError(f"{describe_conflicts(self.conflicts)}; nothing was committed (--duplicates fail)")

    @cached_property
    def _settled_new_version(self) -> tuple[dict[str, ShardTable], dict[str, int], list[Overlap]]:
        """Result of `settle_overlaps` for this source alone. It is cached, because other commits cannot change it."""
        return settle_overlaps(
            self.repository.objects, self.tables, self.settings.on_split_overlap, keys_are_places=self.keys_are_places
        )

    def _build_append(self, continued: Resolved) -> dict[str, Any]:
        """Return the log entry of the version `continued` with the new samples appended."""
        objects = self.repository.objects
        newest = open_dataset(self.repository, str(continued))
        if read_val_fraction(self.repository, newest.resolved) != self.metadata[VAL_FRACTION]:
            raise ConflictError(
                f"{newest.resolved}, which was committed meanwhile, holds out another fraction; run the same command "
                "again"
            )
        old = {name: split.table for name, split in newest.items()}
        accepted = accepted_counts(newest.entry.content)
        new = keep_splits(
            objects, old, self.tables, on_common=self.settings.on_common, keys_are_places=self.keys_are_places
        )
        combined = append_splits(objects, old, new, on_common=self.settings.on_common)
        combined, shared, self.overlaps = settle_overlaps(
            objects,
            combined,
            self.settings.on_split_overlap,
            keys_are_places=self.keys_are_places,
            # If the old splits were compared with each other before, only new samples are compared with all others.
            checked=old if accepted is not None else None,
        )
        self.conflicts = find_label_conflicts(objects, combined, checked=old)
        self._check_conflicts()
        has_places = self.keys_are_places and has_place_keys(self.repository, newest.resolved)
        num_kept = {split: _count_kept(table, combined[split]) for split, table in old.items()}
        added = {split: combined[split].num_samples - num_kept.get(split, 0) for split in new}
        left_out = {split: table.num_samples - num_kept[split] for split, table in old.items()}
        # A split keeps its table unless it gets or loses samples, so that loader states which refer to it stay valid.
        changed = {split: table for split, table in combined.items() if split in new or table is not old[split]}
        return {
            **self.metadata,
            **({PLACE_KEYS: True} if has_places else {}),
            "parent": str(newest.resolved),
            "change": {"kind": "append"},
            "added": added,
            LEFT_OUT: {split: count for split, count in left_out.items() if count},
            # Samples that the old splits share stay accepted, and are added to the new ones, by kind.
            ENTRY_FIELD: dict(Counter(shared) + Counter(accepted or {})),
            "splits": {
                **newest.entry.content["splits"],
                **describe_tables(objects, changed, before=old.values()),
            },
        }

    def _find_committed(self) -> Entry | None:
        """Return the version that this ingest committed before an interruption, or that an identical one did."""
        numbers = self._log.numbers()
        # A version that was removed since then is ingested again.
        removed = self.repository.removals("datasets", self.line.name).removed(numbers)
        for number in numbers[: -_SEARCHED_ENTRIES - 1 : -1]:
            if number in removed:
                continue
            entries, errors = self._log.try_entries([number])
            if isinstance(error := errors.get(number), ConfigError):
                raise error  # a later release wrote the entry: what it appended is not known here
            # A corrupt entry is passed over: an equal version twice does less harm than no ingest.
            if entries and entries[0].content.get("ingest") == self.metadata["ingest"]:
                return entries[0]
        return None


def _count_kept(old: ShardTable, new: ShardTable) -> int:
    """Return the number of samples of a split that its next version has too, counted by shard."""
    partners = find_partners(old, new)
    # An append only deletes samples of existing shards, so the smaller count of a shard is the number that is kept.
    old_counts, new_counts = old.samples_per_shard[list(partners)], new.samples_per_shard[list(partners.values())]
    return int(np.minimum(old_counts, new_counts).sum())


class _CommittedError(Exception):
    """Ends `commit_on_line` without a commit: the log already has the version of this ingest."""

    def __init__(self, entry: Entry) -> None:
        super().__init__()
        self.entry = entry
