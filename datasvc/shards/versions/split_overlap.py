"""Samples that two splits of a version share, by their key or by what they hold: validation data in the training.

Found from the sample indexes alone: no image is read. `matching` says what is held of them; shared samples stay Arrow
and NumPy arrays, however many there are.
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
from datasvc.repository import Objects
from datasvc.shards.format.sample_index import SampleIndex
from datasvc.shards.format.schema import is_blob
from datasvc.shards.format.shard_table import ShardTable
from datasvc.shards.sources.common.splits import DEFAULT_SPLIT, HELD_OUT_SPLIT
from datasvc.shards.versions.deletions import Flags, delete_samples, load_deletions
from datasvc.shards.versions.keys import SampleRows, SplitKeys, take_keys
from datasvc.shards.versions.matching import ShardValues, Side, match_values

OnSplitOverlap = Literal["fail", "drop", "keep"]
"""What becomes of samples that two splits share: nothing is committed; they are left out of the split that is trained
on; they stay, and the version says so."""

OverlapKind = Literal["key", "payload"]
KINDS: Final[tuple[OverlapKind, ...]] = ("key", "payload")
ENTRY_FIELD: Final = "split_overlap"

_SAID: Final = {"key": "keys", "payload": "equal images or other blobs"}
_NAMED: Final = 10


class SharedSample(NamedTuple):
    """A sample of one split that another split has too.

    Attributes:
        key: of the sample.
        other_key: of the first sample like it in the other split.
        shard: number of its shard in its table.
        row: its place in the shard's file.
    """

    key: str
    other_key: str
    shard: int
    row: int


@dataclass(frozen=True)
class SharedSamples:
    """Samples of one split that another split has too, as arrays: there may be as many as the split has.

    Attributes:
        keys: Arrow array of `n` strings.
        other_keys: Arrow array of `n` strings: of the first sample like it in the other split.
        places: where the samples are.
    """

    keys: pa.Array
    other_keys: pa.Array
    places: SampleRows

    def __len__(self) -> int:
        return len(self.keys)

    def __iter__(self) -> Iterator[SharedSample]:
        """Yield the samples, each made when it is asked for."""
        for key, other_key, shard, row in zip(
            self.keys, self.other_keys, self.places.shards, self.places.rows, strict=True
        ):
            yield SharedSample(key.as_py(), other_key.as_py(), int(shard), int(row))

    def take(self, chosen: Integers) -> SharedSamples:
        """Return the samples at these places of the arrays."""
        numbers = pa.array(chosen)
        return SharedSamples(self.keys.take(numbers), self.other_keys.take(numbers), self.places[chosen])

    def first(self, count: int) -> SharedSamples:
        """Return the first `count`, or all if there are fewer."""
        return self.take(np.arange(min(count, len(self))))


@dataclass(frozen=True)
class Overlap:
    """Samples that two splits share.

    Attributes:
        kind: "key": the same key; "payload": equal blobs, see `digests`.
        split: the one that "drop" leaves them out of: "train" if it is one of the two, else "val", else the first.
        other: the split that keeps them.
        samples: those of `split`, in the order of its table.
    """

    kind: OverlapKind
    split: str
    other: str
    samples: SharedSamples

    def __str__(self) -> str:
        named = [
            repr(sample.key) if sample.key == sample.other_key else f"{sample.key!r} (as {sample.other_key!r})"
            for sample in self.samples.first(_NAMED)
        ]
        more = f" and {len(self.samples) - _NAMED} more" if len(self.samples) > _NAMED else ""
        return (
            f"{len(self.samples)} samples of {self.split!r} are in {self.other!r} too, by {_SAID[self.kind]}: "
            f"{', '.join(named)}{more}"
        )


def find_overlaps(
    objects: Objects,
    tables: Mapping[str, ShardTable],
    *,
    checked: Mapping[str, ShardTable] | None = None,
) -> list[Overlap]:
    """Return what any two splits share; only where there is anything.

    Payloads of samples without blobs are not compared: equal rows of numbers are no leak. Nor are those of shards
    without a sample index, see `count_unchecked`.

    Args:
        objects: of the repository.
        tables: by split.
        checked: splits that were compared with each other before; samples of their shards are compared with new ones
            only.

    Raises:
        CorruptDataError, NotFoundError, UnavailableError: a sample index, or a shard without one, cannot be read.
    """
    order = sorted(tables, key=lambda name: (name != DEFAULT_SPLIT, name != HELD_OUT_SPLIT, name))
    new = {split: _new_shards(objects, tables[split], (checked or {}).get(split)) for split in order}
    overlaps = []
    for kind in KINDS:
        for split, other in combinations(order, 2):
            every = np.arange(tables[split].num_shards)
            old = np.setdiff1d(every, new[split])
            # All that is new of the one against the whole other; then what is old of the one against the new.
            found = [
                *_find_shared(objects, kind, (tables[split], new[split]), (tables[other], None)),
                *_find_shared(objects, kind, (tables[split], old), (tables[other], new[other])),
            ]
            if found:
                overlaps.append(Overlap(kind, split, other, _join(found)))
    return overlaps


def settle_overlaps(
    objects: Objects,
    tables: Mapping[str, ShardTable],
    on_overlap: OnSplitOverlap,
    *,
    accepted: Iterable[Overlap] = (),
    keys_are_places: bool = False,
    checked: Mapping[str, ShardTable] | None = None,
) -> tuple[dict[str, ShardTable], dict[str, int], list[Overlap]]:
    """Return the splits of a version to commit, sharing nothing but what is accepted.

    Args:
        objects: of the repository.
        tables: by split.
        on_overlap: what becomes of samples that two splits share.
        accepted: what versions that these splits are made of share within themselves, which was accepted then.
        keys_are_places: equal keys are no equal samples: they are made of file and row, and accepted.
        checked: see `find_overlaps`.

    Returns:
        The splits; how many samples of each kind were accepted, for the entry; and what else was found.

    Raises:
        ConflictError: splits share samples, and `on_overlap` is "fail".
        ConfigError: nothing would be left of a split.
    """
    found = find_overlaps(objects, tables, checked=checked)
    known = list(accepted)
    overlaps = []
    for overlap in found:
        if keys_are_places and overlap.kind == "key":
            continue
        samples = overlap.samples.take(np.flatnonzero(~_is_known(overlap, known)))
        if len(samples):
            overlaps.append(replace(overlap, samples=samples))
    if overlaps and on_overlap == "fail":
        raise ConflictError(
            f"splits share samples, nothing was committed: {'; '.join(map(str, overlaps))}. Remove or rename them; "
            "or leave them out of the first split with --on-split-overlap drop, or accept that both have them with "
            "--on-split-overlap keep"
        )
    left = dict(tables)
    if on_overlap == "drop":
        for split in {overlap.split for overlap in overlaps}:
            rows = _rows_by_shard(overlap for overlap in overlaps if overlap.split == split)
            left[split] = delete_samples(objects, tables[split], rows)
            if not left[split].num_samples:
                raise ConfigError(
                    f"nothing would be left of split {split!r}: other splits have all its samples; nothing committed"
                )
    counts = count_overlaps(found)
    if on_overlap == "drop":
        counts.subtract(count_overlaps(overlaps))
    return left, dict(+counts), overlaps


def count_overlaps(overlaps: Iterable[Overlap]) -> Counter[str]:
    """Return how many samples are shared, by kind."""
    counts: Counter[str] = Counter()
    for overlap in overlaps:
        counts[overlap.kind] += len(overlap.samples)
    return counts


def accepted_counts(content: Mapping[str, Any]) -> Mapping[str, int] | None:
    """Return how many shared samples of each kind a version's entry accepts; None: nobody compared its splits."""
    counts = content.get(ENTRY_FIELD)
    return counts if isinstance(counts, Mapping) else None


def check_on_overlap(on_overlap: str) -> None:
    """Raise ConfigError where it is none of `OnSplitOverlap`."""
    if on_overlap not in get_args(OnSplitOverlap):
        raise ConfigError(
            f"on_split_overlap is {on_overlap!r}; expected one of {', '.join(get_args(OnSplitOverlap))}"
        )


def count_unchecked(tables: Mapping[str, ShardTable]) -> int:
    """Return the samples in shards without a sample index: what they hold is not compared by `find_overlaps`."""
    return sum(int(table.samples_per_shard[~_is_indexed(table)].sum()) for table in tables.values())


def _find_shared(
    objects: Objects,
    kind: OverlapKind,
    own: tuple[ShardTable, Integers | None],
    other: tuple[ShardTable, Integers | None],
) -> Iterator[SharedSamples]:
    """Yield the samples of `own` that `other` has too, if any; both are a table and its shards, None for all."""
    if kind == "payload" and not (_has_blobs(own[0]) and _has_blobs(other[0])):
        return
    side = _key_side if kind == "key" else _payload_side
    found = match_values(side(objects, *other), side(objects, *own))
    if len(found):
        keys = (found.attached_b, found.attached_a) if kind == "payload" else (found.values, found.values)
        yield SharedSamples(*keys, found.b)


def _key_side(objects: Objects, table: ShardTable, shards: Integers | None) -> Side:
    keys = SplitKeys(objects, table, shards)

    def read() -> Iterator[ShardValues]:
        for each in keys:
            yield ShardValues(each.shard, each.rows, each.keys, partial(pa.nulls, len(each.rows)))

    return Side(keys.num_samples, read)


def _payload_side(objects: Objects, table: ShardTable, shards: Integers | None) -> Side:
    chosen = np.arange(table.num_shards) if shards is None else shards
    keys = SplitKeys(objects, table, chosen[_is_indexed(table)[chosen]])

    def read() -> Iterator[ShardValues]:
        for shard in keys.shards.tolist():
            digest = table.index(shard)
            assert digest is not None
            index = SampleIndex.decode(objects.read(digest), objects.location(digest))
            rows = keys.live_rows(shard)
            # Without a blob the payload digest is the sample's: equal values are no equal images.
            rows = rows[(index.digests("payload") != index.digests("sample"))[rows]]
            payloads = take_keys(index.table.column("payload"), rows)
            yield ShardValues(shard, rows, payloads, partial(take_keys, index.table.column("key"), rows))

    return Side(keys.num_samples, read)


def _join(parts: Sequence[SharedSamples]) -> SharedSamples:
    """Return the samples of all parts, each of which is in the order of the table, in that order."""
    if len(parts) == 1:
        return parts[0]
    joined = SharedSamples(
        pa.concat_arrays([each.keys for each in parts]),
        pa.concat_arrays([each.other_keys for each in parts]),
        SampleRows.concatenate([each.places for each in parts]),
    )
    return joined.take(np.lexsort((joined.places.rows, joined.places.shards)))


def _is_known(overlap: Overlap, accepted: Sequence[Overlap]) -> Flags:
    """Return which samples of an overlap are accepted, together with the very samples that they are equal to."""
    known = np.zeros(len(overlap.samples), np.bool_)
    for other in accepted:
        if (other.kind, other.split, other.other) == (overlap.kind, overlap.split, overlap.other):
            # A key is in its split once.
            places = pc.index_in(overlap.samples.keys, value_set=other.samples.keys)
            same = pc.equal(other.samples.other_keys.take(places), overlap.samples.other_keys)
            known |= same.fill_null(fill_value=False).to_numpy(zero_copy_only=False)
    return known


def _new_shards(objects: Objects, table: ShardTable, checked: ShardTable | None) -> Integers:
    """Return the numbers of the shards that hold a live sample which `checked` has not, ascending."""
    if checked is None:
        return np.arange(table.num_shards)
    known = {digest: number for number, digest in enumerate(checked.rows.column("digest").to_pylist())}
    now, before = load_deletions(objects, table), load_deletions(objects, checked)
    deleted = checked.deleted_per_shard
    new = []
    for number, digest in enumerate(table.rows.column("digest").to_pylist()):
        old = known.get(digest)
        # A sample that was deleted and is there again was compared with nothing meanwhile.
        if old is None or (
            deleted[old] and not (table.deleted_per_shard[number] and now.flags(number)[before.flags(old)].all())
        ):
            new.append(number)
    return np.array(new, np.int64)


def _rows_by_shard(overlaps: Iterable[Overlap]) -> dict[int, Integers]:
    places = SampleRows.concatenate([overlap.samples.places for overlap in overlaps])
    return {shard: np.unique(rows) for shard, rows in places.by_shard().items()}


def _is_indexed(table: ShardTable) -> Flags:
    return np.array(table.rows.column("index").is_valid().to_pylist(), np.bool_)


def _has_blobs(table: ShardTable) -> bool:
    return any(is_blob(field.type) for field in table.sample_schema)
