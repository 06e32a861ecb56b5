"""Which sample goes to which shard, and who reads what: pure functions of a source's listing and the options.

So the same source and options give the same shards, byte for byte, whatever the number of workers, wherever they run,
and however often the ingest was interrupted. A *unit* is what one worker does at a time.

- Of a listed source every shard is a unit: its files are dealt to shards by one permutation of all.
- Of a streamed source a unit is some parts that are read side by side. Parts are dealt to units by a permutation, and
  a unit's samples are permuted within each of its shards: so a shard holds samples from many places of the source,
  and nothing but one shard is ever held in memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from blake3 import blake3

from datasvc.errors import ConfigError
from datasvc.keyed_random import Integers, KeyedPermutation, derive_keys
from datasvc.shards.ingestion.build_options import BuildOptions
from datasvc.shards.sources.common.source import ImageFile, ListedSource, Source, SourcePart, StreamedSource
from datasvc.shards.sources.common.splits import DEFAULT_SPLIT, HELD_OUT_SPLIT

PARTS_AT_ONCE: Final = 8
_FILES, _IN_SHARD, _PARTS = 16, 17, 18  # purposes of keys; those of the access order are below
# A unit makes some shards, so that few are cut short at its end; a source makes some units, so that many can work.
_SHARDS_PER_UNIT, _UNITS_PER_SPLIT = 4, 8


@dataclass(frozen=True)
class IngestUnit:
    """What one worker does at a time.

    Attributes:
        number: its place in the plan; shards stand in the table in the order of their units.
        split: of its samples.
        files: of a listed source: the samples of one shard, in order.
        parts: of a streamed source, in the order in which they are opened.
    """

    number: int
    split: str
    files: tuple[ImageFile, ...] = ()
    parts: tuple[SourcePart, ...] = ()

    @property
    def size_bytes(self) -> int:
        """About what reading it moves."""
        return sum(file.size_bytes for file in self.files) + sum(part.size_bytes for part in self.parts)


def plan_units(source: Source, options: BuildOptions) -> list[IngestUnit]:
    """Return all units of work of an ingest, in the order of their numbers.

    Raises:
        ConfigError: samples are to be held out of a source that has a split of that name already.
    """
    shard_bytes, seed, keep_order = options.shard_bytes, options.seed, options.keep_order
    planned: list[IngestUnit] = []
    if isinstance(source, ListedSource):
        splits = {split: files[: options.limit] for split, files in source.splits.items()}
        splits = hold_out(splits, options.val_fraction) if options.val_fraction else splits
        for split, files in splits.items():
            for shard in plan_shards(files, shard_bytes, seed, keep_order=keep_order):
                planned.append(IngestUnit(len(planned), split, files=tuple(shard)))
        return planned
    assert isinstance(source, StreamedSource)
    if options.val_fraction:
        _check_held_out({part.split for part in source.parts})
    for split in dict.fromkeys(part.split for part in source.parts):
        parts = [part for part in source.parts if part.split == split]
        shard_bytes_per_unit = shard_bytes * _SHARDS_PER_UNIT
        for group in group_parts(
            parts, shard_bytes_per_unit, seed, keep_order=keep_order, together=options.limit is not None
        ):
            planned.append(IngestUnit(len(planned), split, parts=tuple(group)))
    return planned


def plan_shards(
    files: Sequence[ImageFile], shard_bytes: int, seed: int, *, keep_order: bool = False
) -> list[list[ImageFile]]:
    """Deal files to shards: permute them by the seed unless they keep their order, then cut at `shard_bytes`."""
    plans: list[list[ImageFile]] = []
    room = 0
    for number in range(len(files)) if keep_order else _permuted(len(files), seed, _FILES).tolist():
        if room <= 0:
            plans.append([])
            room = shard_bytes
        plans[-1].append(files[number])
        room -= files[number].size_bytes
    return plans


def group_parts(
    parts: Sequence[SourcePart], unit_bytes: int, seed: int, *, keep_order: bool, together: bool
) -> list[list[SourcePart]]:
    """Deal parts to units: permute them by the seed unless they keep their order, then cut.

    Args:
        parts: of one split.
        unit_bytes: no unit but the last is smaller.
        seed: of the permutation.
        keep_order: leave them as they are.
        together: make one unit of all, in their order.
    """
    order = range(len(parts)) if keep_order or together else _permuted(len(parts), seed, _PARTS).tolist()
    # Few parts are spread over several units; of many, each unit reads as many as it has open at once.
    most = len(parts) if together else max(1, min(PARTS_AT_ONCE, -(-len(parts) // _UNITS_PER_SPLIT)))
    groups: list[list[SourcePart]] = []
    size_bytes = 0
    for number in order:
        if not groups or (not together and size_bytes >= unit_bytes and len(groups[-1]) >= most):
            groups.append([])
            size_bytes = 0
        groups[-1].append(parts[number])
        size_bytes += parts[number].size_bytes
    return groups


def permute_in_shard(count: int, seed: int, unit: int, ordinal: int) -> Integers:
    """Return the order of the samples within one shard of a streamed unit: `int64[count]`."""
    keys = derive_keys(seed, unit, _IN_SHARD, KeyedPermutation.num_keys)
    return KeyedPermutation(count, keys).permute(np.arange(count), np.full(count, ordinal))


def is_held_out(key: str, fraction: float) -> bool:
    """Return whether a sample belongs to the held-out share: a function of its key alone, so it never changes."""
    return int.from_bytes(blake3(key.encode("utf-8", "surrogateescape")).digest(8), "big") < fraction * 2.0**64


def hold_out(splits: Mapping[str, list[ImageFile]], fraction: float) -> dict[str, list[ImageFile]]:
    """Return the splits with a share of "train" moved to "val". Raises ConfigError, see `plan_units`."""
    _check_held_out(set(splits))
    train = splits[DEFAULT_SPLIT]
    held_out = [is_held_out(file.key, fraction) for file in train]
    chosen = {
        name: [file for file, is_out in zip(train, held_out, strict=True) if is_out == wanted]
        for name, wanted in ((DEFAULT_SPLIT, False), (HELD_OUT_SPLIT, True))
    }
    return {name: files for name, files in {**splits, **chosen}.items() if files}


def relabelled(unit: IngestUnit, labels: Sequence[int]) -> IngestUnit:
    """Return a unit whose files carry the labels that `labels` has for theirs."""
    files = [file if file.label is None else file._replace(label=labels[file.label]) for file in unit.files]
    return replace(unit, files=tuple(files))


def _permuted(count: int, seed: int, purpose: int) -> Integers:
    keys = derive_keys(seed, 0, purpose, KeyedPermutation.num_keys)
    return KeyedPermutation(count, keys).permute(np.arange(count))


def _check_held_out(splits: set[str]) -> None:
    if HELD_OUT_SPLIT in splits or DEFAULT_SPLIT not in splits:
        raise ConfigError(
            f"cannot hold out a share of {DEFAULT_SPLIT!r} as {HELD_OUT_SPLIT!r}: the source has the splits "
            f"{sorted(splits)}; leave --val-fraction away, or put all into one split with --split {DEFAULT_SPLIT}"
        )
