"""Samples that two splits of a version share, by their key or by what they hold: validation data in the training.

Found from the sample indexes alone: no image is read. What is held for each sample is a hash of eight bytes, of the
smaller of two splits; samples whose hashes meet are compared as they are, so the result is exact.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any, Final, Literal, NamedTuple, get_args

import numpy as np
import pyarrow as pa

from datasvc.errors import ConfigError, ConflictError
from datasvc.keyed import Integers
from datasvc.repository import Objects
from datasvc.shards.common_keys import hash_keys, is_in
from datasvc.shards.deletions import Flags, delete_samples, load_deletions
from datasvc.shards.index import SampleIndex
from datasvc.shards.keys import SplitKeys, take_keys
from datasvc.shards.schema import is_blob
from datasvc.shards.sources.splits import DEFAULT_SPLIT, HELD_OUT_SPLIT
from datasvc.shards.table import ShardTable

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
        other_key: of the sample like it in the other split.
        shard: number of its shard in its table.
        row: its place in the shard's file.
    """

    key: str
    other_key: str
    shard: int
    row: int


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
    samples: Sequence[SharedSample]

    def __str__(self) -> str:
        named = [
            repr(sample.key) if sample.key == sample.other_key else f"{sample.key!r} (as {sample.other_key!r})"
            for sample in self.samples[:_NAMED]
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
            samples = [
                *_find_shared(objects, kind, (tables[split], new[split]), (tables[other], None)),
                *_find_shared(objects, kind, (tables[split], old), (tables[other], new[other])),
            ]
            if samples:
                samples.sort(key=lambda sample: (sample.shard, sample.row))
                overlaps.append(Overlap(kind, split, other, samples))
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
    known = {_pair(overlap, sample) for overlap in accepted for sample in overlap.samples}
    overlaps = []
    for overlap in found:
        is_accepted = keys_are_places and overlap.kind == "key"
        samples = [s for s in overlap.samples if not is_accepted and _pair(overlap, s) not in known]
        if samples:
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


class _Sample(NamedTuple):
    value: Any
    key: str
    shard: int
    row: int


class _Side:
    """The live samples of some shards of a split, as what they are compared by."""

    def __init__(self, objects: Objects, kind: OverlapKind, table: ShardTable, shards: Integers | None) -> None:
        chosen = np.arange(table.num_shards) if shards is None else shards
        self._kind = kind
        self._objects = objects
        self._table = table
        self._keys = SplitKeys(objects, table, chosen[_is_indexed(table)[chosen]] if kind == "payload" else chosen)
        self.num_samples = self._keys.num_samples

    def read_hashes(self) -> Integers:
        """Return the hashes of all samples, ascending: `int64[num_samples]`."""
        hashes = [_hash(values) for _, _, values, _ in self._read()]
        return np.sort(np.concatenate(hashes)) if hashes else np.empty(0, np.int64)

    def find(self, hashes: Integers) -> Iterator[_Sample]:
        """Yield the samples whose hash is one of `hashes`, which ascend."""
        for shard, rows, values, keys in self._read():
            met = np.flatnonzero(is_in(_hash(values), hashes))
            if len(met):
                places = rows[met].tolist()
                chosen = pa.array(met)
                held = (values.take(chosen).to_pylist(), keys.take(chosen).to_pylist())
                yield from (_Sample(*sample) for sample in zip(*held, [shard] * len(met), places, strict=True))

    def _read(self) -> Iterator[tuple[int, Integers, pa.Array, pa.Array]]:
        for shard in self._keys.shards.tolist():
            if self._kind == "key":
                each = self._keys.read(shard)
                yield shard, each.rows, each.keys, each.keys
                continue
            digest = self._table.index(shard)
            assert digest is not None
            index = SampleIndex.decode(self._objects.read(digest), self._objects.location(digest))
            rows = self._keys.live_rows(shard)
            # Without a blob the payload digest is the sample's: equal values are no equal images.
            rows = rows[(index.digests("payload") != index.digests("sample"))[rows]]
            yield (
                shard,
                rows,
                take_keys(index.table.column("payload"), rows),
                take_keys(index.table.column("key"), rows),
            )


def _find_shared(
    objects: Objects,
    kind: OverlapKind,
    own: tuple[ShardTable, Integers | None],
    other: tuple[ShardTable, Integers | None],
) -> list[SharedSample]:
    """Return the samples of `own` that `other` has too; each is a table and its shards that count, None for all."""
    if kind == "payload" and not (_has_blobs(own[0]) and _has_blobs(other[0])):
        return []
    mine, theirs = _Side(objects, kind, *own), _Side(objects, kind, *other)
    if not (mine.num_samples and theirs.num_samples):
        return []
    small, large = (mine, theirs) if mine.num_samples <= theirs.num_samples else (theirs, mine)
    candidates = list(large.find(small.read_hashes()))
    if not candidates:
        return []
    values = {sample.value for sample in candidates}
    confirmed = [sample for sample in small.find(np.sort(_hash_values(values, kind))) if sample.value in values]
    samples, others = (confirmed, candidates) if small is mine else (candidates, confirmed)
    keys: dict[Any, str] = {}
    for sample in others:
        keys.setdefault(sample.value, sample.key)
    return [
        SharedSample(sample.key, keys[sample.value], sample.shard, sample.row)
        for sample in samples
        if sample.value in keys
    ]


def _hash(values: pa.Array) -> Integers:
    if pa.types.is_fixed_size_binary(values.type) and len(values):
        return np.frombuffer(b"".join(values.to_pylist()), np.int64)[::2]
    return hash_keys(values)


def _hash_values(values: set[Any], kind: OverlapKind) -> Integers:
    return _hash(pa.array(list(values), pa.binary(16) if kind == "payload" else pa.large_string()))


def _pair(overlap: Overlap, sample: SharedSample) -> tuple[str, str, str, str, str]:
    return overlap.kind, overlap.split, overlap.other, sample.key, sample.other_key


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
    rows: dict[int, set[int]] = {}
    for overlap in overlaps:
        for sample in overlap.samples:
            rows.setdefault(sample.shard, set()).add(sample.row)
    return {shard: np.array(sorted(each), np.int64) for shard, each in rows.items()}


def _is_indexed(table: ShardTable) -> Flags:
    return np.array(table.rows.column("index").is_valid().to_pylist(), np.bool_)


def _has_blobs(table: ShardTable) -> bool:
    return any(is_blob(field.type) for field in table.sample_schema)
