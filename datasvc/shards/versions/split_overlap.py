"""Samples that two splits of a version share, by key or by content, such as validation data among the training data.

An ingest, append or merge applies a rule (`OnSplitOverlap`) before the commit; `verify` reports such samples. They
are found by the keys and digests in the sample indexes; no image is read. For the memory needed, see `keys`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from typing import Any, Final, Literal, NamedTuple, get_args

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from datasvc.errors import ConfigError, ConflictError
from datasvc.keyed_random import Integers
from datasvc.printable import count_text
from datasvc.repository import Objects
from datasvc.shards.format.overlaid_shard import read_index
from datasvc.shards.format.schema import is_blob
from datasvc.shards.format.shard_table import ShardTable
from datasvc.shards.sources.common.options import DEFAULT_SPLIT, HELD_OUT_SPLIT
from datasvc.shards.versions.deletions import Flags, delete_samples, load_deletions
from datasvc.shards.versions.keys import SampleRows, ShardValues, Side, SplitKeys, match_values, take_keys

OnSplitOverlap = Literal["fail", "drop", "keep"]
"""Rule for samples that two splits share. "fail" raises ConflictError. "drop" leaves them out of the split used for
training. "keep" keeps them and records their number in the version."""

OverlapKind = Literal["key", "payload"]
"""What two splits share: "key", a sample key; "payload", a payload digest, that is, an image or other blobs."""
KINDS: Final[tuple[OverlapKind, ...]] = ("key", "payload")
# Field of a log entry, see `accepted_counts`.
ENTRY_FIELD: Final = "split_overlap"

_KIND_TEXT: Final = {"key": "keys", "payload": "equal images or other blobs"}
_MAX_LISTED: Final = 10


class SharedSample(NamedTuple):
    """A sample of one split that occurs in another split too.

    Attributes:
        key: key of the sample.
        other_key: key of the first equal sample in the other split.
        shard: number of the sample's shard in the table of its split.
        row: row of the sample in the shard's file.
    """

    key: str
    other_key: str
    shard: int
    row: int


@dataclass(frozen=True)
class SharedSamples:
    """Samples of one split that occur in another split too, as arrays, because a split may share all its samples.

    Attributes:
        keys: Arrow array of `n` strings.
        other_keys: Arrow array of `n` strings, the key of the first equal sample in the other split.
        places: shard and row of each sample.
    """

    keys: pa.Array
    other_keys: pa.Array
    places: SampleRows

    def __len__(self) -> int:
        return len(self.keys)

    def __iter__(self) -> Iterator[SharedSample]:
        """Yield the samples one by one, without building a list."""
        for key, other_key, shard, row in zip(
            self.keys, self.other_keys, self.places.shards, self.places.rows, strict=True
        ):
            yield SharedSample(key.as_py(), other_key.as_py(), int(shard), int(row))

    def take(self, chosen: Integers) -> SharedSamples:
        """Return the samples at the given positions of the arrays."""
        positions = pa.array(chosen)
        return SharedSamples(self.keys.take(positions), self.other_keys.take(positions), self.places[chosen])

    def first(self, count: int) -> SharedSamples:
        """Return the first `count` samples, or all if there are fewer."""
        return self.take(np.arange(min(count, len(self))))


@dataclass(frozen=True)
class Overlap:
    """Samples that two splits share.

    Attributes:
        kind: "key": equal keys; "payload": equal payload digests, see `shards.format.digests`.
        split: the split from which "drop" removes the samples: "train" if it is one of the two, else "val" if it is,
            else the first by name.
        other: the split that keeps its samples.
        samples: the shared samples of `split`, in the order of its table.
    """

    kind: OverlapKind
    split: str
    other: str
    samples: SharedSamples

    def __str__(self) -> str:
        keys = [
            repr(sample.key) if sample.key == sample.other_key else f"{sample.key!r} (as {sample.other_key!r})"
            for sample in self.samples.first(_MAX_LISTED)
        ]
        more = f" and {len(self.samples) - _MAX_LISTED} more" if len(self.samples) > _MAX_LISTED else ""
        are = "is" if len(self.samples) == 1 else "are"
        return (
            f"{count_text(len(self.samples), 'sample')} of {self.split!r} {are} in {self.other!r} too, "
            f"by {_KIND_TEXT[self.kind]}: "
            f"{', '.join(keys)}{more}"
        )


def find_overlaps(
    objects: Objects,
    tables: Mapping[str, ShardTable],
    *,
    checked: Mapping[str, ShardTable] | None = None,
    values: bool = False,
) -> list[Overlap]:
    """Return the samples that each pair of splits shares, without the pairs that share nothing.

    Samples without blobs are not compared by payload unless `values` is True, because two of them may have equal
    values by chance. Samples in shards without a sample index are not compared by payload either, see
    `count_unchecked`.

    Args:
        objects: objects of the repository.
        tables: shard tables by split.
        checked: tables, by split, that were compared before. Their samples are not compared with each other again.
        values: compare samples without blobs by all their values, in place of the payload.

    Raises:
        CorruptDataError, NotFoundError, UnavailableError: a sample index, or a shard without one, cannot be read.
    """
    # "drop" removes samples from the first split of a pair, so training data come first, then validation data.
    splits = sorted(tables, key=lambda name: (name != DEFAULT_SPLIT, name != HELD_OUT_SPLIT, name))
    added = {split: new_shards(objects, tables[split], (checked or {}).get(split)) for split in splits}
    overlaps = []
    for kind in KINDS:
        for split, other in combinations(splits, 2):
            all_shards = np.arange(tables[split].num_shards)
            old_shards = np.setdiff1d(all_shards, added[split])
            # Old shards of both splits were compared before. So new shards of `split` are compared with all of
            # `other`, and old shards of `split` with new ones of `other`.
            shared = [
                *_find_shared(objects, kind, (tables[split], added[split]), (tables[other], None), values),
                *_find_shared(objects, kind, (tables[split], old_shards), (tables[other], added[other]), values),
            ]
            if shared:
                overlaps.append(Overlap(kind, split, other, _join(shared)))
    return overlaps


def settle_overlaps(
    objects: Objects,
    tables: Mapping[str, ShardTable],
    on_overlap: OnSplitOverlap,
    *,
    accepted: Sequence[Overlap] = (),
    keys_are_places: bool = False,
    checked: Mapping[str, ShardTable] | None = None,
) -> tuple[dict[str, ShardTable], dict[str, int], list[Overlap]]:
    """Return the splits of a version to commit, after `on_overlap` is applied to the samples that they share.

    Args:
        objects: objects of the repository.
        tables: shard tables by split.
        on_overlap: rule for samples that two splits share.
        accepted: overlaps that were accepted in the versions that these splits come from.
        keys_are_places: see `Source.keys_are_places`. If so, equal keys are accepted: they do not show that the
            samples are equal. Equal images and other blobs are found as always.
        checked: as in `find_overlaps`.

    Returns:
        The shard tables of the splits. The number of samples that stay shared, by kind, for the log entry. The
        overlaps that were not accepted before; `on_overlap` was applied to them.

    Raises:
        ConflictError: splits share samples, and `on_overlap` is "fail".
        ConfigError: a split would lose all its samples.
    """
    all_overlaps = find_overlaps(objects, tables, checked=checked)
    unaccepted = []
    for overlap in all_overlaps:
        if keys_are_places and overlap.kind == "key":
            continue
        # A shared sample that a version accepted stays accepted in the versions made from it.
        samples = overlap.samples.take(np.flatnonzero(~_is_accepted(overlap, accepted)))
        if len(samples):
            unaccepted.append(replace(overlap, samples=samples))
    if unaccepted and on_overlap == "fail":
        raise ConflictError(
            f"splits share samples, nothing was committed: {'; '.join(map(str, unaccepted))}. Remove or rename them; "
            "or leave them out of the first split with --on-split-overlap drop, or keep them in both splits with "
            "--on-split-overlap keep"
        )
    result, counts = dict(tables), count_overlaps(all_overlaps)
    if on_overlap == "drop":
        for split in {overlap.split for overlap in unaccepted}:
            # A sample may be in several overlaps: with several splits, or of both kinds.
            rows = _rows_by_shard(overlap for overlap in unaccepted if overlap.split == split)
            result[split] = delete_samples(objects, tables[split], rows)
            if not result[split].num_samples:
                raise ConfigError(
                    f"all samples of split {split!r} would be dropped, because other splits have them too: nothing "
                    "was committed"
                )
        # The dropped samples are not shared any more.
        counts.subtract(count_overlaps(unaccepted))
    return result, dict(+counts), unaccepted  # `+` leaves out kinds with a count of 0


def count_overlaps(overlaps: Iterable[Overlap]) -> Counter[str]:
    """Return the number of shared samples by kind."""
    counts: Counter[str] = Counter()
    for overlap in overlaps:
        counts[overlap.kind] += len(overlap.samples)
    return counts


def accepted_counts(content: Mapping[str, Any]) -> Mapping[str, int] | None:
    """Return the number of shared samples by kind that a log entry accepts; None if its splits were not compared."""
    counts = content.get(ENTRY_FIELD)
    return counts if isinstance(counts, Mapping) else None


def check_on_overlap(on_overlap: str) -> None:
    """Raise ConfigError if `on_overlap` is not one of `OnSplitOverlap`."""
    if on_overlap not in get_args(OnSplitOverlap):
        raise ConfigError(
            f"on_split_overlap is {on_overlap!r}; expected one of {', '.join(get_args(OnSplitOverlap))}"
        )


def count_unchecked(tables: Mapping[str, ShardTable]) -> int:
    """Return the number of samples in shards without a sample index: `find_overlaps` cannot compare their content."""
    return sum(int(table.samples_per_shard[~_is_indexed(table)].sum()) for table in tables.values())


def _find_shared(
    objects: Objects,
    kind: OverlapKind,
    table: tuple[ShardTable, Integers | None],
    other: tuple[ShardTable, Integers | None],
    values: bool,
) -> Iterator[SharedSamples]:
    """Yield the samples of `table` that `other` has too, if any; None stands for all shards of a table."""
    if kind == "payload" and not values and not (has_blobs(table[0]) and has_blobs(other[0])):
        return
    side = _key_side if kind == "key" else partial(payload_side, values=values)
    # The matches are samples of the second argument, each with the first equal sample of the first argument.
    matches = match_values(side(objects, *other), side(objects, *table))
    if len(matches):
        # Samples that match by payload have their keys attached. Samples that match by key have the same key.
        keys = (matches.attached_b, matches.attached_a) if kind == "payload" else (matches.values, matches.values)
        yield SharedSamples(*keys, matches.b)


def _key_side(objects: Objects, table: ShardTable, shards: Integers | None) -> Side:
    """Return the samples of some shards, to be matched by key. The attached values are null: none are needed."""
    keys = SplitKeys(objects, table, shards)

    def read() -> Iterator[ShardValues]:
        return (
            ShardValues(shard.shard, shard.rows, shard.keys, partial(pa.nulls, len(shard.rows))) for shard in keys
        )

    return Side(keys.num_samples, read)


def payload_side(objects: Objects, table: ShardTable, shards: Integers | None, *, values: bool = False) -> Side:
    """Return samples of indexed shards, to be matched by payload digest; their keys are attached.

    Without `values`, samples without blobs are left out.
    """
    numbers = np.arange(table.num_shards) if shards is None else shards
    keys = SplitKeys(objects, table, numbers[_is_indexed(table)[numbers]])

    def read() -> Iterator[ShardValues]:
        for shard in keys.shards.tolist():
            index = read_index(objects, table, shard)
            assert index is not None, "`keys` has only shards with a sample index"
            rows = keys.present_rows(shard)  # purged samples have the same empty blobs
            if not values:
                # The payload digest of a sample without blobs equals its sample digest.
                rows = rows[(index.digests("payload") != index.digests("sample"))[rows]]
            payloads = take_keys(index.table.column("payload"), rows)
            yield ShardValues(shard, rows, payloads, partial(take_keys, index.table.column("key"), rows))

    return Side(keys.num_samples, read)


def _join(parts: Sequence[SharedSamples]) -> SharedSamples:
    """Return the samples of all parts in table order; each part is in table order already."""
    if len(parts) == 1:
        return parts[0]
    joined = SharedSamples(
        pa.concat_arrays([part.keys for part in parts]),
        pa.concat_arrays([part.other_keys for part in parts]),
        SampleRows.concatenate([part.places for part in parts]),
    )
    return joined.take(np.lexsort((joined.places.rows, joined.places.shards)))


def _is_accepted(overlap: Overlap, accepted: Sequence[Overlap]) -> Flags:
    """Return which samples of an overlap are in `accepted`, and share there the same sample of the other split."""
    flags = np.zeros(len(overlap.samples), np.bool_)
    for earlier in accepted:
        if (earlier.kind, earlier.split, earlier.other) == (overlap.kind, overlap.split, overlap.other):
            # Keys are unique within a split, so a sample has at most one position in `earlier`. If it has none, its
            # position is null. Then the result of the comparison is null too, and counts as False.
            positions = pc.index_in(overlap.samples.keys, value_set=earlier.samples.keys)
            same = pc.equal(earlier.samples.other_keys.take(positions), overlap.samples.other_keys)
            flags |= same.fill_null(fill_value=False).to_numpy(zero_copy_only=False)
    return flags


def new_shards(objects: Objects, table: ShardTable, checked: ShardTable | None) -> Integers:
    """Return the numbers of the shards with a live (not deleted) sample that is not live in `checked`, ascending."""
    if checked is None:
        return np.arange(table.num_shards)
    old_numbers = {digest: number for number, digest in enumerate(checked.rows.column("digest").to_pylist())}
    deletions, old_deletions = load_deletions(objects, table), load_deletions(objects, checked)
    old_deleted = checked.deleted_per_shard
    new = []
    for number, digest in enumerate(table.rows.column("digest").to_pylist()):
        old = old_numbers.get(digest)
        if old is None:
            new.append(number)
        elif old_deleted[old]:
            # A sample that was deleted in `checked` and is live again was not compared with samples added meanwhile.
            # So the shard is new unless every sample that was deleted then is still deleted.
            has_deletions = table.deleted_per_shard[number]
            if not (has_deletions and deletions.flags(number)[old_deletions.flags(old)].all()):
                new.append(number)
    return np.array(new, np.int64)


def _rows_by_shard(overlaps: Iterable[Overlap]) -> dict[int, Integers]:
    """Return the rows of the samples in overlaps of one split, by shard, each once. `overlaps` is not empty."""
    places = SampleRows.concatenate([overlap.samples.places for overlap in overlaps])
    return {shard: np.unique(rows) for shard, rows in places.by_shard().items()}


def _is_indexed(table: ShardTable) -> Flags:
    """Return for each shard whether it has a sample index: `bool[num_shards]`."""
    return np.array(table.rows.column("index").is_valid().to_pylist(), np.bool_)


def has_blobs(table: ShardTable) -> bool:
    """Return whether samples have a column of images or other blobs."""
    return any(is_blob(field.type) for field in table.sample_schema)
